"""What several ranks read alike: which stretches of files, who reads each of them, and who is sent it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

STRETCH_BYTES = 16 << 20
"""Bytes of a file that one rank reads for others: a few requests of a store, and whole blocks of our own format."""

Ids = NDArray[np.int64]
"""Numbers of stretches, ascending."""


class Extent(NamedTuple):
    """Where a stretch lies.

    Attributes:
        file: Its file.
        start: First byte.
        stop: One after the last byte.
    """

    file: str
    start: int
    stop: int


class Stretches:
    """The stretches of a checkpoint's files, numbered alike by whoever knows names and sizes.

    Args:
        files: Sizes in bytes by name; one that is not there has none.
    """

    def __init__(self, files: Mapping[str, int]) -> None:
        self._names = sorted(files)
        self._files = files
        counts = (-(-max(files[name], 0) // STRETCH_BYTES) for name in self._names)
        self._first = dict(zip(self._names, accumulate(counts, initial=0), strict=False))
        self._starts = np.array(list(self._first.values()), np.int64)

    def extent(self, number: int) -> Extent:
        """Return where a stretch lies."""
        name = self._names[int(np.searchsorted(self._starts, number, "right")) - 1]
        start = (number - self._first[name]) * STRETCH_BYTES
        return Extent(name, start, min(start + STRETCH_BYTES, self._files[name]))

    def cut(self, file: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the parts of a range that lie in one stretch each: its number, first byte and one after the last."""
        while start < stop:
            at = start // STRETCH_BYTES
            end = min(stop, (at + 1) * STRETCH_BYTES)
            yield self._first[file] + at, start, end
            start = end

    def wanted(self, ranges: Iterable[tuple[str, int, int]], grain: int = 1) -> Ids:
        """Return the stretches of which at least half would be read; less is cheaper read by oneself than sent whole.

        Args:
            ranges: File, first byte, one after the last; disjoint.
            grain: Bytes that are read together, however few of them are wanted; a stretch is some of these.
        """
        found: dict[int, int] = {}
        seen: set[tuple[str, int]] = set()
        for file, start, stop in ranges:
            if stop > self._files.get(file, -1):
                continue
            for number, low, high in self.cut(file, start, stop):
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


class Circle(NamedTuple):
    """Ranks that want the same stretches; they take turns in reading them.

    Attributes:
        members: The ranks, ascending.
        ids: The stretches; the one at position `p` is read by member `p % len(members)`, in round `p // len(members)`.
    """

    members: tuple[int, ...]
    ids: Ids

    @property
    def rounds(self) -> int:
        """How often everybody has a turn."""
        return -(-len(self.ids) // len(self.members))

    def turns(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield who reads which stretch in a round."""
        first = number * len(self.members)
        yield from zip(self.members, self.ids[first : first + len(self.members)].tolist(), strict=False)


def share_out(wanted: Sequence[Ids]) -> list[list[Circle]]:
    """Return for each rank the circles that it is in, in an order that is the same for all.

    Args:
        wanted: For each rank the stretches it wants.
    """
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
    circles: list[list[Circle]] = [[] for _ in wanted]
    for members, numbers in found.items():
        circle = Circle(tuple(np.frombuffer(members, ranks.dtype).tolist()), np.array(numbers, np.int64))
        for rank in circle.members:
            circles[rank].append(circle)
    return circles


def encode_circles(circles: Sequence[Circle]) -> bytes:
    """Return circles as bytes, as one rank tells another."""
    head = json.dumps([[list(each.members), len(each.ids)] for each in circles]).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(each.ids.tobytes() for each in circles)


def decode_circles(data: bytes) -> list[Circle]:
    """Return what `encode_circles` wrote."""
    end = 8 + int.from_bytes(data[:8], "little")
    rows: list[Any] = json.loads(data[8:end])
    ids = np.frombuffer(data[end:], np.int64)
    ends = list(accumulate((count for _, count in rows), initial=0))
    return [Circle(tuple(members), ids[at : at + count]) for (members, count), at in zip(rows, ends, strict=False)]
