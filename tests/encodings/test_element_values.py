from __future__ import annotations

import math

import pytest
import torch

from shardckpt.encodings import element_values
from shardckpt.encodings.element_values import measure_values, widen_half_complex
from shardckpt.encodings.value_stats import ValueStats

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BYTES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
BYTES += [torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []
WHOLE = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def measure(tensor: torch.Tensor) -> ValueStats:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return measure_values(data, str(tensor.dtype).removeprefix("torch."))


def expect(tensor: torch.Tensor) -> ValueStats:
    """Return the statistics as torch computes them in float64."""
    values = tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor.to(torch.float64)
    finite = values[values.isfinite()]
    counts = (int(values.isnan().sum()), int(values.isinf().sum()), int((values == 0).sum()), len(finite))
    return ValueStats(
        *counts, float(finite.min()), float(finite.max()), float(finite.sum()), float(finite.square().sum())
    )


def assert_close(found: ValueStats, expected: ValueStats) -> None:
    assert found[:6] == expected[:6]
    assert found[6:] == pytest.approx(expected[6:], rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("dtype", [*FLOATS, *BYTES, *WHOLE, torch.bool], ids=str)
def test_every_bit_pattern_counts_as_its_value(dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    if dtype == torch.bool:
        tensor = (bits % 3 == 0).clone()
    elif dtype.itemsize <= 2:
        tensor = bits.view(torch.uint8).view(dtype)
    else:  # the highest bits, which have sign and exponent
        tensor = torch.zeros(len(bits), dtype.itemsize // 2, dtype=torch.int16)
        tensor[:, -1] = bits
        tensor = tensor.view(torch.uint8).view(dtype).flatten()
        tensor = tensor[tensor.double().abs() < 1e3] if dtype == torch.float64 else tensor
    assert_close(measure(tensor), expect(tensor))


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_a_complex_number_counts_by_its_magnitude(dtype: torch.dtype) -> None:
    tensor = torch.tensor([3 + 4j, 0j, complex(math.nan, 1), complex(math.inf, 0), -1 + 0j]).to(dtype)
    assert measure(tensor) == ValueStats(1, 1, 1, 3, 0.0, 5.0, 6.0, 26.0)


def test_two_numbers_of_four_bits_are_in_a_byte() -> None:
    assert measure_values(bytes([0xF7, 0x01]), "float4_e2m1fn") == ValueStats(0, 0, 1, 4, -6.0, 6.0, 0.5, 72.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_values_of_several_parts_are_those_of_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = (torch.arange(10_000) % 127).to(dtype)
    monkeypatch.setattr(element_values, "_CONVERTED_BYTES", 64)
    assert_close(measure(tensor), expect(tensor))


@pytest.mark.parametrize("values", [[math.nan], [math.inf, -math.inf], []])
def test_without_finite_values_there_are_no_extremes(values: list[float]) -> None:
    found = measure(torch.tensor(values))
    assert (found.finite, found.min, found.max, found.size) == (0, math.inf, -math.inf, len(values))


def test_finite_values_whose_squares_overflow_are_finite() -> None:
    found = measure(torch.tensor([1e300, -1e300], dtype=torch.float64))
    assert found == ValueStats(0, 0, 0, 2, -1e300, 1e300, 0.0, math.inf)


def test_complex_numbers_of_two_bfloat16_are_those_of_complex64() -> None:
    halves = torch.randn(100, 2).bfloat16()
    data, expected = halves.view(torch.uint8).numpy().tobytes(), torch.view_as_complex(halves.float())
    assert torch.equal(torch.from_numpy(widen_half_complex(data, "bcomplex32")), expected)
    assert measure_values(data, "bcomplex32") == measure(expected)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("dtype", "signaling"),
    [
        ("float16", "017c"),
        ("bfloat16", "817f"),
        ("float32", "0100807f"),
        ("float64", "010000000000f07f"),
        ("complex32", "017c0000"),
        ("bcomplex32", "817f0000"),
        ("complex64", "0100807f00000000"),
    ],
)
def test_signaling_nans_are_counted_without_a_warning(dtype: str, signaling: str) -> None:
    assert measure_values(bytes.fromhex(signaling) * 3, dtype) == ValueStats(nans=3)
