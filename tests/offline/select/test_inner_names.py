"""Quantized weights that stay quantized have names that their readers find, or a warning says that none does."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import shardckpt
from tests.kit.runs.cases import load_folder


def _model() -> nn.Sequential:
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4))).requires_grad_(False).bfloat16()
    quantize_(model[0], Int8WeightOnlyConfig(version=2))
    quantize_(model[1], IntxWeightOnlyConfig())
    try:
        quantize_(model[2], Float8DynamicActivationFloat8WeightConfig())
    except AssertionError:  # this device computes no fp8
        from torchao.quantization import Float8WeightOnlyConfig

        quantize_(model[2], Float8WeightOnlyConfig())
    return model


def test_names_and_metadata_are_those_that_torchao_writes(tmp_path: Path) -> None:
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )

    model = _model()
    shardckpt.save({"model": model}, tmp_path / "step")
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "out")
    tensors, texts = flatten_tensor_state_dict(model.state_dict())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    found = load_folder(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
    for name, text in texts.items():
        own, theirs = json.loads(metadata[name]), json.loads(text)
        if isinstance(theirs, dict):
            for described in (own, theirs):
                described["_tensor_data_names"] = sorted(described.get("_tensor_data_names", ()))
        assert own == theirs
    again, rest = unflatten_tensor_state_dict(found, metadata)
    assert not rest
    assert all(type(again[f"{at}.weight"]) is type(model[at].weight.data) for at in range(4))
    assert torch.equal(again["0.weight"].dequantize(), model[0].weight.dequantize())
    assert (report.left_out, len(report.warnings)) == ((), 1)  # no config.json


def test_a_class_that_no_reader_knows_keeps_dots_and_is_named(tmp_path: Path) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    model = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(False)
    model[0].weight = nn.Parameter(to_nf4(torch.randn(64, 64), 64, 8), requires_grad=False)
    shardckpt.save({"model": model}, tmp_path / "step")
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "out", dtype="bf16")
    assert any("0.weight (NF4Tensor): written as inner tensors" in warning for warning in report.warnings)
    found = load_folder(tmp_path / "out")
    parts = {f"0.weight.{name}": getattr(model[0].weight, name) for name in model[0].weight.__tensor_flatten__()[0]}
    assert found.keys() == parts.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in parts.items())


def test_a_format_that_torchao_does_not_read_comes_with_a_warning(tmp_path: Path) -> None:
    shardckpt.save({"model": _model()}, tmp_path / "step")
    report = shardckpt.convert(tmp_path / "step", tmp_path / "out.pt")
    assert any("0.weight (Int8Tensor) and 2 more: written as inner tensors" in warning for warning in report.warnings)


def test_low_bit_moments_are_written_with_a_warning(tmp_path: Path) -> None:
    from torchao.optim import AdamW8bit

    model = nn.Linear(128, 64)
    optimizer = AdamW8bit(model.parameters())
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    shardckpt.save({"model": model, "optim": optimizer}, tmp_path / "step")
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "out", part="all", dequantize=True)
    assert any("optim.state.weight.exp_avg and 1 more: low-bit moments" in warning for warning in report.warnings)


def test_bitsandbytes_keeps_its_own_names(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 8, dtype=torch.int8), "a.SCB": torch.ones(4)}
    save_file(tensors, tmp_path / "src.safetensors")
    shardckpt.convert(tmp_path / "src.safetensors", tmp_path / "out.safetensors")
    assert load_folder(tmp_path, "out.safetensors").keys() == tensors.keys()
