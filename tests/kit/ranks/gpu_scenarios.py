"""Scenarios for tests of a GPU. They also run on the simulated device, so that they work when there is a GPU.

A scenario is `name(rank, world, device, ...)`; it returns what a test compares. With the device "sim", `sleep` does
nothing: all streams of the simulated device are one queue.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardckpt
from shardckpt import core, state
from shardckpt.core.fsdp2 import fully_shard
from shardckpt.core.params.unsharded_params import UnshardedParams
from tests.kit.models.models import Stack
from tests.kit.ranks import sim

NO_ALLOCATOR = "no allocator"
CYCLES = 100_000_000  # of a GPU's clock: about 50 ms
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sleep(device: str) -> None:
    """Queue a kernel of 50 ms on the current stream: what does not wait for it reads what was there before."""
    if device == "cuda":
        torch.cuda._sleep(CYCLES)


@contextlib.contextmanager
def without_waits(device: str) -> Iterator[None]:
    """Fail if the host waits for the device inside."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    elif device == "sim":
        with sim.counted() as counts:
            yield
            assert counts().waits == 0, counts()
    else:
        yield


# ------------------------------------------------------------------------------------------------------------- models


def build_plain(device: str, kind: type[nn.Module] = Stack) -> nn.Module:
    """Return the unsharded model in float32, the same on every rank."""
    torch.default_generator.manual_seed(3)
    return kind().to(device)


