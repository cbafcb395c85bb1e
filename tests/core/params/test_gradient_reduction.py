"""Gradients reach who waits for them: hooks behind accumulation, and optimizers that step in backward."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.core.comm.collectives import Pending
from shardckpt.state import model_state_dict
from tests.kit.ranks.harness import mark, note, run, since


def sharded(net: nn.Module, style: str) -> nn.Module:
    if style == "in place":
        fully_shard(net[0])
        return fully_shard(net)
    net[0] = FullyShardedDataParallel(net[0], use_orig_params=style == "orig")
    return FullyShardedDataParallel(net, use_orig_params=style == "orig")


@pytest.mark.parametrize("style", ["flat", "orig", "in place"])
def test_optimizers_given_to_parameters_step_in_backward(style):
    def body(rank, world):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        usual, early = sharded(copy.deepcopy(net), style), sharded(copy.deepcopy(net), style)
        optim = torch.optim.SGD(usual.parameters(), lr=0.1)
        _apply_optimizer_in_backward(torch.optim.SGD, [p for p in early.parameters() if p.numel()], {"lr": 0.1})
        x = torch.randn(2, 3)
        for _ in range(2):
            usual(x).square().sum().backward()
            optim.step()
            optim.zero_grad()
            early(x).square().sum().backward()
        a, b = model_state_dict(usual), model_state_dict(early)
        return all(torch.equal(a[name], b[name]) for name in a), all(p.grad is None for p in early.parameters())

    assert run(2, body) == [(True, True)] * 2


@pytest.mark.parametrize("style", ["flat", "orig", "in place"])
def test_hooks_behind_accumulation_are_called_with_the_averaged_gradient(style):
    def body(rank, world):
        model = sharded(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), style)
        seen = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
        model(torch.randn(2, 3)).sum().backward()
        return len(seen) == sum(p.grad is not None for p in model.parameters()) and all(seen)

    assert run(2, body) == [True, True]


@pytest.mark.parametrize("style", ["flat", "in place"])
def test_hooks_come_at_the_same_place_among_collectives_whenever_reductions_end(style, monkeypatch):
    """A hook may run collectives of its own, as an optimizer that gathers a gradient does."""

    def body(rank, world):
        monkeypatch.setattr(Pending, "done", rank == 0)  # it ends at once for one rank, late for the other
        torch.manual_seed(0)
        shard = fully_shard if style == "in place" else FullyShardedDataParallel
        model = shard(nn.Sequential(*(shard(nn.Linear(4, 4)) for _ in range(4))))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: note("hook"))
        start = mark()
        model(torch.ones(2, 4)).sum().backward()
        return [str(call) for call in since(start)]

    first, second = run(2, body)
    assert any(call.startswith("hook") for call in first)
    assert first == second
