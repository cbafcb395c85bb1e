"""Encode messages between ranks as bytes: JSON with a block, or boxes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.manifest import Path


def pack_message(head: object, blob: bytes = b"") -> bytes:
    """Return JSON and a block of bytes as one message."""
    return _join_message(json.dumps(head, separators=(",", ":")).encode(), blob)


def unpack_message(data: bytes) -> tuple[Any, bytes]:
    """Decode the result of `pack_message`."""
    head, blob = _split_message(data)
    return json.loads(head), blob


def _join_message(head: bytes, blob: bytes) -> bytes:
    return len(head).to_bytes(8, "little") + head + blob


def _split_message(data: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


class BoxRow(NamedTuple):
    """Boxes of one array.

    Attributes:
        path: Path of the array.
        shape: Shape in elements.
        dtype: Dtype in torch's spelling.
        boxes: Boxes in the array.
    """

    path: Path
    shape: Shape
    dtype: str
    boxes: tuple[Box, ...]


_Name = tuple[Path, Shape, str, int]
"""Path, shape and dtype of an array, and its number of boxes."""


def encode_rows(rows: Iterable[BoxRow]) -> bytes:
    """Return rows as bytes."""
    names: list[_Name] = []
    numbers = array("q")
    for path, shape, dtype, boxes in rows:
        names.append((path, shape, dtype, len(boxes)))
        for offset, size in boxes:
            numbers.extend(offset)
            numbers.extend(size)
    return _join_message(_encode_names(tuple(names)), numbers.tobytes())


def decode_rows(data: bytes) -> list[BoxRow]:
    """Decode the result of `encode_rows`."""
    head, blob = _split_message(data)
    packed = array("q")
    packed.frombytes(blob)
    numbers, at = packed.tolist(), 0
    rows = []
    for path, shape, dtype, count in _decode_names(head):
        dims, boxes = len(shape), []
        for _ in range(count):
            middle = at + dims
            boxes.append(Box(tuple(numbers[at:middle]), tuple(numbers[middle : middle + dims])))
            at = middle + dims
        rows.append(BoxRow(path, shape, dtype, tuple(boxes)))
    return rows


# Most ranks have the same arrays, so their names are encoded and decoded only once.


@lru_cache(maxsize=4)
def _encode_names(names: tuple[_Name, ...]) -> bytes:
    rows = [[list(path), list(shape), dtype, count] for path, shape, dtype, count in names]
    return json.dumps(rows, separators=(",", ":")).encode()


@lru_cache(maxsize=4)
def _decode_names(head: bytes) -> list[_Name]:
    rows: list[Any] = json.loads(head)
    return [(tuple(path), tuple(shape), dtype, count) for path, shape, dtype, count in rows]
