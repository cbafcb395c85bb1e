"""Reads that several ranks share: which segments of files, which rank reads each, and which receive it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardckpt.plan.layout.box_codec import pack_message, unpack_message

SEGMENT_BYTES = 16 << 20
"""Bytes of a file that one rank reads for others: a few requests of a store, and full blocks of the native format."""

Ids = NDArray[np.int64]
"""Numbers of segments, ascending."""


class Extent(NamedTuple):
    """Where a segment is.

    Attributes:
        file: Its file.
        start: First byte.
        stop: One after the last byte.
    """

    file: str
    start: int
    stop: int


class FileSegments:
    """The segments of a checkpoint's files, with the same numbers on every rank that knows names and sizes.

    Args:
        files: Sizes in bytes by name; one that is not there has none.
    """

    def __init__(self, files: Mapping[str, int]) -> None:
        self._names = sorted(files)
        self._files = files
        counts = (-(-max(files[name], 0) // SEGMENT_BYTES) for name in self._names)
        self._first = dict(zip(self._names, accumulate(counts, initial=0), strict=False))
        self._starts = np.array(list(self._first.values()), np.int64)

    def extent(self, number: int) -> Extent:
        """Return where a segment is."""
        name = self._names[int(np.searchsorted(self._starts, number, "right")) - 1]
        start = (number - self._first[name]) * SEGMENT_BYTES
        return Extent(name, start, min(start + SEGMENT_BYTES, self._files[name]))

    def split(self, file: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a range that are in one segment each: its number, first byte and one after the last."""
        while start < stop:
            at = start // SEGMENT_BYTES
            end = min(stop, (at + 1) * SEGMENT_BYTES)
            yield self._first[file] + at, start, end
            start = end

    def wanted(self, ranges: Iterable[tuple[str, int, int]], grain: int = 1) -> Ids:
        """Return the segments of which at least half would be read; less is cheaper to read than to send.

        Args:
            ranges: File, first byte, one after the last; disjoint.
            grain: Bytes that are read together, however few of them are wanted; a segment is some of these.
        """
        found: dict[int, int] = {}
        seen: set[tuple[str, int]] = set()
        for file, start, stop in ranges:
            if stop > self._files.get(file, -1):
                continue
            for number, low, high in self.split(file, start, stop):
                if grain > 1:
                    touched = {(file, at) for at in range(low // grain, -(-high // grain))} - seen
                    seen |= touched
                    nbytes = sum(min((at + 1) * grain, self._files[file]) - at * grain for _, at in touched)
                else:
                    nbytes = high - low
                found[number] = found.get(number, 0) + nbytes
        mine = (number for number, nbytes in found.items() if 2 * nbytes >= self._nbytes(number))
        return np.array(sorted(mine), np.int64)

    def _nbytes(self, number: int) -> int:
        _, start, stop = self.extent(number)
        return stop - start


class BroadcastGroup(NamedTuple):
    """Ranks that read the same segments; they take turns in reading and sending them.

    Attributes:
        members: The ranks, ascending.
        ids: The segments; the one at position `p` is read by member `p % len(members)`, in round `p // len(members)`.
    """

    members: tuple[int, ...]
    ids: Ids

    @property
    def rounds(self) -> int:
        """How often every rank has a turn."""
        return -(-len(self.ids) // len(self.members))

    def turns(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield which rank reads which segment in a round."""
        first = number * len(self.members)
        yield from zip(self.members, self.ids[first : first + len(self.members)].tolist(), strict=False)


def assign_segments(wanted: Sequence[Ids]) -> list[list[BroadcastGroup]]:
    """Return for each rank its broadcast groups, in an order that is the same for all."""
    ids = np.concatenate([*wanted, np.array([], np.int64)])
    ranks = np.repeat(np.arange(len(wanted)), [len(each) for each in wanted])
    order = np.lexsort((ranks, ids))
    ids, ranks = ids[order], ranks[order]
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    ends = np.flatnonzero(np.diff(ids, append=-1)) + 1
    found: dict[bytes, list[int]] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if end - start > 1:
            found.setdefault(ranks[start:end].tobytes(), []).append(int(ids[start]))
    groups: list[list[BroadcastGroup]] = [[] for _ in wanted]
    for members, numbers in found.items():
        group = BroadcastGroup(tuple(np.frombuffer(members, ranks.dtype).tolist()), np.array(numbers, np.int64))
        for rank in group.members:
            groups[rank].append(group)
    return groups


def encode_groups(groups: Sequence[BroadcastGroup]) -> bytes:
    """Return broadcast groups as bytes."""
    head = [[list(each.members), len(each.ids)] for each in groups]
    return pack_message(head, b"".join(each.ids.tobytes() for each in groups))


def decode_groups(data: bytes) -> list[BroadcastGroup]:
    """Return what `encode_groups` wrote."""
    rows, blob = unpack_message(data)
    ids = np.frombuffer(blob, np.int64)
    ends = list(accumulate((count for _, count in rows), initial=0))
    return [
        BroadcastGroup(tuple(members), ids[at : at + count]) for (members, count), at in zip(rows, ends, strict=False)
    ]
