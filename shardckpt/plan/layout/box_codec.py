"""Boxes of named arrays as bytes, as ranks tell each other of them: names once, and numbers. Pure."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.manifest import Path


class BoxRow(NamedTuple):
    """Boxes of one array.

    Attributes:
        path: Its name.
        shape: In elements.
        dtype: Torch's name of its type.
        boxes: Some of its elements.
    """

    path: Path
    shape: Shape
    dtype: str
    boxes: tuple[Box, ...]


_Name = tuple[Path, Shape, str, int]
"""An array, and how many boxes of it there are."""


def encode_rows(rows: Iterable[BoxRow]) -> bytes:
    """Return rows as bytes.

    Args:
        rows: Each box of as many dimensions as its array.
    """
    names: list[_Name] = []
    numbers = array("q")
    for path, shape, dtype, boxes in rows:
        names.append((path, shape, dtype, len(boxes)))
        for offset, size in boxes:
            numbers.extend(offset)
            numbers.extend(size)
    head = _encode_names(tuple(names))
    return len(head).to_bytes(8, "little") + head + numbers.tobytes()


def decode_rows(data: bytes) -> list[BoxRow]:
    """Return what `encode_rows` wrote."""
    end = 8 + int.from_bytes(data[:8], "little")
    packed = array("q")
    packed.frombytes(data[end:])
    numbers, at = packed.tolist(), 0
    rows = []
    for path, shape, dtype, count in _decode_names(data[8:end]):
        dims, boxes = len(shape), []
        for _ in range(count):
            middle = at + dims
            boxes.append(Box(tuple(numbers[at:middle]), tuple(numbers[middle : middle + dims])))
            at = middle + dims
        rows.append(BoxRow(path, shape, dtype, tuple(boxes)))
    return rows


# Most ranks have the same arrays, so their names are put into words, and taken out of them, once for all.


@lru_cache(maxsize=4)
def _encode_names(names: tuple[_Name, ...]) -> bytes:
    rows = [[list(path), list(shape), dtype, count] for path, shape, dtype, count in names]
    return json.dumps(rows, separators=(",", ":")).encode()


@lru_cache(maxsize=4)
def _decode_names(head: bytes) -> list[_Name]:
    rows: list[Any] = json.loads(head)
    return [(tuple(path), tuple(shape), dtype, count) for path, shape, dtype, count in rows]
