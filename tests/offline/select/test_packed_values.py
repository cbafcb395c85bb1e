"""Quantized weights become plain ones, with the values that their own packages compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardckpt
from shardckpt.errors import FormatError
from shardckpt.plan.subclass_record import SUBCLASS, SubclassRecord
from tests.kit.runs.cases import load_folder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def int8(model: nn.Sequential) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(version=2))


def intx(model: nn.Sequential) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    quantize_(model, IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(32)))


def asymmetric(model: nn.Sequential) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    quantize_(model, IntxWeightOnlyConfig(torch.int8, PerGroup(32), MappingType.ASYMMETRIC))


def float8(model: nn.Sequential) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model, Float8WeightOnlyConfig())


def float8_in_one(model: nn.Sequential) -> None:
    from torchao.quantization import Float8Tensor, PerTensor

    for layer in model:
        weight = Float8Tensor.from_hp(layer.weight.detach(), granularity=PerTensor())
        layer.weight = nn.Parameter(weight, requires_grad=False)


def nf4(model: nn.Sequential) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    for layer in model:
        layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 8), requires_grad=False)


TORCHAO: dict[str, Callable[[nn.Sequential], None]] = {
    each.__name__: each for each in (int8, intx, asymmetric, float8, float8_in_one, nf4)
}


def _model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(96, 64, bias=False), nn.Linear(64, 32, bias=False)]
    return nn.Sequential(*layers).requires_grad_(False).to(dtype)


def _dequantize(weight: Any) -> torch.Tensor:
    found: torch.Tensor = weight.get_original_weight() if hasattr(weight, "quantized_data") else weight.dequantize()
    return found


def _save(quantize: Callable[[nn.Sequential], None], dtype: torch.dtype, folder: Path) -> dict[str, torch.Tensor]:
    """Save a quantized model, and return the weights that its package dequantizes."""
    model = _model(dtype)
    quantize(model)
    shardckpt.save({"model": model}, folder)
    return {f"{at}.weight": _dequantize(layer.weight.detach()) for at, layer in enumerate(model)}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TORCHAO)
def test_torchao_weights_are_bit_for_bit_as_torchao_dequantizes(kind: str, dtype: str, tmp_path: Path) -> None:
    expected = _save(TORCHAO[kind], DTYPES[dtype], tmp_path / "step")
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "out", dequantize=True)
    assert _equal(load_folder(tmp_path / "out"), expected)
    assert report.left_out == ()


@pytest.mark.parametrize("kind", TORCHAO)
def test_pieces_of_many_ranks_are_dequantized_in_small_batches(kind: str, tmp_path: Path) -> None:
    expected = _save(TORCHAO[kind], torch.bfloat16, tmp_path / "step")
    shardckpt.reshard(tmp_path / "step", tmp_path / "ranks", world_size=3)
    shardckpt.convert(tmp_path / "ranks", tmp_path / "out", dequantize=True, max_memory="24MiB", jobs=3)
    assert _equal(load_folder(tmp_path / "out"), expected)


def _pack_4bit(weight: torch.Tensor, kind: str, *, is_double: bool, storage: torch.dtype) -> dict[str, torch.Tensor]:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        weight, blocksize=64, compress_statistics=is_double, quant_type=kind, quant_storage=storage
    )
    parts = {f"a.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return {"a.weight": packed, **parts}


def _dequantize_4bit(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    parts = {name.removeprefix("a.weight."): value for name, value in tensors.items() if name != "a.weight"}
    return dequantize_4bit(tensors["a.weight"], QuantState.from_dict(dict(parts), torch.device("cpu")))


def _ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return the largest distance in units of the last place."""
    assert one.dtype == other.dtype and one.shape == other.shape
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    return int((one.view(kind).long() - other.view(kind).long()).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bits_of_bitsandbytes_are_as_it_dequantizes(
    kind: str, is_double: bool, storage: torch.dtype, dtype: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tensors = _pack_4bit(torch.randn(130, 128, dtype=DTYPES[dtype]), kind, is_double=is_double, storage=storage)
    save_file(tensors, tmp_path / "src.safetensors")
    shardckpt.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", dequantize=True)
    found = load_folder(tmp_path, "out.safetensors")
    assert list(found) == ["a.weight"]
    assert _ulps(found["a.weight"], _dequantize_4bit(tensors)) == 0


def test_8_bits_of_bitsandbytes_are_as_it_dequantizes(tmp_path: Path) -> None:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    torch.manual_seed(0)
    values, scales, _ = int8_vectorwise_quant(torch.randn(70, 96).half())
    tensors = {"a.weight": values, "a.SCB": scales, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "src.safetensors")
    shardckpt.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", dequantize=True)
    found = load_folder(tmp_path, "out.safetensors")
    assert _equal(found, {"a.weight": int8_vectorwise_dequant(values, scales)})


@pytest.mark.parametrize("shape", [(30, 97), (3, 400_001)], ids=str)
def test_4_bits_whose_rows_end_inside_a_block_are_as_on_a_gpu(shape: tuple[int, int], tmp_path: Path) -> None:
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    # On some CPUs, bitsandbytes itself takes the block of another row then; its portable code does what CUDA does.
    torch.manual_seed(0)
    tensors = _pack_4bit(torch.randn(shape), "nf4", is_double=False, storage=torch.uint8)
    save_file(tensors, tmp_path / "src.safetensors")
    shardckpt.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", dequantize=True)
    absmax, table = tensors["a.weight.absmax"], tensors["a.weight.quant_map"]
    packed = tensors["a.weight"].reshape(-1)
    expected = _dequantize_4bit_compute(packed, absmax, table, 64, shape, torch.float32)
    assert torch.equal(load_folder(tmp_path, "out.safetensors")["a.weight"], expected)


def _save_inner(folder: Path, name: str, shape: list[int], context: object, **inner: torch.Tensor) -> Path:
    """Save a wrapper subclass as its inner tensors and a record."""
    record = SubclassRecord(name, "torchao 0.18.0", "float32", tuple(shape), context)
    shardckpt.save({"model": {"a.weight": {**inner, SUBCLASS: record.encode()}, "b": torch.ones(2)}}, folder)
    return folder


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_part_of_a_row_gets_its_own_blocks_factors(jobs: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape, block = (3, 600_000), (2, 100_000)
    values = torch.randint(-128, 127, shape, dtype=torch.int8)
    scale, zero = torch.rand(2, 6), torch.randint(-9, 9, (2, 6), dtype=torch.int8)
    source = _save_inner(
        tmp_path / "step",
        "torchao.Int8Tensor",
        [*shape],
        {"block_size": [*block]},
        qdata=values,
        scale=scale,
        zero_point=zero,
    )
    shardckpt.consolidate(source, tmp_path / "out", dequantize=True, jobs=jobs, max_memory="24MiB")
    wide = [each.repeat_interleave(2, 0)[:3].repeat_interleave(100_000, 1) for each in (scale, zero)]
    assert torch.equal(load_folder(tmp_path / "out")["a.weight"], (values.float() - wide[1].float()) * wide[0])


QDATA, SCALE = torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1)
BYTES = torch.ones(16, dtype=torch.uint8)
NF4_PARTS = {
    "quantized_data": BYTES,
    "quantized_scalers": torch.ones(1, dtype=torch.int8),
    "quantization_factor": torch.ones(1),
    "scaler_mean": torch.ones(()),
    "nf4": torch.ones(16),
}
WRONG: dict[str, tuple[str, list[int], object, dict[str, torch.Tensor], str]] = {
    "no block size": ("Int8Tensor", [4, 8], {"block_size": [0, 8]}, {"qdata": QDATA, "scale": SCALE}, "block_size"),
    "other dims": ("Int8Tensor", [4, 8], {"block_size": [8]}, {"qdata": QDATA, "scale": SCALE}, "block_size"),
    "no context": ("Int8Tensor", [4, 8], 7, {"qdata": QDATA, "scale": SCALE[:3]}, "scale"),
    "other scale": ("Int8Tensor", [4, 8], {"block_size": [1, 4]}, {"qdata": QDATA, "scale": SCALE}, "scale"),
    "other shape": ("Int8Tensor", [4, 9], {"block_size": [1, 9]}, {"qdata": QDATA, "scale": SCALE}, "qdata"),
    "no scale": ("Float8Tensor", [4, 8], {"block_size": [1, 8]}, {"qdata": QDATA}, "scale"),
    "complex": ("Int8Tensor", [4, 8], {"block_size": [1, 8]}, {"qdata": QDATA, "scale": SCALE.cfloat()}, "complex"),
    "many dims": ("Int8Tensor", [1] * 99, {"block_size": [1] * 99}, {"qdata": QDATA, "scale": SCALE}, "shape"),
    "long nf4": ("NF4Tensor", [4, 80], {"block_size": 64, "scaler_block_size": 1}, NF4_PARTS, "quantized_data"),
    "nf4 of 0": ("NF4Tensor", [4, 8], {"block_size": 0, "scaler_block_size": 1}, NF4_PARTS, "block_size"),
    "short table": (
        "NF4Tensor",
        [4, 8],
        {"block_size": 32, "scaler_block_size": 1},
        {**NF4_PARTS, "nf4": torch.ones(3)},
        "nf4",
    ),
    "huge block": (
        "NF4Tensor",
        [4, 8],
        {"block_size": 1 << 40, "scaler_block_size": 1},
        NF4_PARTS,
        "block_size",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_does_not_fit_its_inner_tensors_is_a_format_error(case: str, tmp_path: Path) -> None:
    kind, shape, context, inner, named = WRONG[case]
    source = _save_inner(tmp_path / "step", f"torchao.{kind}", shape, context, **inner)
    with pytest.raises(FormatError, match=rf"a\.weight: the {kind} .*{named}"):
        shardckpt.consolidate(source, tmp_path / "out", dequantize=True)
    assert not (tmp_path / "out").exists()


def test_a_block_that_is_longer_than_the_weight_costs_no_memory(tmp_path: Path) -> None:
    context = {"block_size": (1 << 31) - 1, "scaler_block_size": (1 << 31) - 1}
    source = _save_inner(tmp_path / "step", "torchao.NF4Tensor", [4, 8], context, **NF4_PARTS)
    shardckpt.consolidate(source, tmp_path / "out", dequantize=True)
    assert torch.equal(load_folder(tmp_path / "out")["a.weight"], torch.full((4, 8), 2.0))


TEXTS = {
    "no JSON": b"{",
    "no object": b"[]",
    "no shape": b'{"dtype": "float32", "blocksize": 64}',
    "other dtype": b'{"dtype": "int8", "shape": [4, 8], "blocksize": 64}',
    "negative": b'{"dtype": "float32", "shape": [-4, -8], "blocksize": 64}',
    "no blocks": b'{"dtype": "float32", "shape": [4, 8]}',
    "fewer bytes": b'{"dtype": "float32", "shape": [4, 80], "blocksize": 64}',
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_wrong_text_of_bitsandbytes_is_a_format_error(case: str, tmp_path: Path) -> None:
    tensors = {
        "a.weight": BYTES.reshape(-1, 1),
        "a.weight.absmax": torch.ones(1),
        "a.weight.quant_map": torch.ones(16),
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(TEXTS[case]), dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "src.safetensors")
    with pytest.raises(FormatError, match=r"a\.weight"):
        shardckpt.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", dequantize=True)


def test_8_bits_in_another_order_are_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": QDATA, "a.SCB": torch.ones(4), "a.weight_format": torch.tensor(2, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "src.safetensors")
    with pytest.raises(FormatError, match=r"a\.weight: .*by rows; found weight_format 2"):
        shardckpt.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors", dequantize=True)
