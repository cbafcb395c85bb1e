"""Read stored tensors as numbers, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardckpt.dtypes import bits
from shardckpt.format.chunk_reader import read_blocks
from shardckpt.format.encodings.element_values import HALF_COMPLEX, numpy_dtype, widen_half_complex
from shardckpt.format.reader import Reader
from shardckpt.manifest import TensorEntry, dotted
from shardckpt.offline.write.numpy_casts import cast_into

BLOCK_BYTES = 1 << 21  # per read; a block takes up to 8 times as many as float64
StoredTensor = tuple[Reader, TensorEntry]  # without `Lazy` pieces


def read_values(tensor: StoredTensor, elements: int) -> Iterator[bytearray]:
    """Yield the elements in the dtype that readers deliver, at most `elements` at a time."""
    reader, entry = tensor
    for raw in read_blocks(reader, entry, elements * bits(entry.stored) // 8):
        yield _convert(raw, entry)


def to_numbers(data: bytearray, dtype: str) -> NDArray[Any]:
    """Return elements as float64 or complex128; as bytes if NumPy lacks the dtype."""
    if dtype in HALF_COMPLEX:
        return widen_half_complex(data, dtype).astype(np.complex128)
    try:
        kind = numpy_dtype(dtype)
    except TypeError:
        return np.frombuffer(data, np.uint8).astype(np.float64)
    values = np.frombuffer(data, kind)
    return values.astype(np.complex128 if kind.kind == "c" else np.float64)


def sum_squares(values: NDArray[Any]) -> float:
    """Sum the squares of finite numbers."""
    flat = np.abs(values).ravel()
    flat = np.where(np.isfinite(flat), flat, 0.0)
    return float(np.dot(flat, flat))


def _convert(data: bytearray, entry: TensorEntry) -> bytearray:
    """Return elements in the dtype that readers deliver."""
    if entry.dtype == entry.stored:
        return data
    out = bytearray(len(data) * bits(entry.dtype) // bits(entry.stored))
    name = dotted(entry.path)
    cast_into(memoryview(data), entry.stored, memoryview(out), entry.dtype, name=name, allow_overflow=True)
    return out
