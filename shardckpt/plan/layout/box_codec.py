"""Encode messages between ranks as bytes: JSON with a block, or boxes."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardckpt.boxes import Box, Shape
from shardckpt.manifest import Path

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENCODER = json.JSONEncoder(separators=(",", ":"))


def pack_message(head: object, blob: bytes = b"") -> bytes:
    """Return JSON and bytes as one message."""
    return _join_message(_ENCODER.encode(head).encode(), blob)


def unpack_message(data: bytes) -> tuple[Any, bytes]:
    """Invert `pack_message`."""
    head, blob = _split_message(data)
    return json.loads(head), blob


def _join_message(head: bytes, blob: bytes) -> bytes:
    return len(head).to_bytes(8, "little") + head + blob


def _split_message(data: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


class BoxRow(NamedTuple):
    """One array's boxes."""

    path: Path
    shape: Shape
    dtype: str  # in torch's spelling
    boxes: tuple[Box, ...]


class ArrayNames:
    """Arrays without their boxes. Ranks with the same arrays share one object."""

    def __init__(self, head: bytes, arrays: tuple[_Name, ...]) -> None:
        self.head = head
        self.arrays = arrays
        self.dims: NDArray[np.int64] = np.array([len(shape) for _, shape, _ in arrays], np.int64)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, ArrayNames) and self.head == other.head)

    def __hash__(self) -> int:
        return hash(self.head)


_Name = tuple[Path, Shape, str]  # path, shape, dtype


class PackedRows(NamedTuple):
    """Encoded rows: millions of boxes are planned without creating objects."""

    names: ArrayNames
    counts: NDArray[np.int64]  # boxes per array
    numbers: NDArray[np.int64]  # every box's offset and size, concatenated

    def encode(self) -> bytes:
        """Return the rows as bytes."""
        return _join_message(self.names.head, self.counts.tobytes() + self.numbers.tobytes())

    @classmethod
    def decode(cls, data: bytes) -> PackedRows:
        """Invert `encode`."""
        head, blob = _split_message(data)
        names = _decode_names(head)
        table = np.frombuffer(blob, np.int64)
        return cls(names, table[: len(names.arrays)], table[len(names.arrays) :])

    def unpack(self, rows: Iterable[int] | None = None) -> list[BoxRow]:
        """Return rows with their boxes."""
        numbers, counts = self.numbers, self.counts.tolist()
        ends = (self.counts * 2 * self.names.dims).cumsum().tolist()
        found = []
        for row in range(len(counts)) if rows is None else rows:
            path, shape, dtype = self.names.arrays[row]
            dims, count = len(shape), counts[row]
            mine = numbers[ends[row] - 2 * dims * count : ends[row]].tolist()
            boxes = (
                [
                    Box(tuple(mine[at : at + dims]), tuple(mine[at + dims : at + 2 * dims]))
                    for at in range(0, 2 * dims * count, 2 * dims)
                ]
                if dims
                else [Box((), ())] * count
            )
            found.append(BoxRow(path, shape, dtype, tuple(boxes)))
        return found

    def drop_boxes(self) -> PackedRows:
        """Return the rows without boxes."""
        return PackedRows(self.names, np.zeros_like(self.counts), self.numbers[:0])

    def add_boxes(self, boxes: Mapping[int, Sequence[Box]]) -> PackedRows:
        """Return the rows with more boxes."""
        counts = self.counts.copy()
        ends = (counts * 2 * self.names.dims).cumsum()
        parts, at = [], 0
        for row, added in sorted(boxes.items()):
            counts[row] = len(added)
            parts += [self.numbers[at : ends[row]], np.array([*_flatten(added)], np.int64)]
            at = ends[row]
        return PackedRows(self.names, counts, np.concatenate([*parts, self.numbers[at:]]))


def _flatten(boxes: Iterable[Box]) -> Iterator[int]:
    for offset, size in boxes:
        yield from offset
        yield from size


def encode_rows(rows: Iterable[BoxRow]) -> bytes:
    """Return rows as bytes."""
    names: list[_Name] = []
    counts, numbers = array("q"), array("q")
    for path, shape, dtype, boxes in rows:
        names.append((path, shape, dtype))
        counts.append(len(boxes))
        for offset, size in boxes:
            numbers.extend(offset)
            numbers.extend(size)
    return _join_message(_encode_names(tuple(names)), counts.tobytes() + numbers.tobytes())


# Most ranks have the same arrays, so their names are encoded and decoded only once.


@lru_cache(maxsize=4)
def _encode_names(names: tuple[_Name, ...]) -> bytes:
    rows = [[list(path), list(shape), dtype] for path, shape, dtype in names]
    return json.dumps(rows, separators=(",", ":")).encode()


@lru_cache(maxsize=4)
def _decode_names(head: bytes) -> ArrayNames:
    rows: list[Any] = json.loads(head)
    return ArrayNames(head, tuple((tuple(path), tuple(shape), dtype) for path, shape, dtype in rows))
