"""The front ends of the engine, to shard with and to compare: flat, with original parameters, in place."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.kit.models.models import Case, Sharder, built, square
from tests.kit.models.reference import Group, Training, differs, groups, mismatches, reduce_gradients, roughly
from tests.kit.models.torch_limits import full_tensor
from tests.kit.models.under_test import Strategy, core, no_sync, shard, wrap

FRONT_ENDS = ("flat", "orig", "in place")


def sharder(front_end: str, *, frees: bool | None = True, offload: bool = False, **settings: Any) -> Sharder:
    """Return a function that shards a module by a front end.

    Args:
        front_end: One of `FRONT_ENDS`.
        frees: Whether full parameters are freed between forward and backward.
        offload: Shards live on the CPU.
        settings: Other arguments of the front end.
    """

    def apply(module: nn.Module, policy: Any = None) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if front_end == "in place":
                given = {"reshard_after_forward": frees, **settings}
                if offload:
                    given["offload_policy"] = core.CPUOffloadPolicy(pin_memory=False)
                if policy is not None:
                    wrap.auto_wrap(module, policy, core.fully_shard, given)
                return core.fully_shard(module, **given)
            strategy = Strategy.FULL_SHARD if frees in (True, None) else Strategy.SHARD_GRAD_OP
            more = {"sharding_strategy": strategy, "cpu_offload": core.CPUOffload(offload), **settings}
            return shard(module, use_orig_params=front_end == "orig", auto_wrap_policy=policy, **more)

    return apply


def build_groups(model: nn.Module, plain: nn.Module, front_end: str) -> list[Group]:
    """Return the parameters that `model` registers, from those of its unsharded twin."""
    if front_end != "in place":
        return groups(model, plain, front_end == "orig")
    return [Group("", (name,), p.dtype, p.requires_grad, flat=False) for name, p in plain.named_parameters()]


def differing(model: nn.Module, plain: nn.Module, front_end: str, close: Callable[..., Any]) -> list[str]:
    """Return differences of parameters and gradients from the twin, whose gradients are averaged already."""
    return mismatches(model, plain, build_groups(model, plain, front_end), False, close)


def full(value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a parameter or gradient of `fully_shard`."""
    return full_tensor(value).detach() if isinstance(value, DTensor) else value.detach()


def train(which: Case, model: nn.Module, plain: nn.Module, how: Training, front_end: str) -> list[str]:
    """Train both side by side; return differences of losses, gradients and parameters, equal on every rank."""
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in plain.parameters()):
        how = dataclasses.replace(how, close=roughly)
    ours, theirs = how.stepper(model), how.stepper(plain)
    rank, wrong = dist.get_rank(), differing(model, plain, front_end, how.close)
    for step in range(how.steps):
        for micro in range(how.micro):
            batch = which.batch(rank, step * how.micro + micro)
            held = how.no_sync and micro + 1 < how.micro
            with no_sync(model) if held else contextlib.nullcontext():
                loss = square(model(batch))
                loss.backward()
            expected = square(plain(batch))
            expected.backward()
            wrong += differs("loss", loss.detach(), expected.detach(), how.close)
        reduce_gradients(plain, build_groups(model, plain, front_end))
        wrong += differing(model, plain, front_end, how.close)
        ours.step()
        theirs.step()
        wrong = [f"step {step}: {each}" for each in [*wrong, *differing(model, plain, front_end, how.close)]]
        messages: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(messages, wrong)
        wrong = [f"rank {rank}: {each}" for rank, found in enumerate(messages) for each in found]
        if wrong:
            break
        ours.zero_grad()
        theirs.zero_grad()
    return wrong


def twins(which: Case, front_end: str, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Return the unsharded model of a case and its sharded twin."""
    return built(which), which.cut(built(which), sharder(front_end, **settings))
