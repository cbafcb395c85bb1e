"""Convert an array index to a box and an index in this box."""

from __future__ import annotations

from types import EllipsisType
from typing import Any

from shardckpt.boxes import Box, Shape

Index = int | slice | EllipsisType  # selects elements along one dimension, or all with an ellipsis


def index_to_box(index: Index | tuple[Index, ...], shape: Shape) -> tuple[Box, tuple[int | slice, ...]]:
    """Return the box that contains an index, and the index in this box."""
    picks = _picks(index if isinstance(index, tuple) else (index,), len(shape))
    ranges = [_range(pick, size) for pick, size in zip(picks, shape, strict=True)]
    inner = tuple(0 if isinstance(pick, int) else slice(None, None, pick.step or 1) for pick in picks)
    return Box(tuple(first for first, _ in ranges), tuple(number for _, number in ranges)), inner


def _picks(index: tuple[Index, ...], dims: int) -> list[int | slice]:
    """Return the integer or slice for each dimension."""
    given = [item for item in index if item is not Ellipsis]
    if len(given) > dims or len(index) - len(given) > 1 or not all(map(_is_pick, given)):
        raise IndexError(f"{dims} dimensions are selected by as many integers and slices, not by {index!r}")
    at = next((n for n, item in enumerate(index) if item is Ellipsis), len(index))
    fill: list[Any] = [slice(None)] * (dims - len(given))
    return [*given[:at], *fill, *given[at:]]


def _is_pick(item: object) -> bool:
    """Return True if an item selects elements along one dimension; True and False add one in torch and NumPy."""
    return isinstance(item, (int, slice)) and not isinstance(item, bool)


def _range(pick: int | slice, size: int) -> tuple[int, int]:
    """Return the first element along a dimension, and how many to read."""
    if isinstance(pick, int):
        if not -size <= pick < size:
            raise IndexError(f"index {pick} is out of range for {size} elements")
        return pick % size, 1
    numbers = range(*pick.indices(size))
    if numbers.step < 0:
        raise IndexError("a step must be positive")
    if not numbers:
        return 0, 0
    return numbers[0], numbers[-1] - numbers[0] + 1
