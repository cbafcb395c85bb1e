"""Values in stored elements: NumPy's dtypes, and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardckpt.dtypes import HALF_BYTE, HALF_BYTE_PAIR, bits
from shardckpt.encodings.value_stats import ValueStats, merge_stats

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview

_OF_ML_DTYPES = frozenset(
    ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
)

HALF_COMPLEX = frozenset(("complex32", "bcomplex32"))  # complex dtypes of two halves, which NumPy lacks

# Values of half a byte by their bits.
_HALF_BYTES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_CONVERTED_BYTES = 2 << 20  # bytes that are converted at a time: conversions need up to 8 times as many


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype for torch's name."""
    import numpy as np  # noqa: PLC0415  (0.07 s, and what casts nothing needs none)

    if name in HALF_COMPLEX or name == HALF_BYTE_PAIR or bits(name) % 8:
        raise TypeError(f"numpy has no type for {name}")
    kind: np.dtype[Any] = np.dtype(_find_type(name) if name in _OF_ML_DTYPES else name)
    return kind


def _find_type(name: str) -> Any:
    import ml_dtypes  # noqa: PLC0415  (as numpy in `numpy_dtype`)

    return getattr(ml_dtypes, name)


def measure_values(data: Buffer, dtype: str) -> ValueStats:
    """Return statistics over complete row-major elements; complex numbers count by their magnitude."""
    # Few calls of NumPy read many elements each: while other threads run Python code, every call waits for the
    # interpreter's lock.
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    with np.errstate(over="ignore", invalid="ignore"):  # squares of large numbers, casts of signaling NaNs
        if bits(dtype) <= 8:
            return merge_stats(_count_bytes(part, dtype) for part in _split(data))
        convert = _CONVERSIONS.get(dtype)
        if convert is None:
            return _measure(_as_array(data, dtype))
        return merge_stats(_measure(convert(part, dtype)) for part in _split(data))


def _split(data: Buffer) -> Iterator[memoryview]:
    view = memoryview(data).cast("B")
    return (view[at : at + _CONVERTED_BYTES] for at in range(0, len(view), _CONVERTED_BYTES))


def _as_array(data: Buffer, dtype: str) -> NDArray[Any]:
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    return np.frombuffer(data, numpy_dtype(dtype))


def _measure(values: NDArray[Any]) -> ValueStats:
    """Return statistics over real numbers with 2 bytes or more."""
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    if not values.size:
        return ValueStats()
    squares = float(np.einsum("i,i->", values, values, dtype=np.float64))
    if not np.isfinite(squares) and values.dtype.kind == "f":
        is_finite = np.isfinite(values)
        if not is_finite.all():
            nans = int(np.count_nonzero(np.isnan(values)))
            infs = values.size - nans - int(np.count_nonzero(is_finite))
            return _measure(values[is_finite])._replace(nans=nans, infs=infs)
    total = float(np.add.reduce(values, dtype=np.float64))
    zeros = int(np.count_nonzero(values == 0))
    return ValueStats(0, 0, zeros, values.size, float(values.min()), float(values.max()), total, squares)


def _count_bytes(data: memoryview, dtype: str) -> ValueStats:
    """Return the statistics for elements up to a byte, from how often each byte occurs."""
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    values = _list_values(dtype)
    counts = np.repeat(counts, len(values) // len(counts))
    is_finite = np.isfinite(values)
    nans, infs = int(counts[np.isnan(values)].sum()), int(counts[np.isinf(values)].sum())
    used = is_finite & (counts > 0)
    values, counts = values[used], counts[used]
    if not counts.size:
        return ValueStats(nans, infs)
    return ValueStats(
        nans,
        infs,
        int(counts[values == 0].sum()),
        int(counts.sum()),
        float(values.min()),
        float(values.max()),
        float(np.dot(counts, values)),
        float(np.dot(counts, values * values)),
    )


@lru_cache
def _list_values(dtype: str) -> NDArray[np.float64]:
    """Return the values in each of the 256 bytes, byte after byte."""
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    every = np.arange(256, dtype=np.uint8)
    values: NDArray[Any] = every
    if dtype in (HALF_BYTE, HALF_BYTE_PAIR):
        values = np.array(_HALF_BYTES)[np.stack([every & 15, every >> 4], axis=-1)].ravel()
    elif dtype == "bool":
        values = every != 0
    elif bits(dtype) % 8 == 0:
        values = every.view(numpy_dtype(dtype))
    found: NDArray[np.float64] = values.astype(np.float64)
    return found


def _widen_bfloat16(data: memoryview, _: str) -> NDArray[Any]:
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    wide = np.frombuffer(data, np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _widen_half(data: memoryview, _: str) -> NDArray[Any]:
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    return np.frombuffer(data, np.float16).astype(np.float32)


def widen_half_complex(data: Buffer, dtype: str) -> NDArray[np.complex64]:
    """Return elements with a dtype in `HALF_COMPLEX` as complex64, which holds their exact values."""
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    widen = _widen_half if dtype == "complex32" else _widen_bfloat16
    return widen(memoryview(data), dtype).view(np.complex64)


def _magnitudes(data: memoryview, dtype: str) -> NDArray[Any]:
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    if dtype in HALF_COMPLEX:
        return np.abs(widen_half_complex(data, dtype).astype(np.complex128))
    return np.abs(_as_array(data, dtype).astype(np.complex128))


# Functions that return numbers with which NumPy computes fast.
_CONVERSIONS: dict[str, Callable[[memoryview, str], NDArray[Any]]] = {
    "bfloat16": _widen_bfloat16,
    "float16": _widen_half,
    "complex32": _magnitudes,
    "bcomplex32": _magnitudes,
    "complex64": _magnitudes,
    "complex128": _magnitudes,
}
