"""A packed weight of bitsandbytes is saved and loaded with its scales; other scales, or none, are refused by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.errors import CheckpointError

bnb = pytest.importorskip("bitsandbytes")


def four_bits(base: nn.Linear, **settings: Any) -> nn.Module:
    quantized = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4", **settings)
    quantized.load_state_dict(base.state_dict())
    return quantized.to("cpu")


def four_bits_alone(base: nn.Linear) -> nn.Module:
    return four_bits(base, compress_statistics=False)


def eight_bits(base: nn.Linear) -> nn.Module:
    quantized = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0)
    quantized.load_state_dict(base.state_dict())
    quantized.to("cpu")(torch.zeros(1, 64))
    return quantized


Quantize = Callable[[nn.Linear], nn.Module]
KINDS = [four_bits, four_bits_alone, eight_bits]


def build(quantize: Quantize, seed: int, adapter: float) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(quantize(nn.Linear(64, 64, bias=False)), nn.Linear(64, 3))
    nn.init.constant_(model[1].weight, adapter)
    return model


def compute(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.linspace(-1, 1, 64)[None])


@pytest.mark.parametrize("is_training", [True, False])  # a forward in eval changes the packing, on some CPUs
@pytest.mark.parametrize("quantize", KINDS)
def test_a_packed_weight_is_loaded_with_its_scales(quantize: Quantize, is_training: bool, tmp_path: Path) -> None:
    model, other = build(quantize, 1, 1.0), build(quantize, 2, 2.0)
    compute(model.train(is_training)), compute(other.train(is_training))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardckpt.save({"model": model}, tmp_path / "step")
        shardckpt.load({"model": other}, tmp_path / "step", verify="live")
    assert torch.equal(compute(other), compute(model))


@pytest.mark.parametrize("quantize", KINDS)
def test_names_are_the_ones_of_its_state_dict(quantize: Quantize, tmp_path: Path) -> None:
    model = build(quantize, 1, 1.0)
    shardckpt.save({"model": model}, tmp_path / "step")
    read = shardckpt.load(tmp_path / "step")["model"]
    expected = model.state_dict()
    assert read.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(read[name], value), name


def test_an_embedding_of_four_bits_is_loaded_with_its_scales(tmp_path: Path) -> None:
    def build_embedding(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        quantized = bnb.nn.Embedding4bit(16, 64, quant_type="nf4")
        quantized.load_state_dict(nn.Embedding(16, 64).state_dict())
        return quantized.to("cpu")

    model, other = build_embedding(1), build_embedding(2)
    shardckpt.save({"model": model}, tmp_path / "step")
    shardckpt.load({"model": other}, tmp_path / "step")
    assert torch.equal(other(torch.arange(16)), model(torch.arange(16)))


def test_a_weight_with_other_blocks_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    model, other = build(four_bits, 1, 1.0), build(lambda base: four_bits(base, compress_statistics=False), 2, 2.0)
    shardckpt.save({"model": model}, tmp_path / "step")
    before = compute(other)
    with pytest.raises(shardckpt.ShardckptError, match=r"model\.0\.weight is quantized in another way: nested_"):
        shardckpt.load({"model": other}, tmp_path / "step")
    assert torch.equal(compute(other), before)


def test_bytes_that_are_no_text_are_refused_with_a_typed_error(tmp_path: Path) -> None:
    model = build(four_bits, 1, 1.0)
    state = model.state_dict()
    name = "0.weight.quant_state.bitsandbytes__nf4"
    for value in (torch.zeros(8, dtype=torch.uint8), torch.tensor(list(json.dumps([1]).encode()), dtype=torch.uint8)):
        step = tmp_path / f"step-{value.numel()}"
        shardckpt.save({"model": {**state, name: value}}, step)
        with pytest.raises(CheckpointError, match="must be JSON that bitsandbytes writes"):
            shardckpt.load({"model": model}, step)


def save_without_scales(model: nn.Module, path: Path) -> None:
    """Save as earlier versions did: the packed weight alone."""
    kept = {name: value for name, value in model.state_dict().items() if name.endswith((".weight", ".bias"))}
    shardckpt.save({"model": kept}, path)


@pytest.mark.parametrize("quantize", KINDS)
def test_a_step_without_scales_is_refused_by_name_for_another_base(quantize: Quantize, tmp_path: Path) -> None:
    save_without_scales(build(quantize, 1, 1.0), tmp_path / "step")
    other = build(quantize, 2, 2.0)
    before = compute(other)
    with pytest.raises(shardckpt.ShardckptError, match=r"model\.0\.weight.*scales.*`include`"):
        shardckpt.load({"model": other}, tmp_path / "step")
    assert torch.equal(compute(other), before)


@pytest.mark.parametrize("quantize", KINDS)
def test_a_step_without_scales_is_taken_for_the_same_base(quantize: Quantize, tmp_path: Path) -> None:
    model, other = build(quantize, 1, 1.0), build(quantize, 1, 2.0)
    save_without_scales(model, tmp_path / "step")
    shardckpt.load({"model": other}, tmp_path / "step", verify="live")
    assert torch.equal(compute(other), compute(model))


@pytest.mark.parametrize("quantize", KINDS)
def test_the_rest_is_loaded_with_another_base(quantize: Quantize, tmp_path: Path) -> None:
    shardckpt.save({"model": build(quantize, 1, 1.0)}, tmp_path / "step")
    other = build(quantize, 2, 2.0)
    shardckpt.load({"model": other}, tmp_path / "step", include=["model.1.*"])
    assert (other[1].weight == 1.0).all()
