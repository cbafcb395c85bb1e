"""Cast between float dtypes; values outside the new range are an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.dtypes import FLOATS
from shardckpt.errors import PrecisionError
from shardckpt.format.encodings.element_values import numpy_dtype

if TYPE_CHECKING:
    import numpy as np

_HALF_INFINITIES = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""The bits of infinity; comparing integers is 5 times as fast as `isinf` of the types that ml_dtypes adds."""


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
