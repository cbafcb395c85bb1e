"""Compare two tensors block by block, in bounded memory: bits, tolerances, distances."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardckpt.dtypes import HALF_BYTE_PAIR, bits
from shardckpt.encodings.element_values import HALF_COMPLEX, numpy_dtype, widen_half_complex
from shardckpt.manifest import TensorEntry, dotted
from shardckpt.offline.compare.leaves import Tolerance
from shardckpt.offline.results.comparison import TensorDifference
from shardckpt.offline.results.contents import describe_entry
from shardckpt.offline.write.numpy_casts import cast_into
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import read_blocks


def compare_tensors(name: str, a: StoredTensor, b: StoredTensor, tolerance: Tolerance) -> TensorDifference | None:
    """Compare two tensors with one shape; return None if they are equal."""
    (_, left), (_, right) = a, b
    same_type = left.dtype == right.dtype
    have_numbers = _has_numbers(left.dtype) and _has_numbers(right.dtype)
    is_tolerant = same_type and not tolerance.is_exact and _is_tolerated(left.dtype)
    distance = _Distance()
    equal = same_type
    elements = max(BLOCK_BYTES * 8 // max(bits(left.stored), bits(right.stored)), 1)
    for x, y in zip(read_values(a, elements), read_values(b, elements), strict=True):
        if same_type and x == y:  # equal bits: no distance to compute
            continue
        u, v = (to_numbers(x, left.dtype), to_numbers(y, right.dtype)) if have_numbers else (None, None)
        if u is None or v is None or not (is_tolerant and _are_close(u, v, tolerance)):
            equal = False
        if u is not None and v is not None:
            distance = distance.with_block(u, v)
    if equal:
        return None
    kind: Literal["values", "dtype"] = "values" if same_type else "dtype"
    both = describe_entry(name, left), describe_entry(name, right)
    if not have_numbers:
        return TensorDifference(name, kind, *both)
    return TensorDifference(
        name,
        kind,
        *both,
        max_abs=distance.max_abs,
        max_rel=distance.max_rel,
        nans=(distance.nans_a, distance.nans_b),
        l2=math.sqrt(distance.squares),
        norm=_compute_norm(b, elements),
    )


def _compute_norm(tensor: StoredTensor, elements: int) -> float:
    """Return the L2 norm over finite elements."""
    total = 0.0
    for data in read_values(tensor, elements):
        total += sum_squares(to_numbers(data, tensor[1].dtype))
    return math.sqrt(total)


def _has_numbers(dtype: str) -> bool:
    """Return True if elements are numbers with complete bytes."""
    return bits(dtype) % 8 == 0 and dtype != HALF_BYTE_PAIR


def _is_tolerated(dtype: str) -> bool:
    """Return True if tolerances apply: to float and complex dtypes that can be read as numbers."""
    return dtype.startswith(("float", "bfloat", "complex")) and _has_numbers(dtype)


def _are_close(x: NDArray[Any], y: NDArray[Any], tolerance: Tolerance) -> bool:
    """Return True if all numbers are within the tolerance."""
    if x.dtype.kind == "c":  # compare real and imaginary parts
        x, y = x.view(np.float64), y.view(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        is_near = np.abs(x - y) <= tolerance.atol + tolerance.rtol * np.abs(y)
    is_near &= np.isfinite(x) & np.isfinite(y)
    return bool(np.all(is_near | (x == y) | (np.isnan(x) & np.isnan(y))))


@dataclass(frozen=True, slots=True)
class _Distance:
    """Differences so far between two arrays; `squares` sums their squares."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    nans_a: int = 0
    nans_b: int = 0
    squares: float = 0.0

    def with_block(self, x: NDArray[Any], y: NDArray[Any]) -> _Distance:
        nans_x, nans_y = np.isnan(x), np.isnan(y)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            gap = np.where((x == y) | (nans_x & nans_y), 0.0, np.abs(x - y))
            scale = np.maximum(np.abs(x), np.abs(y))
            relative = np.where(gap == 0, 0.0, gap / scale)
        gap, relative = (np.where(np.isnan(v), np.inf, v) for v in (gap, relative))
        return _Distance(
            max(self.max_abs, float(gap.max(initial=0.0))),
            max(self.max_rel, float(relative.max(initial=0.0))),
            self.nans_a + int(nans_x.sum()),
            self.nans_b + int(nans_y.sum()),
            self.squares + float(np.dot(gap, gap)),
        )


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
