"""One conversion by several ranks: each writes some of the payload files, the first begins and ends the publication."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heapreplace

from shardckpt.groups import Group, init_gloo_group
from shardckpt.offline.write.stream import OutputFile
from shardckpt.offline.write.target_writer import Hashes, Layout
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import JoinedPublication, require_files

_SEPARATOR = "\0"


@contextmanager
def ranks() -> Iterator[Group]:
    """Yield the ranks that were started together, by `torchrun` or by the caller's own job."""
    with init_gloo_group() as group:
        yield group


def share_out(files: Sequence[OutputFile], ranks: int) -> list[list[OutputFile]]:
    """Return what each rank writes: the largest first, by the one that has least to write; the same on every rank."""
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    mine: list[list[OutputFile]] = [[] for _ in range(ranks)]
    for file in sorted(files, key=lambda each: (-each.nbytes, each.name)):
        load, rank = loads[0]
        mine[rank].append(file)
        heapreplace(loads, (load + file.nbytes, rank))
    return mine


def publish_together(
    group: Group,
    save: str,
    begin: Callable[[], Publication],
    plan_layout: Callable[[str, str], Layout],
    write: Callable[[Sequence[OutputFile], Publication], Hashes],
    finish: Callable[[Layout, Hashes, Publication], None],
) -> Layout:
    """Write a result with several ranks, all or nothing; a failure of one is raised on all.

    Args:
        group: The ranks.
        save: An id drawn at random, of which rank 0's counts.
        begin: Opens the publication, on rank 0.
        plan_layout: Decides the files, given the publication's `unique_suffix` and the id; the same on every rank.
        write: Writes some of the payload, which ranks share out; returns the hashes of its blocks.
        finish: Writes the rest, on rank 0, given the hashes of all.

    Returns:
        The result of `plan_layout`.

    Raises:
        ShardckptError: This rank failed.
        RankError: Another one did.
    """
    publication: Publication | None = None
    try:
        with group.collective("preparing the target"):
            if group.rank == 0:
                publication = begin()
        message = _SEPARATOR.join((publication.unique_suffix, save, publication.staging_url)) if publication else ""
        received = group.broadcast(message.encode("utf-8", "surrogateescape"))  # a path on a disk is any bytes
        unique_suffix, save, place = received.decode("utf-8", "surrogateescape").split(_SEPARATOR, 2)
        with group.collective("writing"):
            publication = publication or JoinedPublication(place)
            layout = plan_layout(unique_suffix, save)
            shares = share_out(layout.payload, group.size)
            hashes = write(shares[group.rank], publication)
        messages = group.all_gather(_encode_hashes(hashes))
        all_hashes = {name: blocks for message in messages for name, blocks in _decode_hashes(message)}
        with group.collective("publishing"):
            if group.rank == 0:
                others = [{file.name: file.nbytes for file in share} for share in shares[1:]]
                require_files(publication.staging_url, publication.staging_url, [{}, *others])
                finish(layout, all_hashes, publication)
                publication.commit()
    except BaseException:
        if publication is not None:
            publication.rollback()
        raise
    return layout


def _encode_hashes(hashes: Hashes) -> bytes:
    return json.dumps(dict(hashes)).encode()


def _decode_hashes(message: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, tuple(each)) for name, each in json.loads(message).items())
