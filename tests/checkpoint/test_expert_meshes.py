"""Experts on a mesh of their own, sharded twice: they resume at any number of expert-parallel ranks, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardckpt
from shardckpt import core as ours
from tests.kit.models.states import differing
from tests.kit.models.torch_limits import full_tensor
from tests.kit.ranks.harness import run

ENGINES = {"ours": ours.fully_shard, "torch": theirs.fully_shard}
WIDTH = 6


class AddUp(torch.autograd.Function):
    """A sum over ranks, each of which has the gradient of all."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the sum."""
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient."""
        return grad, None


class Experts(nn.Module):
    """The weights of several experts in one parameter, as torchtitan has them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send all rows to all experts, and add up what the ranks compute."""
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        y = torch.einsum("ebh,ehw->bw", torch.tanh(torch.einsum("bw,ewh->ebh", x.detach(), up)), down)
        return AddUp.apply(y, self.up.device_mesh.get_group()) if isinstance(self.up, DTensor) else y


class Layer(nn.Module):
    """A dense part and experts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(WIDTH, WIDTH), Experts(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the experts compute."""
        x = torch.tanh(self.dense(x))
        return x + self.experts(x)


def build(engine: Callable, world: int, counts: tuple[int, ...], parallel: tuple[int, ...]) -> nn.Module:
    """Return a model whose experts are divided by `parallel` ranks in each layer, then sharded; the rest on all."""
    torch.manual_seed(world)
    model = nn.Sequential(*(Layer(count) for count in counts))
    if world == 1:
        return model
    dense = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer, ep in zip(model, parallel, strict=True):
        mesh = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
        if ep > 1:
            for name, value in list(layer.experts.named_parameters()):
                divided = distribute_tensor(value.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
                setattr(layer.experts, name, nn.Parameter(divided))
        engine(layer.experts, mesh=mesh["efsdp"])
        engine(layer, mesh=dense)
    return engine(model, mesh=dense)


def train(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        torch.manual_seed(number)
        optim.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optim.step()
    return optim


def look_at(model: nn.Module, optim: torch.optim.Optimizer) -> dict:
    """Return weights and moments, as torch itself joins them."""
    found = {}
    for name, value in model.named_parameters():
        slots = {f"{name}/{slot}": each for slot, each in optim.state[value].items()}
        found |= {key: full_tensor_of(each.detach()) for key, each in {name: value, **slots}.items()}
    return found


def full_tensor_of(value: torch.Tensor) -> torch.Tensor:
    return full_tensor(value) if isinstance(value, DTensor) else value.clone()


def save(rank: int, world: int, build: Callable, path: Path) -> dict:
    model = build(world)
    optim = train(model, 2)
    shardckpt.save({"model": model, "optim": optim}, path)
    return look_at(model, optim)


def resume(rank: int, world: int, builds: list[Callable], path: Path, to: Path) -> list[dict]:
    """Load into each model, and save the last."""
    found = []
    for build in builds:
        model = build(world)
        optim = train(model, 0)
        shardckpt.load({"model": model, "optim": optim}, path)
        found.append(look_at(model, optim))
    shardckpt.save({"model": model, "optim": optim}, to)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_experts_resume_at_more_and_fewer_ranks(tmp_path: Path, engine: str) -> None:
    own, other = ENGINES[engine], ENGINES["torch" if engine == "ours" else "ours"]
    counts = (4, 7)

    def on(engine: Callable, *parallel: int) -> Callable:
        return functools.partial(build, engine, counts=counts, parallel=parallel)

    expected = run(4, save, on(own, 2, 2), tmp_path / "0")[0]
    assert len(expected) == 4 * 4 * len(counts)
    chain = [(4, [on(own, 4, 4), on(other, 2, 4)]), (3, [on(own, 3, 1)]), (1, [on(own, 1, 1)]), (4, [on(own, 1, 2)])]
    for at, (world, builds) in enumerate(chain):
        for found in run(world, resume, builds, tmp_path / str(at), tmp_path / str(at + 1)):
            assert [differing(each, expected) for each in found] == [[] for _ in builds]


def build_stage(engine: Callable, world: int, count: int, shape: tuple[int, int, int]) -> nn.Module:
    """Return the layers of a pipeline stage, whose experts are divided by tensor parallelism, then sharded."""
    torch.manual_seed(world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "fsdp", "tp"))
    of_stage = range(2) if shape[0] == 1 else [mesh.get_local_rank("pp")]
    model = Layers({f"layer{number}": Layer(count) for number in of_stage})
    for layer in model.values():
        for name, value in list(layer.experts.named_parameters()):
            divided = distribute_tensor(value.detach(), mesh["tp"], [Shard(0)], src_data_rank=None)
            setattr(layer.experts, name, nn.Parameter(divided))
        engine(layer.experts, mesh=mesh["fsdp"])
        engine(layer, mesh=mesh["fsdp"])
    return model


class Layers(nn.ModuleDict):
    """Layers one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass through all."""
        for layer in self.values():
            x = layer(x)
        return x


@pytest.mark.parametrize("engine", ENGINES)
def test_experts_of_pipeline_stages_resume_on_other_meshes(tmp_path: Path, engine: str) -> None:
    def on(*shape: int) -> Callable:
        return functools.partial(build_stage, ENGINES[engine], count=5, shape=shape)

    saved = run(8, save, on(2, 2, 2), tmp_path / "c", timeout=120.0)
    expected = saved[0] | saved[-1]
    assert len(expected) == 4 * 4 * 2
    for world, shape in ((4, (2, 1, 2)), (4, (1, 1, 4)), (2, (1, 2, 1))):
        found = [values for (values,) in run(world, resume, [on(*shape)], tmp_path / "c", tmp_path / str(shape))]
        assert differing(found[0] | found[-1], expected) == []
