"""Casts agree with torch bit for bit, and never lose a finite value to infinity in silence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checkpoint.load.uploads import copy_cast
from shardckpt.dtypes import FLOATS, TORCH_NAMES
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.errors import PrecisionError
from shardckpt.manifest import TensorEntry
from shardckpt.offline.write.numpy_casts import cast_into

KINDS = sorted(FLOATS)


def cast(source: torch.Tensor, dtype: str, allow_overflow: bool = False) -> torch.Tensor:
    kind = getattr(torch, dtype)
    out = bytearray(source.numel() * kind.itemsize)
    raw = bytearray(source.contiguous().view(torch.uint8).numpy().tobytes())
    stored = str(source.dtype).removeprefix("torch.")
    cast_into(memoryview(raw), stored, memoryview(out), dtype, name="w", allow_overflow=allow_overflow)
    return torch.frombuffer(out, dtype=kind) if out else torch.empty(0, dtype=kind)


@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("dtype", KINDS)
@given(st.lists(st.floats(width=64), min_size=1, max_size=30))
def test_every_cast_is_torchs(stored: str, dtype: str, values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float64).to(getattr(torch, stored))
    expected = source.to(getattr(torch, dtype))
    found = cast(source, dtype, allow_overflow=True)
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(found[number], expected[number])
    assert torch.equal(found[number].signbit(), expected[number].signbit())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_round_as_torch_does(dtype: str) -> None:
    """Every float32 halfway between two neighbours, and its own neighbours, over all exponents."""
    bits = torch.arange(0, 1 << 16, dtype=torch.int64) << 16
    around = torch.cat([bits + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001)])
    source = torch.from_numpy(around.numpy().astype(np.uint32).view(np.float32))
    found, expected = cast(source, dtype, allow_overflow=True), source.to(getattr(torch, dtype))
    number = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))


def test_double_rounding_is_torchs_too() -> None:
    source = torch.tensor([1 + 2**-11 + 2**-40, 1 + 2**-9 + 2**-40, -(2**-25) - 2**-60], dtype=torch.float64)
    for dtype in ("float16", "bfloat16", "float32"):
        assert torch.equal(cast(source, dtype), source.to(getattr(torch, dtype))), dtype


def test_a_complex_number_is_not_cast_to_a_real_one() -> None:
    with pytest.raises(PrecisionError, match=r"'w' is complex, and its imaginary parts would be dropped"):
        cast(torch.tensor([1 + 2j]), "float32")


def test_a_finite_value_that_becomes_infinite_is_an_error_that_says_which() -> None:
    source = torch.tensor([1.0, 70000.0, float("inf")])
    with pytest.raises(PrecisionError, match=r"^finite values of 'w' .* float16; found 70000"):
        cast(source, "float16")
    assert cast(source, "float16", allow_overflow=True).isinf().tolist() == [False, True, True]
    assert cast(source, "bfloat16").isinf().tolist() == [False, False, True]


def test_values_that_were_infinite_or_nan_stay_so() -> None:
    source = torch.tensor([float("inf"), float("-inf"), float("nan")])
    found = cast(source, "float16")
    assert found[:2].tolist() == [float("inf"), float("-inf")]
    assert found[2].isnan()


def test_values_that_round_up_to_infinity_count_as_lost() -> None:
    with pytest.raises(PrecisionError):
        cast(torch.tensor([65520.0]), "float16")
    assert cast(torch.tensor([65519.0]), "float16").tolist() == [65504.0]


def test_nothing_is_cast_without_elements() -> None:
    assert cast(torch.empty(0), "float16").numel() == 0


def test_numpy_knows_every_whole_byte_type() -> None:
    for name in TORCH_NAMES.values():
        if name.startswith(("float4", "float6")) or not hasattr(torch, name):
            continue
        assert numpy_dtype(name).itemsize == getattr(torch, name).itemsize


@pytest.mark.parametrize("name", ["complex32", "float4_e2m1fn", "float6_e2m3fn"])
def test_types_that_only_some_numpy_releases_know_are_refused(name: str) -> None:
    with pytest.raises(TypeError):
        numpy_dtype(name)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float16"])
def test_the_range_of_a_type_is_the_same_for_a_conversion_and_a_load(dtype: str) -> None:
    """Types without infinity turn such values into NaN here, and into their largest value in torch."""
    values = torch.tensor([1.0, 1e30])
    entry = TensorEntry(("w",), (2,), "float32", ())
    with pytest.raises(
        PrecisionError, match=rf"^finite values of 'w' are beyond the range of {dtype}; found 1.* in float32"
    ):
        cast(values, dtype)
    with pytest.raises(PrecisionError, match="does not fit the type"):
        copy_cast(values, torch.empty(2, dtype=getattr(torch, dtype)), entry)
    assert not cast(values, dtype, allow_overflow=True)[1].float().isfinite()


def quantize(values: np.ndarray) -> bytes:
    out = bytearray(values.size // 32 * 34)
    cast_into(memoryview(values).cast("B"), "float32", memoryview(out), "q8_0", name="w")
    return bytes(out)


@given(st.lists(st.floats(-8e6, 8e6, width=32), min_size=1, max_size=8), st.integers(0, 1 << 30))
def test_quantized_blocks_have_the_bits_of_gguf(values: list[float], seed: int) -> None:
    quants = pytest.importorskip("gguf.quants")
    blocks = np.random.default_rng(seed).choice(np.array([*values, 0.0], np.float32), (3, 32))
    with np.errstate(all="ignore"):
        expected = quants.Q8_0.quantize_blocks(blocks).tobytes()
    assert quantize(blocks) == expected


def test_a_quantized_block_is_a_scale_and_32_bytes_that_round_half_away_from_zero() -> None:
    """Of a maximum of 127 the scale is 1; the second block is zero, and the blocks after it are another slice."""
    values = np.zeros(32 * 2050, np.float32)
    values[:6] = [127, 0.5, -0.5, 1.5, -2.5, 0.49999997]
    values[-32:] = 254
    blocks = np.frombuffer(quantize(values), np.uint8).reshape(-1, 34)
    assert blocks[0, :2].view(np.float16) == 1
    assert blocks[0, 2:8].view(np.int8).tolist() == [127, 1, -1, 2, -3, 0]
    assert not blocks[1:-1].any()
    assert blocks[-1, :2].view(np.float16) == 2
    assert set(blocks[-1, 2:].tolist()) == {127}


@pytest.mark.parametrize("value", [np.nan, -np.inf, 8.4e6])
def test_a_block_without_a_scale_is_an_error_that_says_which(value: float) -> None:
    values = np.ones(96, np.float32)
    values[70] = value
    with pytest.raises(PrecisionError, match=rf"a value of 'w' is beyond the range of q8_0; found {value}"):
        quantize(values)
