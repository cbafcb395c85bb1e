"""Collectives of a fake world that come late, and memory that turns into NaN as soon as the engine has freed it.

On one GPU NCCL has one rank, and the engine sends nothing. Here it sends to seven ranks that hold the same as this one:
an all-gather copies this rank's shard to every row, a reduce-scatter multiplies its row by the world. What they write
is queued behind a kernel of a millisecond, so a missing wait reads memory as it was before. A run with them has to give
the bits of a run whose every collective the host waits for.

    python tests/kit/ranks/late_collectives.py cuda 2    # steps of each front end, for compute-sanitizer
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from shardckpt import core
from shardckpt.core.comm.streams import DeviceStreams, ResizableStorage
from shardckpt.core.params.gradient_reduction import GradientReducer
from shardckpt.devices import get_current_stream, has_streams, use_stream
from tests.kit.models.models import Stack
from tests.kit.ranks import gpu_scenarios as scenarios

WORLD = 8
CYCLES = 2_000_000  # of a GPU's clock: about 1 ms
ALL_GATHERS = ("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
WAYS = ("", "checkpointing", "no_sync", "offload", "slices")


class Checkpointed(Stack):
    """Its blocks run again in the backward."""

    def call(self, block: nn.Module, x: torch.Tensor, index: int) -> Any:
        return checkpoint(block, x, use_reentrant=False)


@contextlib.contextmanager
def fake_world() -> Iterator[None]:
    """Join a world of which this process is the first rank, and the others do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


# ------------------------------------------------------------------------------------------------------- collectives


class Collectives:
    """Both collectives as this rank sees them.

    Args:
        device: Type of the device.
        is_late: Whether results come late; otherwise the host waits for each.
    """

    def __init__(self, device: str, *, is_late: bool) -> None:
        self._device, self._is_late = device, is_late
        self.calls = 0

    def _begin(self) -> None:
        self.calls += 1
        if not self._is_late:
            synchronize(self._device)
        elif self._device == "cuda":
            torch.cuda._sleep(CYCLES)

    def _end(self) -> None:
        if not self._is_late:
            synchronize(self._device)

    @torch.no_grad()
    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, group: Any = None, async_op: bool = False) -> None:
        """Copy the shard to every row; it may be one of them."""
        self._begin()
        for row in full.view(-1, shard.numel()):
            if row.data_ptr() != shard.data_ptr():
                row.copy_(shard.view(-1))
        self._end()

    @torch.no_grad()
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> None:
        """Return the sum or mean of rows that are alike on all ranks."""
        self._begin()
        factor = 1 if op == dist.ReduceOp.AVG else full.numel() // out.numel()
        torch.mul(full.view(-1, out.numel())[0], factor, out=out.view(-1))
        self._end()


