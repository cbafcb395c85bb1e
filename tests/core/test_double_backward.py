"""Gradients of gradients and functional transforms are refused by name, not met as faults of memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardckpt.core import FullyShardedDataParallel, ShardingStrategy, fully_shard
from tests.kit.ranks.harness import run


def sharded(style: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    if style == "in place":
        return fully_shard(net)
    strategy = ShardingStrategy.NO_SHARD if style == "whole" else ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(net, sharding_strategy=strategy, use_orig_params=style == "orig")


@pytest.mark.parametrize("style", ["flat", "orig", "in place"])
def test_create_graph_is_refused_with_the_units_name_and_the_next_iteration_works(style):
    def body(rank, world):
        model = sharded(style)
        x = torch.randn(2, 3, requires_grad=True)
        with pytest.raises(NotImplementedError, match=r"Sequential.*create_graph=True"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        model(x).sum().backward()
        return all(p.grad is not None for p in model.parameters() if p.numel())

    assert run(2, body) == [True, True]


def test_what_is_never_freed_gives_gradients_of_gradients():
    def body(rank, world):
        model = sharded("whole")
        x = torch.randn(2, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return bool(next(p.grad for p in model.parameters()).abs().sum() > 0)

    assert run(2, body) == [True, True]


@pytest.mark.parametrize("style", ["flat", "orig", "in place"])
def test_transforms_that_differentiate_are_refused_and_the_next_iteration_works(style):
    def body(rank, world):
        model = sharded(style)
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            torch.func.grad(lambda x: model(x).sum())(torch.randn(2, 3))
        model(torch.randn(2, 3)).sum().backward()
        return all(p.grad is not None for p in model.parameters() if p.numel())

    assert run(2, body) == [True, True]
