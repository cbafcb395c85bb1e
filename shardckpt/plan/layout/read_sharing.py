"""Plan reads that several ranks share: segments, readers and receivers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shardckpt.plan.layout.box_codec import pack_message, unpack_message

if TYPE_CHECKING:
    from numpy.typing import NDArray

# One rank reads a segment for others: a few requests, and a multiple of the native block size.
SEGMENT_BYTES = 16 << 20

Ids: TypeAlias = "NDArray[np.int64]"  # segment numbers, in ascending order


class Extent(NamedTuple):
    """A segment's location."""

    file: str
    start: int  # first byte
    stop: int  # exclusive


class FileSegments:
    """Segments in a checkpoint's files. Ranks with equal names and sizes number them equally."""

    def __init__(self, files: Mapping[str, int]) -> None:
        self._names = sorted(files)
        self._files = files
        # A missing file has a negative size, and no segments.
        counts = (-(-max(files[name], 0) // SEGMENT_BYTES) for name in self._names)
        self._first = dict(zip(self._names, accumulate(counts, initial=0), strict=False))
        self._starts = np.array(list(self._first.values()), np.int64)

    def extent(self, number: int) -> Extent:
        """Locate a segment."""
        name = self._names[int(np.searchsorted(self._starts, number, "right")) - 1]
        start = (number - self._first[name]) * SEGMENT_BYTES
        return Extent(name, start, min(start + SEGMENT_BYTES, self._files[name]))

    def split(self, file: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Split a range at segment borders; yield number, start and end of each part. The end is exclusive."""
        while start < stop:
            at = start // SEGMENT_BYTES
            end = min(stop, (at + 1) * SEGMENT_BYTES)
            yield self._first[file] + at, start, end
            start = end

    def wanted(self, ranges: Iterable[tuple[str, int, int]], grain: int = 1) -> Ids:
        """Return segments that would be read by half or more; reading less is cheaper than sending."""
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
                found[number] = found.get(number, 0) + nbytes  # ranges are disjoint
        mine = (number for number, nbytes in found.items() if 2 * nbytes >= self._nbytes(number))
        return np.array(sorted(mine), np.int64)

    def _nbytes(self, number: int) -> int:
        _, start, stop = self.extent(number)
        return stop - start


class BroadcastGroup(NamedTuple):
    """Ranks that read the same segments, and take turns in reading and sending them."""

    members: tuple[int, ...]  # in ascending order
    ids: Ids  # member `p % len(members)` reads the one at position `p`, in round `p // len(members)`

    @property
    def rounds(self) -> int:
        """Rounds in which every member has a turn."""
        return -(-len(self.ids) // len(self.members))

    def turns(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the reading rank and the segment for each turn in a round."""
        first = number * len(self.members)
        yield from zip(self.members, self.ids[first : first + len(self.members)].tolist(), strict=False)


def assign_segments(wanted: Sequence[Ids]) -> list[list[BroadcastGroup]]:
    """Return each rank's broadcast groups, in the same order on all ranks."""
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
    """Invert `encode_groups`."""
    rows, blob = unpack_message(data)
    ids = np.frombuffer(blob, np.int64)
    ends = list(accumulate((count for _, count in rows), initial=0))
    return [
        BroadcastGroup(tuple(members), ids[at : at + count]) for (members, count), at in zip(rows, ends, strict=False)
    ]
