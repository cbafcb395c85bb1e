"""Gradients of parameters that something else than their unit computes with, between forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardckpt
from shardckpt.core.wrap import ModuleWrapPolicy
from tests.kit.models.under_test import TORCH, Strategy, no_sync, shard
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(TORCH, reason="asks states of our package")

Loss = Callable[[nn.Module, nn.Module, torch.Tensor], torch.Tensor]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


class Net(nn.Module):
    """The bias of the head is wholly on one rank: its shard has the shape of the full parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inside(x))


class Shared(nn.Module):
    """Two units have one module in common."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.first = nn.Sequential(shared, nn.Tanh())
        self.second = nn.Sequential(shared, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class SharedLater(Shared):
    """The unit that has the shared module computes behind the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(x))


def penalty(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a penalty that differs between ranks."""
    return (x.mean() * net.head.weight.square()).sum() + x.sum() * net.head.bias.prod()


def with_penalty(model: nn.Module, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + penalty(net, x)


def with_penalty_before(model: nn.Module, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    before = penalty(net, x)
    return before + model(x).square().mean()


def of_penalty_alone(model: nn.Module, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return penalty(net, x)


def of_result(model: nn.Module, _: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def compare(
    kind: type[nn.Module], loss: Loss, strategy: str, *, accumulates: bool = False, syncs: bool = False
) -> None:
    """Train on two ranks, and compare with an unsharded model that has the data of both."""

    def body(rank: int, world: int) -> float:
        torch.manual_seed(0)
        plain = kind()
        torch.manual_seed(0)
        policy = ModuleWrapPolicy({nn.Sequential})
        net = kind()
        model = shard(net, use_orig_params=True, auto_wrap_policy=policy, sharding_strategy=Strategy[strategy])
        ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain))
        for step in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            for micro in range(1 + accumulates):
                data = torch.randn(world, 3, 4, generator=torch.Generator().manual_seed(2 * step + micro))
                for each in data:
                    (loss(plain, plain, each) / world).backward()
                with no_sync(model) if micro < accumulates and not syncs else contextlib.nullcontext():
                    loss(model, net, data[rank]).backward()
            ours.step()
            theirs.step()
        found = shardckpt.model_state_dict(model)
        gap = torch.stack([(found[name] - value).abs().max() for name, value in plain.state_dict().items()]).max()
        dist.all_reduce(gap, op=dist.ReduceOp.MAX)
        return float(gap)

    assert max(run(2, body)) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loss", [with_penalty, of_penalty_alone])
def test_a_penalty_of_kept_parameters_is_reduced(loss: Loss, strategy: str) -> None:
    compare(Net, loss, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_penalty_of_kept_parameters_accumulates_without_reduction(strategy: str) -> None:
    compare(Net, with_penalty, strategy, accumulates=True)


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_units_that_keep_their_parameters_may_share_a_module(strategy: str) -> None:
    compare(Shared, of_result, strategy)


def test_without_shards_all_that_computes_with_parameters_is_reduced() -> None:
    compare(Net, with_penalty_before, "NO_SHARD")
    compare(Net, with_penalty_before, "NO_SHARD", accumulates=True)
    compare(Net, with_penalty, "NO_SHARD", accumulates=True, syncs=True)
    compare(Net, with_penalty_before, "NO_SHARD", accumulates=True, syncs=True)
    compare(SharedLater, of_result, "NO_SHARD")
    compare(SharedLater, of_result, "NO_SHARD", accumulates=True, syncs=True)


def test_hooks_of_users_are_called_once_with_the_reduced_gradient() -> None:
    def body(rank: int, world: int) -> list[tuple[int, ...]]:
        model = shard(Net(), use_orig_params=True, sharding_strategy=Strategy.FULL_SHARD)
        called: list[tuple[int, ...]] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: called.append(tuple(p.grad.shape)))
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
        return called

    for called in run(2, body):
        assert called and all(len(shape) == 1 for shape in called) and len(called) % 2 == 0
