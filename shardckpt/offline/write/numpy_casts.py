"""Cast between float dtypes; values outside the new range are an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.dtypes import FLOATS, bits
from shardckpt.errors import PrecisionError

if TYPE_CHECKING:
    import numpy as np

_OF_ML_DTYPES = frozenset(
    ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
)

_HALF_INFINITIES = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""The bits of infinity; comparing integers is 5 times as fast as `isinf` of the types that ml_dtypes adds."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype for torch's name.

    Raises:
        TypeError: NumPy has no such dtype in all supported releases (sub-byte types, complex32).
    """
    import numpy as np  # noqa: PLC0415  (0.07 s, and what casts nothing needs none)

    if name == "complex32" or bits(name) % 8:
        raise TypeError(f"numpy has no type for {name}")
    kind: np.dtype[Any] = np.dtype(_find_type(name) if name in _OF_ML_DTYPES else name)
    return kind


def _find_type(name: str) -> Any:
    import ml_dtypes  # noqa: PLC0415  (as numpy in `numpy_dtype`)

    return getattr(ml_dtypes, name)


def cast_into(
    data: memoryview, stored: str, out: memoryview, dtype: str, *, name: str, allow_overflow: bool = False
) -> None:
    """Cast elements, rounding to nearest even like torch.

    Args:
        data: Stored elements.
        stored: Dtype of the stored elements.
        out: Buffer for as many elements of `dtype`; filled completely.
        dtype: Dtype to cast to.
        name: Name of the tensor, for the message.
        allow_overflow: Accept finite values that become infinite.

    Raises:
        PrecisionError: A finite value is outside the range of the dtype, or an imaginary part would be dropped.
    """
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    source = np.frombuffer(data, numpy_dtype(stored))
    target = np.frombuffer(out, numpy_dtype(dtype))
    if source.dtype.kind == "c" and target.dtype.kind != "c":
        raise PrecisionError(
            f"{name!r} is complex, and its imaginary parts would be dropped in {dtype}", found=stored, expected=dtype
        )
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # torch casts float64 to half types through float32, so that some values are rounded twice
        through = stored == "float64" and dtype in ("bfloat16", "float16")
        target[:] = source.astype(np.float32) if through else source
        lost = 0 if allow_overflow else _count_beyond(source, target, dtype)
    if lost:
        where = np.flatnonzero(np.isfinite(source) & ~np.isfinite(target))
        raise PrecisionError(
            f"finite values of {name!r} are beyond the range of {dtype}",
            found=f"{source[where[0]]} in {stored}",
            fix="Keep the tensor with --keep-fp32, or allow it with --allow-overflow.",
        )


def _count_beyond(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], dtype: str) -> int:
    """Count finite values that are not finite after a cast.

    Dtypes without infinity have NaN there.
    """
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    if dtype in FLOATS:  # counting infinities is twice as fast
        infinite = _count_infinite(target, dtype)
        return infinite and infinite - int(np.count_nonzero(np.isinf(source)))
    return int(np.count_nonzero(np.isfinite(source)) - np.count_nonzero(np.isfinite(target)))


def _count_infinite(values: np.ndarray[Any, Any], dtype: str) -> int:
    """Count infinities of either sign."""
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    infinity = _HALF_INFINITIES.get(dtype)
    if infinity is None:
        return int(np.count_nonzero(np.isinf(values)))
    return int(np.count_nonzero((values.view(np.uint16) & 0x7FFF) == infinity))