def build(device: str, front_end: str, kind: type[nn.Module] = Stack, **settings: Any) -> nn.Module:
    """Return the same model, sharded."""
    model = build_plain(device, kind)
    if front_end == "in place":
        settings["mesh"] = init_device_mesh(device, (dist.get_world_size(),))
        for block in model.blocks:
            core.fully_shard(block, **settings)
        return core.fully_shard(model, **settings)
    settings |= {"use_orig_params": front_end == "orig", "device_id": torch.device(device)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, block in enumerate(model.blocks):
            model.blocks[index] = core.FullyShardedDataParallel(block, **settings)
        return core.FullyShardedDataParallel(model, **settings)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def get_batch(step: int, rank: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return torch.randn(4, 5, generator=generator).to(device)


def compute_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).float().square().mean()


def train_plain(world: int, device: str, steps: int) -> dict[str, torch.Tensor]:
    """Return the parameters of the unsharded model after steps on the batches of all ranks."""
    model = build_plain(device)
    optimizer = build_optimizer(model)
    for step in range(steps):
        for rank in range(world):
            compute_loss(model, get_batch(step, rank, device)).backward()
        for parameter in model.parameters():
            parameter.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def find_differences(model: nn.Module, expected: dict[str, torch.Tensor], *, is_exact: bool) -> list[str]:
    """Return the names of parameters that are not as expected."""
    found = state.model_state_dict(model, "full", offload_to_cpu=True)
    are_same: Callable[..., bool] = torch.equal if is_exact else torch.allclose
    return [name for name, value in expected.items() if not are_same(found[name], value)]


def get_local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


# ------------------------------------------------------------------------------------------------------------- delays


class SleepingAllGather(core.AllGather):
    """A custom all-gather whose result comes late."""

    def __init__(self, device: str) -> None:
        self.device = device

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        sleep(self.device)
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class SleepingReduceScatter(SleepingAllGather, core.ReduceScatter):
    """A custom reduce-scatter whose result comes late."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        sleep(self.device)
        return REDUCE_SCATTER(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


@contextlib.contextmanager
def late_slices(device: str) -> Iterator[None]:
    """Make the slices late that units keep between forward and backward."""
    original = UnshardedParams._keep_partial_shard

    def keep(self: UnshardedParams) -> None:
        sleep(device)
        original(self)
        sleep(device)

    UnshardedParams._keep_partial_shard = keep
    try:
        yield
    finally:
        UnshardedParams._keep_partial_shard = original


def set_late_collectives(model: nn.Module, device: str) -> None:
    for module in model.modules():
        if isinstance(module, core.FSDPModule):
            module.set_custom_all_gather(SleepingAllGather(device))
            module.set_custom_reduce_scatter(SleepingReduceScatter(device))


# ---------------------------------------------------------------------------------------------------------- scenarios


def train(
    rank: int, world: int, device: str, front_end: str, steps: int = 20, late: str = "", allocates: bool = False
) -> list[str]:
    """Train, with something late, and return which parameters differ from those of the unsharded model.

    With one rank every bit is compared.
    """
    settings = {"reshard_after_forward": 2} if late == "slices" else {}
    model = build(device, front_end, **settings)
    if allocates:
        if fully_shard.allocator(dist.group.WORLD, torch.device(device)) is None:
            return [NO_ALLOCATOR]
        model.set_allocate_memory_from_process_group_for_comm(True)
    if late == "collectives":
        set_late_collectives(model, device)
    optimizer = build_optimizer(model)
    with late_slices(device) if late == "slices" else contextlib.nullcontext():
        for step in range(steps):
            compute_loss(model, get_batch(step, rank, device)).backward()
            if late == "optimizer":
                sleep(device)
            optimizer.step()
            if late == "optimizer":
                sleep(device)
            optimizer.zero_grad()
    return find_differences(model, train_plain(world, device, steps), is_exact=world == 1)


def step_without_waits(rank: int, world: int, device: str, front_end: str) -> bool:
    """Run forward and backward while the host may not wait for the device, after warm-up; return that it did not."""
    model = build(device, front_end)
    optimizer, inputs = build_optimizer(model), get_batch(0, rank, device)
    for _ in range(3):
        compute_loss(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    with without_waits(device):
        compute_loss(model, inputs).backward()
    return True


def get_and_load_states(rank: int, world: int, device: str, front_end: str, folder: str) -> list[str]:
    """Take and load states of each kind, save and load; return what went wrong. The group has no CPU backend."""
    model = build(device, front_end)
    optimizer = build_optimizer(model)
    compute_loss(model, get_batch(0, rank, device)).backward()
    optimizer.step()
    expected = train_plain(world, device, 1)
    wrong = find_differences(model, expected, is_exact=world == 1)
    for kind in ("full", "sharded"):
        saved = state.model_state_dict(model, kind), state.optim_state_dict(model, optimizer, kind)
        other = build(device, front_end)
        again = build_optimizer(other)
        state.load_model_state_dict(other, saved[0])
        state.load_optim_state_dict(other, again, saved[1])
        wrong += [f"{kind}: {name}" for name in find_differences(other, expected, is_exact=world == 1)]
    shardckpt.save({"model": model, "optim": optimizer}, f"{folder}/c")
    other = build(device, front_end)
    shardckpt.load({"model": other, "optim": build_optimizer(other)}, f"{folder}/c")
    return wrong + [f"loaded: {name}" for name in find_differences(other, expected, is_exact=world == 1)]


def save_behind_a_sleep(rank: int, world: int, device: str, front_end: str, folder: str) -> list[Any]:
    """Save in the background behind a queued kernel, step at once, and return whether the file has the earlier weights.

    The first save of a process, which pins memory, may wait for the device. The next ones, without and with
    `overlap_staging`, must not; nor may the steps behind them.
    """
    model = build(device, front_end)
    optimizer, inputs = build_optimizer(model), get_batch(0, rank, device)
    compute_loss(model, inputs).backward()
    optimizer.step()
    shardckpt.async_save({"model": model, "optim": optimizer}, f"{folder}/first").result()
    other = build(device, front_end)
    return [_save_and_step(model, other, optimizer, inputs, folder, overlaps=each) for each in (False, True)]


def _save_and_step(
    model: Any, other: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, folder: str, *, overlaps: bool
) -> tuple[bool, bool]:
    """Return whether a save has the weights from before the step behind it, and whether the step changed them."""
    device, path = inputs.device.type, f"{folder}/overlaps-{overlaps}"
    optimizer.zero_grad()
    compute_loss(model, inputs).backward()
    before = [get_local(parameter).cpu().clone() for parameter in model.parameters()]
    sleep(device)
    with without_waits(device):
        handle = shardckpt.async_save({"model": model, "optim": optimizer}, path, overlap_staging=overlaps)
        optimizer.step()
    handle.result()
    after = [get_local(parameter).cpu().clone() for parameter in model.parameters()]
    shardckpt.load({"model": other}, path, include="model.*")
    found = [get_local(parameter).cpu() for parameter in other.parameters()]
    is_saved = all(torch.equal(one, two) for one, two in zip(found, before, strict=True))
    return is_saved, any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
