"""Optimizer state lies where its parameter does, also where torch's arithmetic drops the stride of its placements."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import shardckpt
from shardckpt.core.modules.dtensors import wrap_local
from tests.kit.ranks.harness import run

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, foreach=False),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.1, foreach=False),
}
"""Optimizers that put a result of arithmetic in the place of a slot."""


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def sharded(module: str) -> nn.Module:
    """The model over 2 x 2 ranks, tensor parallelism inside of a `fully_shard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(built(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    importlib.import_module(module).fully_shard(model, mesh=mesh["dp"])
    return model


def trained(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    data = torch.arange(24.0).view(6, 4) / 24
    for _ in range(2):
        optim.zero_grad()
        (100 * model(data).pow(2).mean()).backward()
        optim.step()
    return {"model": model, "optim": optim}


@contextmanager
def strided_equal_to_plain() -> Iterator[None]:
    """Let torch call a strided shard equal to a plain one, as versions do whose arithmetic drops the stride."""
    with patch.object(_StridedShard, "__eq__", _is_same_dim), patch.object(Shard, "__eq__", _is_same_dim):
        yield


def _is_same_dim(one: Any, other: Any) -> bool:
    return getattr(other, "dim", None) == one.dim


def without_stride(value: DTensor) -> DTensor:
    """The same rows under plain placements, as `2 * value` is with torch 2.9."""
    plain = [Shard(p.dim) if hasattr(p, "split_factor") else p for p in value.placements]
    return wrap_local(value.to_local(), value.device_mesh, plain, value.shape, value.stride())


@pytest.mark.parametrize("module", ["torch.distributed.fsdp", "shardckpt.core"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_trained_slots_are_those_of_the_unsharded_model(kind: str, module: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        model = sharded(module)
        shardckpt.save(trained(model, OPTIMIZERS[kind](model.parameters())), str(tmp_path / "step"))

    run(4, body)
    alone = built()
    expected = trained(alone, OPTIMIZERS[kind](alone.parameters()))["optim"].state_dict()["state"]
    model = built()
    optim = OPTIMIZERS[kind](model.parameters())
    shardckpt.load({"model": model, "optim": optim}, str(tmp_path / "step"))
    for number, slots in optim.state_dict()["state"].items():
        for slot, value in slots.items():
            torch.testing.assert_close(value, expected[number][slot], msg=lambda m, s=slot, n=number: f"{n}.{s}: {m}")


@pytest.mark.parametrize("kind", ["saved", "loaded", "sharded state", "variant"])
def test_a_slot_without_the_stride_of_its_parameter_has_the_rows_of_it(kind: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        model = sharded("torch.distributed.fsdp")
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            optim.state[parameter]["momentum_buffer"] = parameter.detach().clone()
        if kind == "loaded":
            shardckpt.save({"model": model, "optim": optim}, str(tmp_path / "step"))
        plain = without_stride(model[0].weight.detach())
        if kind == "loaded":
            plain.to_local().mul_(0)
        optim.state[model[0].weight]["momentum_buffer"] = plain
        with strided_equal_to_plain():
            if kind == "saved":
                shardckpt.save({"model": model, "optim": optim}, str(tmp_path / "step"))
            elif kind == "loaded":
                shardckpt.load({"model": model, "optim": optim}, str(tmp_path / "step"))
                found = optim.state[model[0].weight]["momentum_buffer"].to_local()
                assert torch.equal(found, model[0].weight.detach().to_local())
            elif kind == "sharded state":
                state = shardckpt.optim_state_dict(model, optim, "SHARDED")["state"]["0.weight"]["momentum_buffer"]
                assert hasattr(state.placements[0], "split_factor")
            else:
                weights = {"0.weight": plain}
                shardckpt.save({"model": model, "ema": shardckpt.Variant(weights, of=model)}, str(tmp_path / "step"))

    run(4, body)
    if kind in ("saved", "variant"):
        name = "optim.state.0.weight.momentum_buffer" if kind == "saved" else "ema.0.weight"
        saved = shardckpt.open(str(tmp_path / "step"))[name][...]
        assert torch.equal(saved, built()[0].weight.detach())
