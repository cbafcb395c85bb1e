"""Real optimizers: a resumed run equals an uninterrupted one bit for bit, or the save is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardckpt
from shardckpt.errors import UnsupportedError
from tests.kit.models.states import refused
from tests.kit.ranks.harness import run

TORCH = (
    *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adagrad", "Adadelta"),
    *("Adafactor", "LBFGS", "Muon"),
)
PYTORCH_OPTIMIZER = (
    *("SOAP", "Shampoo", "Kron", "GaLore", "APOLLO", "Fira", "RACS", "Alice", "ScheduleFreeAdamW", "ScheduleFreeSGD"),
    *("Prodigy", "DAdaptAdam", "Lion", "Lamb", "AdaFactor", "CAME", "SM3", "AdEMAMix", "StableAdamW", "SPAM", "MARS"),
    *("LaProp", "ADOPT", "FAdam", "Grams", "BCOS", "TAM", "Ranger", "EmoNavi"),
)
BITSANDBYTES = (*("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "Adagrad8bit", "LAMB8bit", "AdEMAMix8bit", "AdamW32bit"),)

NAMES = [
    *(f"torch.optim.{name}" for name in TORCH),
    *(f"pytorch_optimizer.{name}" for name in PYTORCH_OPTIMIZER),
    *(f"bitsandbytes.optim.{name}" for name in BITSANDBYTES),
]

# State with objects: its class cannot be saved as data.
REFUSED = {
    "pytorch_optimizer.ScalableShampoo": "PreConditioner",
    "pytorch_optimizer.SCION": "LMONorm",
}

# With DTensors, the others in this file raise in their own step.
SHARDED = (
    *("torch.optim.AdamW", "torch.optim.Muon", "torch.optim.NAdam", "torch.optim.Adagrad"),
    *("pytorch_optimizer.ScheduleFreeAdamW", "pytorch_optimizer.GaLore", "pytorch_optimizer.APOLLO"),
    "pytorch_optimizer.Fira",
)

Training = tuple[nn.Module, torch.optim.Optimizer]


@cache
def find(name: str) -> Callable[..., torch.optim.Optimizer]:
    module, _, kind = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    return getattr(import_module(module), kind)


def begin(name: str, seed: int, world: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 6))
    if world:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    matrices_only = name == "torch.optim.Muon"
    parameters = [each for each in model.parameters() if each.dim() == 2 or not matrices_only]
    settings = {"lr": 1e-3} if "lr" in inspect.signature(find(name)).parameters else {}
    return model, find(name)(parameters, **settings)


def train(training: Training, steps: range) -> None:
    model, optimizer = training
    for step in steps:
        torch.manual_seed(100 + step)
        batch = torch.randn(4, 64)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def as_state(training: Training) -> dict[str, Any]:
    return {"model": training[0], "optim": training[1]}


def list_weights(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(each, "full_tensor", each.detach)().detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    first, second = begin(name, 0), begin(name, 1)
    train(first, range(3))
    shardckpt.save(as_state(first), tmp_path / "step")
    shardckpt.load(as_state(second), tmp_path / "step")
    train(first, range(3, 6))
    train(second, range(3, 6))
    assert all(map(torch.equal, list_weights(second[0]), list_weights(first[0])))
    assert second[1].state_dict().keys() == first[1].state_dict().keys()
    both = first[1], second[1]
    kept = [[sorted(slots) for slots in each.state.values() if isinstance(slots, dict)] for each in both]
    assert kept[0] == kept[1], "no stale copies of nested slots"


@pytest.mark.parametrize("name", REFUSED)
def test_state_with_objects_is_refused_by_name(name: str, tmp_path: Path) -> None:
    training = begin(name, 0)
    train(training, range(2))
    with pytest.raises(UnsupportedError, match=rf"optim\..*{REFUSED[name]}"):
        shardckpt.save(as_state(training), tmp_path / "step")
    assert not list(tmp_path.rglob("COMMIT"))


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_run_goes_on_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    def save(rank: int, world: int) -> list[torch.Tensor]:
        training = begin(name, 0, world)
        train(training, range(2))
        shardckpt.save(as_state(training), tmp_path / "step")
        train(training, range(2, 4))
        return list_weights(training[0])

    def load(rank: int, world: int) -> list[torch.Tensor]:
        training = begin(name, 1, world)
        shardckpt.load(as_state(training), tmp_path / "step")
        train(training, range(2, 4))
        return list_weights(training[0])

    wanted = run(2, save)[0]
    assert all(map(torch.equal, run(2, load)[0], wanted))
    for world in (1, 3):  # sums over other shards round otherwise
        for own, expected in zip(run(world, load)[0], wanted, strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)


def test_sharded_state_without_a_rule_is_refused_by_name(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        training = begin("torch.optim.LBFGS", 0, world)
        train(training, range(1))
        return refused(shardckpt.save, as_state(training), tmp_path / "step")

    for told in run(2, body):
        assert "optim.state.0.weight" in told
        assert "register_slot" in told
