"""Cache fetched ranges of remote files, and plan requests."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Requests are rounded to blocks with so many bytes. A transfer takes about as long as an object store's latency.
BLOCK = 128 << 10

GAP = BLOCK  # maximum bytes between two wanted ranges that one request fetches together

# Files with at most so many bytes are fetched in full: header, middle and end will all be read.
FULL_FILE = 1 << 20

MAX_REQUEST = 8 << 20  # bytes; several requests run concurrently, and a failed one is cheap to repeat


class ByteRange(NamedTuple):
    """A range of bytes in one file."""

    start: int
    stop: int  # exclusive


class BlockCache:
    """Disjoint file ranges, in full blocks. The least recently used are dropped beyond the budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget  # bytes
        self._held = 0
        self._starts: dict[str, list[int]] = {}
        self._pieces: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def add(self, name: str, start: int, data: bytes) -> None:
        """Keep a range of a file; ignored if a part of it is cached already."""
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
        """Yield start and bytes of each cached range that overlaps, in file order."""
        starts = self._starts.get(name, [])
        for piece_start in starts[max(bisect_right(starts, start) - 1, 0) :]:
            if piece_start >= stop:
                return
            data = self._pieces[name, piece_start]
            if piece_start + len(data) > start:
                yield piece_start, data

    def copy(self, name: str, start: int, buffer: memoryview) -> list[ByteRange]:
        """Copy the cached parts of a range into `buffer`, and return the missing parts."""
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
        """Return True if a byte of a range is cached."""
        return any(True for _ in self.overlapping(name, start, stop))

    def forget(self, name: str) -> None:
        """Drop all ranges of a file."""
        for start in self._starts.pop(name, []):
            self._held -= len(self._pieces.pop((name, start)))


def plan_requests(cache: BlockCache, name: str, size: int, missing: Iterable[ByteRange]) -> list[ByteRange]:
    """Return few ranges to fetch that cover all `missing` ranges."""
    # The cache has full blocks only, so the block of a missing byte is missing completely.
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
    """Split a range into requests of about equal size."""
    count = -(-(span.stop - span.start) // MAX_REQUEST)
    step = -(-(span.stop - span.start) // count)
    step = -(-step // BLOCK) * BLOCK
    for start in range(span.start, span.stop, step):
        yield ByteRange(start, min(start + step, span.stop))
