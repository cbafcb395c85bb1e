"""Training on a device with memory of its own gives the bits of the CPU, on every front end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import harness
import pytest
import sim
import torch
import torch.distributed as dist
from front_ends import FRONT_ENDS
from models import Stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from under_test import core

WORLDS = pytest.mark.parametrize("world", [1, 2])
FRONTS = pytest.mark.parametrize("front_end", FRONT_ENDS)


def build(front_end: str, device: str, **settings: Any) -> nn.Module:
    """Return the sharded model, the same on every rank and device."""
    torch.default_generator.manual_seed(3)
    model = Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if front_end == "in place":
            settings["mesh"] = init_device_mesh(device, (dist.get_world_size(),))
            model = model if "offload_policy" in settings else model.to(device)
            for block in model.blocks:
                core.fully_shard(block, **settings)
            return core.fully_shard(model, **settings)
        settings |= {"use_orig_params": front_end == "orig", "device_id": torch.device(device)}
        for index, block in enumerate(model.blocks):
            model.blocks[index] = core.FullyShardedDataParallel(block, **settings)
        return core.FullyShardedDataParallel(model, **settings)


def batch(step: int, device: str) -> torch.Tensor:
    """Return what a rank trains on in a step."""
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(4, 5, generator=generator).to(device)


def loss_of(model: nn.Module, step: int, device: str) -> torch.Tensor:
    return model(batch(step, device)).float().square().mean()


def local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def kept(model: nn.Module) -> list[Any]:
    """Return this rank's shards, as plain numbers."""
    return [local(parameter).cpu().tolist() for parameter in model.parameters()]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # its default depends on the device


def train(rank: int, world: int, front_end: str, device: str, steps: int = 3, **settings: Any) -> Any:
    """Return losses and shards of some steps."""
    model = build(front_end, device, **settings)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, kept(model)


def on_both(world: int, body: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """Return what `body(rank, world, *args, device)` gives on the device and on the CPU."""

    def on(device: str) -> Callable[..., Any]:
        return lambda rank, world: body(rank, world, *args, device)

    return sim.ranks(world, on("sim")), harness.run(world, on("cpu"))


@WORLDS
@FRONTS
def test_training_gives_the_bits_of_the_cpu(world, front_end):
    found, expected = on_both(world, train, front_end)
    assert found == expected


def offload_of(front_end: str) -> dict[str, Any]:
    """Return the settings that keep shards on the CPU."""
    return (
        {"offload_policy": core.CPUOffloadPolicy()}
        if front_end == "in place"
        else {"cpu_offload": core.CPUOffload(True)}
    )


def train_offloaded(rank: int, world: int, front_end: str, device: str) -> Any:
    return train(rank, world, front_end, device, **offload_of(front_end))


@WORLDS
@FRONTS
def test_offloaded_shards_stay_on_the_cpu_and_train_to_the_same_bits(world, front_end):
    found, expected = on_both(world, train_offloaded, front_end)
    assert found == expected


def copies_of_a_step(rank: int, world: int, front_end: str, offloads: bool, device: str) -> sim.Copies:
    """Return the copies between host and device of a step that is like the ones before."""
    model = build(front_end, device, **(offload_of(front_end) if offloads else {}))
    optimizer, batches = optimizer_of(model), [batch(step, device) for step in range(3)]
    for inputs in batches:
        with sim.counted() as counts:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found = counts()
    return found


@pytest.mark.parametrize("offloads", [False, True], ids=["on the device", "offloaded"])
@FRONTS
def test_the_host_waits_for_no_copy_in_a_step(front_end, offloads):
    found = sim.ranks(2, copies_of_a_step, front_end, offloads, "sim")
    assert [copies.waits for copies in found] == [0, 0]
    assert all((copies.pinned > 0) is offloads for copies in found)


def accumulate(rank: int, world: int, front_end: str, device: str) -> Any:
    """Return offloaded gradients of two backwards, which a hook reads as they come."""
    model = build(front_end, device, **offload_of(front_end))
    seen: list[Any] = []
    for step in range(2):
        if step == 1:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda each: seen.append(local(each.grad).tolist()))
        loss_of(model, step, device).backward()
    return seen, [None if each.grad is None else local(each.grad).tolist() for each in model.parameters()]


@FRONTS
def test_offloaded_gradients_are_there_when_they_are_read(front_end):
    found, expected = on_both(2, accumulate, front_end)
    assert found == expected