@contextlib.contextmanager
def replaced(places: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes that exist inside the context."""
    before = {place: getattr(*place) for place in places if hasattr(*place)}
    for owner, name in before:
        setattr(owner, name, places[owner, name])
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def replaced_collectives(device: str, *, is_late: bool) -> Iterator[Collectives]:
    """Let all front ends call these collectives instead of torch's."""
    made = Collectives(device, is_late=is_late)
    places: dict[tuple[Any, str], Any] = {(dist, name): made.all_gather for name in ALL_GATHERS}
    places |= {(dist, name): made.reduce_scatter for name in REDUCE_SCATTERS}
    with replaced(places):
        yield made


# ------------------------------------------------------------------------------------------------------------ poison


def fill_freed(nbytes: int, device: torch.device, stream: Any) -> None:
    """Take as much memory as was freed, from the stream that owned it, and fill it with NaN of any dtype."""
    if has_streams(device) and nbytes:
        with use_stream(stream, device):
            torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(0xFF)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what the engine frees: full parameters, outputs of all-gathers, inputs of reductions."""
    allocate, free = ResizableStorage.allocate, ResizableStorage.free
    release_outputs, release_input = DeviceStreams.release_gather_outputs, GradientReducer.release_input

    def allocate_and_note(self: ResizableStorage) -> None:
        if has_streams(self.tensor.device) and not self._has_memory:
            self.owner = get_current_stream(self.tensor.device)
        allocate(self)

    def free_and_fill(self: ResizableStorage, *, keep_memory: bool = False) -> None:
        had = self._has_memory
        free(self, keep_memory=keep_memory)
        if had and not self._has_memory and hasattr(self, "owner"):
            fill_freed(self._nbytes, self.tensor.device, self.owner)

    def release_outputs_and_fill(self: DeviceStreams) -> None:
        sizes = [output.untyped_storage().nbytes() for output, _ in self._copied_outputs]
        release_outputs(self)
        for nbytes in sizes:
            fill_freed(nbytes, self.device, self._get_gather_stream())

    def release_input_and_fill(self: GradientReducer) -> None:
        tensors = self._input.tensors if self._input is not None else ()
        sizes = [(tensor.untyped_storage().nbytes(), tensor.device) for tensor in tensors]
        del tensors
        release_input(self)
        for nbytes, device in sizes:
            fill_freed(nbytes, device, get_current_stream(device))

    with replaced(
        {
            (ResizableStorage, "allocate"): allocate_and_note,
            (ResizableStorage, "free"): free_and_fill,
            (DeviceStreams, "release_gather_outputs"): release_outputs_and_fill,
            (GradientReducer, "release_input"): release_input_and_fill,
        }
    ):
        yield


@contextlib.contextmanager
def unawaited_gathers() -> Iterator[None]:
    """Break the engine: computation does not wait for all-gathers."""
    with replaced({(DeviceStreams, "record_event"): lambda self: None}):
        yield


# ---------------------------------------------------------------------------------------------------------- training


def choose_settings(front_end: str, way: str, low: bool) -> dict[str, Any]:
    """Return the settings of a front end."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if low else {}
    settings: dict[str, Any] = {}
    if front_end == "in place":
        settings["mp_policy"] = core.MixedPrecisionPolicy(**dtypes)
        if way == "offload":
            settings["offload_policy"] = core.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if way == "slices":
            settings["reshard_after_forward"] = 2
    else:
        settings["mixed_precision"] = core.MixedPrecision(**dtypes)
        if way == "offload":
            settings["cpu_offload"] = core.CPUOffload(offload_params=True)
    return settings


def run_backward(model: nn.Module, way: str, step: int, device: str) -> torch.Tensor:
    """Run forward and backward, with `no_sync` of two batches; return the loss."""
    if way == "no_sync":
        inputs = scenarios.get_batch(step, 1, device)
        if isinstance(model, core.FSDPModule):
            model.set_requires_gradient_sync(False)
            scenarios.compute_loss(model, inputs).backward()
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():
                scenarios.compute_loss(model, inputs).backward()
    loss = scenarios.compute_loss(model, scenarios.get_batch(step, 0, device))
    loss.backward()
    return loss.detach()


def train(device: str, front_end: str, way: str, low: bool, steps: int) -> list[torch.Tensor]:
    """Train, and return the losses and this rank's shards."""
    kind = Checkpointed if way == "checkpointing" else Stack
    model = scenarios.build(device, front_end, kind, **choose_settings(front_end, way, low))
    optimizer, losses = scenarios.build_optimizer(model), []
    for step in range(steps):
        losses.append(run_backward(model, way, step, device))
        optimizer.step()
        optimizer.zero_grad()
    return [torch.stack(losses).cpu(), *(scenarios.get_local(each).cpu() for each in model.parameters())]


def find_differences(device: str, front_end: str, way: str, low: bool, steps: int = 20) -> list[str]:
    """Return what differs between late and prompt runs; both must call collectives and stay finite."""
    with replaced_collectives(device, is_late=False) as calls:
        prompt = train(device, front_end, way, low, steps)
    with replaced_collectives(device, is_late=True) as late_calls, poisoned():
        late = train(device, front_end, way, low, steps)
        synchronize(device)
    found = [f"tensor {index}" for index, pair in enumerate(zip(prompt, late, strict=True)) if not torch.equal(*pair)]
    if not all(each.isfinite().all() for each in prompt):
        found.append("a prompt run is not finite")
    if min(calls.calls, late_calls.calls) < steps:
        found.append("no collectives were called")
    return found


def differs_without_waits(device: str) -> bool:
    """Return whether a run differs if computation does not wait for all-gathers; it has to on a GPU."""
    with replaced_collectives(device, is_late=False):
        prompt = train(device, "in place", "", False, 3)
    with replaced_collectives(device, is_late=True), poisoned(), unawaited_gathers():
        late = train(device, "in place", "", False, 3)
        synchronize(device)
    return not all(torch.equal(*pair) for pair in zip(prompt, late, strict=True))


def find_differences_on_rank(rank: int, world: int, device: str, *cells: tuple[str, str, bool]) -> list[list[str]]:
    """Be a rank of `sim.ranks`: leave its group for a fake world, and compare runs of 3 steps."""
    dist.destroy_process_group()
    with fake_world():
        return [find_differences(device, *cell, steps=3) for cell in cells]


def main() -> None:
    """Run some steps of each front end."""
    device, steps = sys.argv[1], int(sys.argv[2])
    with fake_world(), replaced_collectives(device, is_late=True):
        for front_end in ("flat", "orig", "in place"):
            losses, *_ = train(device, front_end, "", False, steps)
            print(f"{front_end}: {steps} steps, loss {losses[-1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
