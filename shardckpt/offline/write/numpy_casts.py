"""Cast between float dtypes and quantize; values outside the new range are an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.dtypes import FLOATS, QUANTIZED
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.errors import PrecisionError

if TYPE_CHECKING:
    import numpy as np

# Per step, which needs about 5 times their memory: it should stay in a cache.
_QUANTIZED_ELEMENTS = 1 << 14

# Bits of infinity; comparing integers is 5 times as fast as `isinf` for the types that ml_dtypes adds.
_HALF_INFINITIES = {"bfloat16": 0x7F80, "float16": 0x7C00}


def cast_into(
    data: memoryview, stored: str, out: memoryview, dtype: str, *, name: str, allow_overflow: bool = False
) -> None:
    """Cast elements and fill `out`, rounding to nearest even like torch."""
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    source = np.frombuffer(data, numpy_dtype(stored))
    if dtype in QUANTIZED:
        _quantize(source, np.frombuffer(out, np.uint8), name)
        return
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
    """Count finite values that become infinite in a cast, or NaN in dtypes without infinity."""
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    if dtype in FLOATS:  # counting infinities is twice as fast
        infinite = _count_infinite(target, dtype)
        return infinite and infinite - int(np.count_nonzero(np.isinf(source)))
    return int(np.count_nonzero(np.isfinite(source)) - np.count_nonzero(np.isfinite(target)))


def _count_infinite(values: np.ndarray[Any, Any], dtype: str) -> int:
    """Count infinities with either sign."""
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    infinity = _HALF_INFINITIES.get(dtype)
    if infinity is None:
        return int(np.count_nonzero(np.isinf(values)))
    return int(np.count_nonzero((values.view(np.uint16) & 0x7FFF) == infinity))


def _quantize(source: np.ndarray[Any, Any], out: np.ndarray[Any, Any], name: str) -> None:
    """Quantize to `q8_0`: for each 32 elements a scale in float16 and 32 signed bytes."""
    # `gguf.quants` makes the same bits: it rounds half away from zero.
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    block, _ = QUANTIZED["q8_0"]
    blocks = out.view(np.dtype([("scale", "<f2"), ("elements", np.int8, (block,))]))
    for start in range(0, len(source), _QUANTIZED_ELEMENTS):
        part = blocks[start // block : (start + _QUANTIZED_ELEMENTS) // block]
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            values = source[start : start + _QUANTIZED_ELEMENTS].astype(np.float32).reshape(-1, block)
            scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
            part["scale"] = scales[:, 0]
            _require_scales(part["scale"], values, name)
            values *= np.where(scales == 0, np.float32(0), 1 / scales)
            part["elements"] = _round_half_away(values)


def _require_scales(scales: np.ndarray[Any, Any], values: np.ndarray[Any, Any], name: str) -> None:
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    if np.isfinite(scales).all():
        return
    of_block = values[int(np.argmin(np.isfinite(scales)))]
    raise PrecisionError(
        f"a value of {name!r} is beyond the range of q8_0",
        found=f"{of_block[int(np.argmax(np.abs(of_block)))]}",
        expected="finite values below 8.3 million",
        fix="Keep the tensor with --keep-fp32, or choose another --dtype.",
    )


def _round_half_away(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import numpy as np  # noqa: PLC0415  (as in `numpy_dtype`)

    magnitudes = np.abs(values)
    floors = np.floor(magnitudes)
    floors += np.floor(2 * (magnitudes - floors))
    return np.asarray(np.copysign(floors, values))
