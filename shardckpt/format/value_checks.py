"""Check values from untrusted files: lists, names, counts and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardckpt.boxes import Shape
from shardckpt.errors import FormatError

MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 60


def check_list(value: object, where: str = "") -> Sequence[object]:
    """Return a list or tuple."""
    if not isinstance(value, list | tuple):
        raise FormatError("a value must be a list", where=where, found=type(value).__name__)
    return value


def check_text(value: object, where: str = "") -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise FormatError("a name must be text", where=where, found=type(value).__name__)
    return value


def check_count(value: object, most: int = MAX_ELEMENTS, where: str = "") -> int:
    """Return an integer from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise FormatError("a number is not an integer, negative or too large", where=where, found=value)
    return value


def check_counts(value: object, most: int = MAX_ELEMENTS, where: str = "") -> Shape:
    """Return a list of integers from 0 to `most`."""
    counts: list[int] = []
    for n in check_list(value, where):
        if type(n) is not int or not 0 <= n <= most:
            raise FormatError("a number is not an integer, negative or too large", where=where, found=value)
        counts.append(n)
    return tuple(counts)


def is_shape(value: object) -> bool:
    """Return True for a shape of at most 64 dimensions and `MAX_ELEMENTS` elements."""
    return (
        isinstance(value, list | tuple)
        and len(value) <= MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value)
        and prod(value) <= MAX_ELEMENTS
    )


def check_shape(value: object, where: str = "") -> Shape:
    """Return a shape."""
    shape = check_counts(value, where=where)
    if len(shape) > MAX_DIMENSIONS or prod(shape) > MAX_ELEMENTS:
        raise FormatError("a tensor has more elements than any machine holds", where=where, found=shape)
    return shape
