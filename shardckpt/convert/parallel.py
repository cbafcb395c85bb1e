"""One conversion by several ranks: each writes some of the payload files, the first begins and ends the publication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heapify, heapreplace
from typing import TypeVar

from shardckpt.convert.stream import Payload
from shardckpt.groups import Group, joined_ranks
from shardckpt.storage.joined_publication import JoinedPublication
from shardckpt.storage.publication import Publication

_Laid = TypeVar("_Laid")
_SEPARATOR = "\0"


@contextmanager
def ranks() -> Iterator[Group]:
    """Yield the ranks that were started together, by `torchrun` or by the caller's own job."""
    with joined_ranks() as group:
        yield group


def share_out(files: Sequence[Payload], ranks: int) -> list[list[Payload]]:
    """Return what each rank writes: the largest first, by the one that has least to write; the same on every rank."""
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    mine: list[list[Payload]] = [[] for _ in range(ranks)]
    for file in sorted(files, key=lambda each: (-each.nbytes, each.name)):
        load, rank = loads[0]
        mine[rank].append(file)
        heapreplace(loads, (load + file.nbytes, rank))
    return mine


def publish_together(
    group: Group,
    begin: Callable[[], Publication],
    lay_out: Callable[[str], _Laid],
    payload: Callable[[_Laid], Sequence[Payload]],
    write: Callable[[Sequence[Payload], Publication], None],
    finish: Callable[[_Laid, Publication], None],
) -> _Laid:
    """Write a result with several ranks: it appears whole, or not at all, and a failure of one is raised on all.

    Args:
        group: The ranks.
        begin: Opens the publication, on the first rank.
        lay_out: Decides the files, given the publication's `fresh`; the same on every rank.
        payload: Returns the files of tensor data, which ranks share out.
        write: Writes some of them.
        finish: Writes the rest, on the first rank.

    Returns:
        What `lay_out` gave.

    Raises:
        ShardckptError: This rank failed.
        RankError: Another one did.
    """
    publication: Publication | None = None
    try:
        with group.together("preparing the target") as word:
            if group.rank == 0:
                publication = begin()
                word.said = f"{publication.fresh}{_SEPARATOR}{publication.place}".encode()
        fresh, _, place = word.heard[0].rstrip(b"\0").decode().partition(_SEPARATOR)
        publication = publication or JoinedPublication(place)
        with group.together("writing"):
            laid = lay_out(fresh)
            write(share_out(payload(laid), group.size)[group.rank], publication)
        with group.together("publishing"):
            if group.rank == 0:
                finish(laid, publication)
                publication.finish()
    except BaseException:
        if publication is not None:
            publication.drop()
        raise
    return laid
