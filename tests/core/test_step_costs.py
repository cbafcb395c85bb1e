"""A step's collectives, their bytes, launches and host waits on the simulated device, next to torch's FSDP2."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kit.models.under_test import TORCH, core
from tests.kit.ranks import harness, sim

pytestmark = pytest.mark.skipif(TORCH, reason="our engine is compared with torch's")

UNITS, WIDTH = 4, 64


class Adapted(nn.Module):
    """A frozen layer with a low-rank one next to it, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.frozen(x) + self.up(self.down(x))


def dense_block() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH))


def partly_frozen_block() -> nn.Module:
    block = dense_block()
    next(block.parameters()).requires_grad_(False)
    return block


def uneven_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH))


def extended_block() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)), nn.LayerNorm(WIDTH))


def halve(local: torch.Tensor, mesh: Any) -> Any:
    return (local.detach().as_subclass(torch.Tensor).to(torch.bfloat16),), None


def show_halved(local: torch.Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    return None if out is not None else (outputs[0], outputs)


BLOCKS = {
    "lora": Adapted,
    "partly frozen": partly_frozen_block,
    "uneven": uneven_block,
    "extensions": extended_block,  # as float8 training has
}
KINDS = [
    (name, low)
    for name in ("plain", "partly frozen", "lora", "uneven", "extensions", "replicas", "offload")
    for low in (False, True)
    if low or name != "extensions"
]
IDS = [f"{kind}, {'bf16' if low else 'fp32'}" for kind, low in KINDS]
EACH_KIND = pytest.mark.parametrize(("kind", "low"), KINDS, ids=IDS)

FLAGS = 128
"""Bytes after each rank's gradients: a flag per parameter, whether any rank has a gradient; full cache lines."""
ZERO_FILL = 1
MORE_LAUNCHES = {("uneven", False): ZERO_FILL, ("uneven", True): ZERO_FILL}  # between parameters, which are aligned
"""Launches per unit above torch's."""
PADDING = {("uneven", False): 8}
"""Bytes per unit above torch's, as parameters are aligned."""


class Launches(TorchDispatchMode):
    """Counts operations that read or write memory: on a GPU, each launches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        is_free = function.is_view or name.startswith(("empty", "new_empty", "set_", "detach", "record_stream"))
        self.count += not is_free and function.namespace != "profiler"
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Costs:
    """What a rank's forward and backward cost."""

    collectives: tuple[tuple[str, int], ...]  # and over how many ranks
    bytes: int  # of the longer side of each collective
    launches: int
    host_waits: int


def shard(engine: Any, model: nn.Module, kind: str, *, low: bool) -> nn.Module:
    world = dist.get_world_size()
    sizes, names = ((world // 2, 2), ("replicate", "shard")) if kind == "replicas" else ((world,), ("shard",))
    settings: dict[str, Any] = {"mesh": init_device_mesh("sim", sizes, mesh_dim_names=names)}
    if low:
        settings["mp_policy"] = engine.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "offload":
        settings["offload_policy"] = engine.CPUOffloadPolicy()
    for module in [*model, model]:
        engine.fully_shard(module, **settings)
    for parameter in model.parameters():
        if kind == "extensions" and parameter.dim() == 2:
            local = parameter._local_tensor
            local.fsdp_pre_all_gather = MethodType(halve, local)
            local.fsdp_post_all_gather = MethodType(show_halved, local)
    return model


def costs_of_a_step(engine: Any, kind: str, *, low: bool) -> Costs:
    """Return what the third step costs with an engine, or what the model alone costs."""
    build = BLOCKS.get(kind, dense_block)
    model = nn.Sequential(*(build() for _ in range(UNITS)))
    if engine is None:
        model.to("sim", torch.bfloat16 if low else None)
    else:
        shard(engine, model if kind == "offload" else model.to("sim"), kind, low=low)
    inputs = torch.ones(2, WIDTH, device="sim", dtype=torch.bfloat16 if low else None)
    for _ in range(3):
        model.zero_grad()
        with harness.recorded() as calls, Launches() as launches, sim.counted() as counts:
            model(inputs).float().sum().backward()
            copies = counts()
    return Costs(
        tuple(sorted((call.op, call.ranks) for call in calls)),
        sum(max(call.sent, call.received) * getattr(torch, call.dtype).itemsize for call in calls),
        launches.count,
        copies.waits + copies.syncs,
    )


@functools.cache
def costs(kind: str, low: bool) -> tuple[Costs, Costs, Costs]:
    """Return what a step of rank 0 costs: the plain model's, ours and torch's."""

    def body(rank: int, world: int) -> list[Costs]:
        return [costs_of_a_step(engine, kind, low=low) for engine in (None, core, torch_fsdp)]

    first, *others = sim.ranks(4 if kind == "replicas" else 2, body)
    assert all(other == first for other in others)
    return tuple(first)


@EACH_KIND
def test_a_step_has_the_same_collectives_as_torch(kind, low):
    _, ours, torchs = costs(kind, low)
    assert ours.collectives == torchs.collectives
    assert len(ours.collectives) >= 3 * UNITS


@EACH_KIND
def test_collectives_have_the_bytes_of_torch_and_flags(kind, low):
    _, ours, torchs = costs(kind, low)
    rows = 3 if kind == "replicas" else 2  # of a reduce-scatter, and of a sum over replicas
    assert ours.bytes <= torchs.bytes + UNITS * (rows * FLAGS + PADDING.get((kind, low), 0))


@EACH_KIND
def test_a_unit_launches_no_more_than_with_torch(kind, low):
    plain, ours, torchs = costs(kind, low)
    assert ours.launches <= torchs.launches + UNITS * MORE_LAUNCHES.get((kind, low), 0)
    assert ours.launches > plain.launches + UNITS


@EACH_KIND
def test_the_host_waits_no_more_than_with_torch(kind, low):
    _, ours, torchs = costs(kind, low)
    assert ours.host_waits <= (UNITS if kind == "offload" else 0)
    assert ours.host_waits <= torchs.host_waits
