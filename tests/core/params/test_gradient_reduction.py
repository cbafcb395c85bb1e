"""Gradients reach who waits for them: hooks behind accumulation, and optimizers that step in backward."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils._python_dispatch import TorchDispatchMode

from shardckpt import core
from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.core.comm.collectives import Pending
from shardckpt.state import model_state_dict
from tests.kit.ranks.harness import mark, note, run, since
from tests.kit.writers.share_writers import as_rank


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


class Launches(TorchDispatchMode):
    """Counts operations that read or write memory: on a GPU, each launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        is_free = function.is_view or name.startswith(("empty", "new_empty", "set_", "detach"))
        self.count += not is_free and function.namespace != "profiler"
        return function(*args, **(kwargs or {}))


def launches(shard, build, policy, trains) -> float:
    """Return the launches per unit in one step, for four units, that the plain module does not need."""
    units, x = 4, torch.ones(2, 64)
    counts = []
    for is_sharded in (False, True):
        model = nn.Sequential(*(build() for _ in range(units)))
        for unit in model:
            next(unit.parameters()).requires_grad_(trains)
        if is_sharded:
            for module in (*model, model):
                shard.fully_shard(
                    module, mesh=init_device_mesh("cpu", (8,)), mp_policy=shard.MixedPrecisionPolicy(**policy)
                )
        else:
            model.to(policy.get("param_dtype"))
            x = x.to(policy.get("param_dtype"))
        for _ in range(2):
            model.zero_grad()
            with Launches() as found:
                model(x).float().sum().backward()
        counts.append(found.count)
    return (counts[1] - counts[0]) / units


def ten_params() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.LayerNorm(64))


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
def test_a_unit_launches_no_more_than_that_of_torch(policy):
    with as_rank(0, 8):
        ours, theirs = (launches(each, ten_params, policy, trains=True) for each in (core, fsdp))
        assert ours <= min(theirs, 10)


def test_frozen_and_odd_parameters_cost_few_launches():
    def build():
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 10), nn.Linear(10, 64))

    with as_rank(0, 8):
        assert launches(core, build, {}, trains=True) <= 9  # one for the zeros between parameters
        assert launches(core, build, {}, trains=False) <= 13  # two messages' copies
