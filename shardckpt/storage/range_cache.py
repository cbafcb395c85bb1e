"""What was fetched of remote files, and which requests would fetch the rest. Pure bookkeeping, no requests."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

BLOCK = 128 << 10
"""Bytes that requests are rounded to. Fetching them takes an object store about as long as answering at all."""

GAP = BLOCK
"""Unwanted bytes between two wanted ranges that are fetched rather than skipped by a request of their own."""

FULL_FILE = 1 << 20
"""Files up to this many bytes are fetched in full, since their header, middle and end will all be wanted."""

MAX_REQUEST = 8 << 20
"""Bytes of one request at most: several of them run at once, and one that breaks costs little."""


class ByteRange(NamedTuple):
    """Bytes of one file.

    Attributes:
        start: First byte.
        stop: One after the last byte.
    """

    start: int
    stop: int


class BlockCache:
    """Pieces of files, full blocks each, disjoint; the least recently used go when their bytes exceed the budget.

    Args:
        budget: Bytes to keep.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._starts: dict[str, list[int]] = {}
        self._pieces: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def add(self, name: str, start: int, data: bytes) -> None:
        """Keep bytes of a file; ignored where some of them are held already."""
        if not data or any(self.overlapping(name, start, start + len(data))):
            return
        insort(self._starts.setdefault(name, []), start)
        self._pieces[name, start] = data
        self._held += len(data)
        while self._held > self._budget:
            (old_name, old_start), old = self._pieces.popitem(last=False)
            self._starts[old_name].remove(old_start)
            self._held -= len(old)

    def overlapping(self, name: str, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield first byte and bytes of every held piece that overlaps a range, in file order."""
        starts = self._starts.get(name, [])
        for piece_start in starts[max(bisect_right(starts, start) - 1, 0) :]:
            if piece_start >= stop:
                return
            data = self._pieces[name, piece_start]
            if piece_start + len(data) > start:
                yield piece_start, data

    def copy(self, name: str, start: int, buffer: memoryview) -> list[ByteRange]:
        """Copy what is held of a range into `buffer`, and return what is not."""
        stop, missing, position = start + len(buffer), [], start
        for piece_start, data in list(self.overlapping(name, start, stop)):
            self._pieces.move_to_end((name, piece_start))
            low, high = max(piece_start, start), min(piece_start + len(data), stop)
            buffer[low - start : high - start] = memoryview(data)[low - piece_start : high - piece_start]
            if low > position:
                missing.append(ByteRange(position, low))
            position = high
        if position < stop:
            missing.append(ByteRange(position, stop))
        return missing

    def holds(self, name: str, start: int, stop: int) -> bool:
        """Return whether some byte of a range is held."""
        return any(True for _ in self.overlapping(name, start, stop))

    def forget(self, name: str) -> None:
        """Drop all of a file."""
        for start in self._starts.pop(name, []):
            self._held -= len(self._pieces.pop((name, start)))


def plan_requests(cache: BlockCache, name: str, size: int, missing: Iterable[ByteRange]) -> list[ByteRange]:
    """Return few ranges to fetch that hold all `missing` ones and nothing that is held already.

    Args:
        cache: The pieces that are there; full blocks, so that all of a missing byte's block is missing.
        name: The file.
        size: Its bytes.
        missing: Wanted ranges of which nothing is held.
    """
    merged: list[ByteRange] = []
    for start, stop in sorted(missing):
        wide = ByteRange(start // BLOCK * BLOCK, min(-(-stop // BLOCK) * BLOCK, size))
        if size <= FULL_FILE and not cache.holds(name, 0, size):
            wide = ByteRange(0, size)
        last = merged[-1] if merged else None
        if last and wide.start - last.stop <= GAP and not cache.holds(name, last.stop, wide.start):
            merged[-1] = ByteRange(last.start, max(last.stop, wide.stop))
        else:
            merged.append(wide)
    return [part for span in merged for part in _split(span)]


def _split(span: ByteRange) -> Iterator[ByteRange]:
    """Divide a range into requests of about equal size."""
    count = -(-(span.stop - span.start) // MAX_REQUEST)
    step = -(-(span.stop - span.start) // count)
    step = -(-step // BLOCK) * BLOCK
    for start in range(span.start, span.stop, step):
        yield ByteRange(start, min(start + step, span.stop))
