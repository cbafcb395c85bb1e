"""Statistics over a tensor's values, or over a part, which merge exactly."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

STATS_BYTES = 64  # bytes of packed statistics

_PACKED = struct.Struct(">4Q4d")


class ValueStats(NamedTuple):
    """Statistics over some values; complex numbers count by their magnitude."""

    nans: int = 0  # number of NaNs
    infs: int = 0  # number of infinities
    zeros: int = 0
    finite: int = 0
    min: float = math.inf  # smallest finite value; infinity without one
    max: float = -math.inf  # largest finite value; negative infinity without one
    total: float = 0.0  # sum of the finite values
    squares: float = 0.0  # sum of the finite values' squares

    @property
    def size(self) -> int:
        """Number of values."""
        return self.nans + self.infs + self.finite

    def may_describe(self, size: int) -> bool:
        """Return True if some values can have these statistics; a damaged manifest's may contradict each other."""
        has_extremes = not self.finite or -math.inf < self.min <= self.max < math.inf
        return self.size == size and self.zeros <= self.finite and self.squares >= 0 and has_extremes

    def pack(self) -> bytes:
        """Return the statistics as 64 bytes: four counts and four doubles, big-endian."""
        return _PACKED.pack(*self)


def unpack_stats(data: bytes) -> list[ValueStats]:
    """Return statistics that were packed back to back."""
    return [ValueStats(*fields) for fields in _PACKED.iter_unpack(data)]


def merge_stats(parts: Iterable[ValueStats]) -> ValueStats:
    """Merge the parts' statistics: counts and extremes exactly, sums rounded once."""
    nans, infs, zeros, finite, least, largest, totals, squares = zip(ValueStats(), *parts, strict=True)
    return ValueStats(
        sum(nans), sum(infs), sum(zeros), sum(finite), min(least), max(largest), _add(totals), _add(squares)
    )


def _add(numbers: Iterable[float]) -> float:
    """Return the sum in any order; infinite, or NaN, if it is beyond a double."""
    numbers = list(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return sum(numbers)
