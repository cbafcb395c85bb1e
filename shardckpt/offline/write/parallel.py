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
    lay_out: Callable[[str, str], Layout],
    write: Callable[[Sequence[OutputFile], Publication], Hashes],
    finish: Callable[[Layout, Hashes, Publication], None],
) -> Layout:
    """Write a result with several ranks, all or nothing; a failure of one is raised on all.

    Args:
        group: The ranks.
        save: An id drawn at random, of which the first rank's counts.
        begin: Opens the publication, on the first rank.
        lay_out: Decides the files, given the publication's `unique_suffix` and the id; the same on every rank.
        write: Writes some of the payload, which ranks share out; returns the hashes of its blocks.
        finish: Writes the rest, on the first rank, given the hashes of all.

    Returns:
        What `lay_out` gave.

    Raises:
        ShardckptError: This rank failed.
        RankError: Another one did.
    """
    publication: Publication | None = None
    try:
        with group.collective("preparing the target"):
            if group.rank == 0:
                publication = begin()
        said = _SEPARATOR.join((publication.unique_suffix, save, publication.staging_url)) if publication else ""
        heard = group.broadcast(said.encode("utf-8", "surrogateescape"))  # a path on a disk is any bytes
        unique_suffix, save, place = heard.decode("utf-8", "surrogateescape").split(_SEPARATOR, 2)
        with group.collective("writing"):
            publication = publication or JoinedPublication(place)
            laid = lay_out(unique_suffix, save)
            shares = share_out(laid.payload, group.size)
            hashes = write(shares[group.rank], publication)
        told = {name: each for said in group.all_gather(_encode_hashes(hashes)) for name, each in _decode_hashes(said)}
        with group.collective("publishing"):
            if group.rank == 0:
                others = [{file.name: file.nbytes for file in share} for share in shares[1:]]
                require_files(publication.staging_url, publication.staging_url, [{}, *others])
                finish(laid, told, publication)
                publication.commit()
    except BaseException:
        if publication is not None:
            publication.rollback()
        raise
    return laid


def _encode_hashes(hashes: Hashes) -> bytes:
    return json.dumps(dict(hashes)).encode()


def _decode_hashes(said: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, tuple(each)) for name, each in json.loads(said).items())
