"""Quantized weights whose scales are not in a checkpoint are not loaded over others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardckpt

bnb = pytest.importorskip("bitsandbytes")


def four_bits(base: nn.Linear) -> nn.Module:
    quantized = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    quantized.load_state_dict(base.state_dict())
    return quantized.to("cpu")


def eight_bits(base: nn.Linear) -> nn.Module:
    quantized = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0)
    quantized.load_state_dict(base.state_dict())
    quantized.to("cpu")(torch.zeros(1, 64))
    return quantized


Quantize = Callable[[nn.Linear], nn.Module]


def build(quantize: Quantize, seed: int, adapter: float) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(quantize(nn.Linear(64, 64, bias=False)), nn.Linear(64, 3))
    nn.init.constant_(model[1].weight, adapter)
    return model


def save(model: nn.Module, path: Path) -> None:
    with pytest.warns(UserWarning, match=r"model\.0\."):
        shardckpt.save({"model": model}, path)


@pytest.mark.parametrize("quantize", [four_bits, eight_bits])
def test_another_base_is_refused_by_name_and_nothing_is_changed(quantize: Quantize, tmp_path: Path) -> None:
    save(build(quantize, 1, 1.0), tmp_path / "step")
    other = build(quantize, 2, 2.0)
    before = other(torch.ones(1, 64))
    with pytest.raises(shardckpt.ShardckptError, match=r"model\.0\.weight.*scales.*`include`"):
        shardckpt.load({"model": other}, tmp_path / "step")
    assert torch.equal(other(torch.ones(1, 64)), before)


@pytest.mark.parametrize("quantize", [four_bits, eight_bits])
def test_the_same_base_is_taken_as_it_is(quantize: Quantize, tmp_path: Path) -> None:
    model, other = build(quantize, 1, 1.0), build(quantize, 1, 2.0)
    save(model, tmp_path / "step")
    warnings.simplefilter("ignore")
    shardckpt.load({"model": other}, tmp_path / "step", verify="live")
    assert torch.equal(other(torch.ones(1, 64)), model(torch.ones(1, 64)))


@pytest.mark.parametrize("quantize", [four_bits, eight_bits])
def test_the_rest_is_loaded_beside_another_base(quantize: Quantize, tmp_path: Path) -> None:
    save(build(quantize, 1, 1.0), tmp_path / "step")
    other = build(quantize, 2, 2.0)
    shardckpt.load({"model": other}, tmp_path / "step", include=["model.1.*"])
    assert (other[1].weight == 1.0).all()
