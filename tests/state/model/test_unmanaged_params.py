"""Parameters of a sharded model that no unit manages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt import core
from tests.kit.ranks.harness import run

Change = Callable[[nn.Sequential], Any]


def shard_first_only(model: nn.Sequential) -> Any:
    core.fully_shard(model[0])
    return model


def wrap_first_only(model: nn.Sequential) -> Any:
    model[0] = core.FullyShardedDataParallel(model[0])
    return model


def append_after_sharding(model: nn.Sequential) -> Any:
    kept = model[1]
    del model[1]
    return core.fully_shard(model).append(kept)


def warned(load: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    return [str(each.message) for each in caught if "no unit manages" in str(each.message)]


def load_both_ways(rank: int, change: Change, folder: str) -> tuple[list[str], list[str], bool]:
    torch.manual_seed(0)
    model = change(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    shardckpt.save({"model": model}, folder)
    state = shardckpt.model_state_dict(model)
    nn.init.zeros_(model[1].weight)
    found = warned(lambda: shardckpt.load({"model": model}, folder))
    loaded = bool(model[1].weight.any())
    return found, warned(lambda: shardckpt.load_model_state_dict(model, state)), loaded


@pytest.mark.parametrize("change", [shard_first_only, wrap_first_only, append_after_sharding])
def test_a_load_into_parameters_that_no_unit_manages_warns_with_their_names(change: Change, tmp_path: Any) -> None:
    def body(rank: int, world: int) -> tuple[list[str], list[str], bool]:
        return load_both_ways(rank, change, str(tmp_path / "saved"))

    (loads, states, is_loaded), (_, _, is_loaded_too) = run(2, body)
    assert is_loaded and is_loaded_too
    for texts in (loads, states):
        (text,) = texts
        assert "1.weight, 1.bias" in text and "0.weight" not in text


def freeze_last(model: nn.Sequential) -> Any:
    model[1].requires_grad_(False)
    return shard_first_only(model)


def shard_both(model: nn.Sequential) -> Any:
    core.fully_shard(model[1])
    return shard_first_only(model)


@pytest.mark.parametrize("change", [freeze_last, shard_both])
def test_a_load_into_frozen_or_managed_parameters_does_not_warn(change: Change, tmp_path: Any) -> None:
    def body(rank: int, world: int) -> tuple[list[str], list[str]]:
        return load_both_ways(rank, change, str(tmp_path / "saved"))[:2]

    assert run(2, body) == [([], [])] * 2


def test_parameters_whose_module_was_replaced_after_sharding_are_named() -> None:
    def body(rank: int, world: int) -> None:
        model = core.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[1] = nn.Linear(4, 4)
        with pytest.raises(shardckpt.ShardckptError, match=r"lacks parameters.*1\.weight"):
            shardckpt.model_state_dict(model)

    run(2, body)
