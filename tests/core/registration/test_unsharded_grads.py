"""Parameters and unreduced gradients after a backward under `no_sync`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from tests.kit.models.under_test import FSDP, TORCH, Strategy, Style, shard, sharder
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(TORCH, reason="compares with torch's engine")

SHARDED = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP)
WRAPPERS = (Style.FLAT, Style.ORIGINAL)
Shapes = list[tuple[tuple[int, ...], Any]]


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(2, 7, generator=torch.Generator().manual_seed(rank))


def accumulate(model: Any, rank: int) -> None:
    with model.no_sync():
        model(inputs(rank)).sum().backward()


def shapes(model: nn.Module) -> Shapes:
    return [(tuple(p.shape), None if p.grad is None else tuple(p.grad.shape)) for p in model.parameters()]


def shapes_over_time(model: Any, rank: int) -> list[Shapes]:
    accumulate(model, rank)
    found = [shapes(model)]
    with torch.no_grad():
        model(inputs(rank))
    found.append(shapes(model))
    accumulate(model, rank)
    found.append(shapes(model))
    model(inputs(rank)).sum().backward()
    found.append(shapes(model))
    accumulate(model, rank)
    return [*found, shapes(model)]


@pytest.mark.parametrize("low", [False, True], ids=["", "low"])
@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_after_no_sync_parameters_and_gradients_have_the_shapes_of_torch(name: str, low: bool) -> None:
    def body(rank: int, world: int) -> bool:
        warnings.simplefilter("ignore")
        theirs = torch_fsdp.FullyShardedDataParallel(
            nn.Linear(7, 3),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            sharding_strategy=torch_fsdp.ShardingStrategy[name],
            mixed_precision=torch_fsdp.MixedPrecision(param_dtype=torch.bfloat16) if low else None,
        )
        ours = sharder(Style.ORIGINAL, Strategy[name], low=low)(nn.Linear(7, 3))
        return shapes_over_time(ours, rank) == shapes_over_time(theirs, rank)

    assert run(2, body) == [True, True]


@pytest.mark.parametrize(
    ("style", "name"), [(Style.FLAT, "FULL_SHARD"), (Style.FLAT, "SHARD_GRAD_OP"), (Style.ORIGINAL, "SHARD_GRAD_OP")]
)
def test_a_rank_alone_steps_after_no_sync_as_with_torch(style: Style, name: str) -> None:
    def step(model: Any) -> torch.Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate(model, 0)
        optimizer.step()
        return model(inputs(0)).detach()

    def body(rank: int, world: int) -> bool:
        warnings.simplefilter("ignore")
        layer = nn.Linear(7, 3)
        theirs = torch_fsdp.FullyShardedDataParallel(
            copy.deepcopy(layer), use_orig_params=style is Style.ORIGINAL, device_id=torch.device("cpu")
        )
        return torch.equal(step(sharder(style, Strategy[name])(layer)), step(theirs))

    assert run(1, body) == [True]


@pytest.mark.parametrize("computes", [False, True], ids=["", "after a forward"])
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("style", WRAPPERS)
def test_a_step_with_unreduced_gradients_is_refused(style: Style, strategy: Strategy, computes: bool) -> None:
    """A parameter of one dimension may be wholly on one rank, where its shard has the shape of the gradient."""

    def body(rank: int, world: int) -> bool:
        model = sharder(style, strategy)(nn.Linear(7, 3))
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.dim() == 1], lr=1.0)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        accumulate(model, rank)
        if computes:
            model(inputs(rank))
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.step()
        model.zero_grad()
        optimizer.step()
        return all(torch.equal(each, before[name]) for name, each in model.state_dict().items())

    assert run(2, body) == [True, True]


def replace_by_variable(module: nn.Linear, value: torch.Tensor) -> None:
    module.weight = nn.Parameter(value)


def replace_data(module: nn.Linear, value: torch.Tensor) -> None:
    module.weight.data = value


def write(module: nn.Linear, value: torch.Tensor) -> None:
    with torch.no_grad():
        module.weight.copy_(value)


@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("change", [replace_by_variable, replace_data, write])
def test_shards_that_a_user_changes_after_no_sync_are_taken_over(
    change: Callable[[nn.Linear, torch.Tensor], None], strategy: Strategy
) -> None:
    """Of three ranks one has no element of the weight."""

    def body(rank: int, world: int) -> bool:
        model = shard(nn.Linear(2, 1), use_orig_params=True, sharding_strategy=strategy)
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        change(model.module, torch.full_like(model.module.weight, 2))
        model(torch.ones(1, 2))
        with FSDP.summon_full_params(model):
            return bool((model.module.weight == 2).all())

    assert run(3, body) == [True] * 3
