"""Modules and optimizers that Fabric of Lightning has set up are saved as they are, with the names of the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import shardckpt
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

NAMES = ["0.bias", "0.weight", "2.bias", "2.weight"]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    from lightning.fabric import Fabric

    from tests.kit.runs import lightning_trainers

    assert Fabric
    assert lightning_trainers.WholeAdamW


def set_up(kind: str, rank: int, world: int, seed: int, *, is_compiled: bool = False) -> dict[str, Any]:
    """Return a model and an optimizer of Fabric, and Fabric itself."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    from tests.kit.runs import lightning_trainers as trainers

    class ShardedByFSDP1(FSDPStrategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **self._fsdp_kwargs)

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        for part in (model[0], model):
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    strategies = {
        "one": lambda: "auto",
        "ddp": DDPStrategy,
        "fsdp1": ShardedByFSDP1,
        "fsdp2": lambda: ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1),
    }
    trainers.be_rank(rank, world)
    torch.manual_seed(seed)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategies[kind]())
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
    optim = fabric.setup_optimizers(trainers.WholeAdamW(model.parameters(), lr=0.1))
    return {"model": torch.compile(model, backend="eager") if is_compiled else model, "optim": optim, "fabric": fabric}


def step(given: dict[str, Any], number: int) -> float:
    """Train on the same batch on every rank; the loss."""
    loss = given["model"](torch.sin(torch.arange(16.0) * number).view(2, 8)).square().mean()
    given["fabric"].backward(loss)
    given["optim"].step()
    given["optim"].zero_grad()
    return loss.item()


def save_and_train(rank: int, world: int, kind: str, path: str, is_compiled: bool) -> Any:
    given = set_up(kind, rank, world, seed=1, is_compiled=is_compiled)
    for number in (1, 2):
        step(given, number)
    state = {"model": given["model"], "optim": given["optim"]}
    for _ in range(2):  # the second time with the plan of the first
        shardckpt.save(state, path, overwrite=True)
    names = sorted(shardckpt.model_state_dict(given["model"], kind="sharded"))
    return names, sorted(shardckpt.optim_state_dict(given["model"], given["optim"])["state"]), step(given, 3)


def load_and_train(rank: int, world: int, kind: str, path: str) -> float:
    given = set_up(kind, rank, world, seed=2)
    shardckpt.load({"model": given["model"], "optim": given["optim"]}, path)
    return step(given, 3)


@pytest.mark.parametrize(
    ("kind", "world", "other"), [("one", 1, "fsdp2"), ("ddp", 2, "fsdp1"), ("fsdp1", 2, "ddp"), ("fsdp2", 2, "one")]
)
def test_objects_of_fabric_are_saved_by_the_names_of_the_model(
    kind: str, world: int, other: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    (names, slots, expected), *_ = run(world, save_and_train, kind, path, kind == "one")
    assert names == slots == NAMES
    with shardckpt.open(path) as opened:
        assert sorted(opened["model"]) == sorted(opened["optim"]["state"]) == NAMES
    assert run(world, load_and_train, kind, path) == [expected] * world
    losses = run(1 if other == "one" else 2, load_and_train, other, path)
    assert losses == [pytest.approx(expected, rel=1e-5)] * len(losses)
