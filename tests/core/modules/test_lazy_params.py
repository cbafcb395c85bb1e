"""A tensor without a shape is named before anything is written, loaded or sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.errors import UsageError
from shardckpt.state import load_model_state_dict, model_state_dict
from tests.kit.ranks.harness import run


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.ReLU())


def text_of(action, *args, **kwargs) -> str:
    with pytest.raises(UsageError) as caught:
        action(*args, **kwargs)
    assert "Run one forward first." in str(caught.value)
    return str(caught.value)


def test_saves_and_loads_name_the_parameter(tmp_path: Path):
    full = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    shardckpt.save({"m": full}, tmp_path / "full")
    for state in ({"m": lazy()}, {"m": lazy().state_dict()}, {"n": full, "m": shardckpt.Variant(lazy(), of=full)}):
        assert text_of(shardckpt.save, state, tmp_path / "x").startswith("m.0.weight: ")
        assert text_of(shardckpt.load, state, tmp_path / "full").startswith("m.0.weight: ")
    batch = nn.Sequential(nn.LazyBatchNorm1d(affine=False))
    assert text_of(shardckpt.save, batch, tmp_path / "x").startswith("0.running_mean: ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["full"]


def test_states_name_the_parameter():
    assert text_of(model_state_dict, lazy()).startswith("0.weight: ")
    assert text_of(load_model_state_dict, lazy(), {}, strict=False).startswith("0.weight: ")


def test_an_optimizer_of_a_lazy_module_that_is_not_saved_is_saved_by_number(tmp_path: Path):
    shardckpt.save({"m": nn.Linear(2, 2), "o": torch.optim.SGD(lazy().parameters())}, tmp_path / "x")
    assert shardckpt.load(tmp_path / "x")["o"]["param_groups"][0]["params"] == [0, 1]


def test_a_module_loads_after_its_first_forward(tmp_path: Path):
    full, model = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), lazy()
    shardckpt.save({"m": full}, tmp_path / "x")
    model(torch.ones(1, 2))
    shardckpt.load({"m": model}, tmp_path / "x")
    assert torch.equal(model[0].weight, full[0].weight)


def test_wrappers_name_the_parameter():
    def body(rank, world):
        device = torch.device("cpu")
        return [
            text_of(fully_shard, lazy()),
            text_of(FullyShardedDataParallel, lazy(), device_id=device),
            text_of(FullyShardedDataParallel, lazy(), device_id=device, use_orig_params=True),
        ]

    (texts,) = run(1, body)
    assert all(text.startswith("0.weight: ") for text in texts)
