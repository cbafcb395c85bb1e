"""Real optimizers: a resumed run equals an uninterrupted one bit for bit, or the save is refused by name."""

from __future__ import annotations

import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardckpt
from shardckpt.errors import ShardckptError, UnsupportedError
from shardckpt.state.keys import slots
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
OTHERS = (
    *("schedulefree.AdamWScheduleFree", "schedulefree.SGDScheduleFree", "prodigyopt.Prodigy", "lion_pytorch.Lion"),
    *("came_pytorch.CAME", "adam_mini.Adam_mini", "muon.SingleDeviceMuonWithAuxAdam"),
    *("heavyball.SOAP", "heavyball.Muon", "heavyball.AdamW"),
)
WITH_OBJECTS = {
    "galore_torch.GaLoreAdamW": ("projector", "galore_torch.galore_projector.GaLoreProjector"),
    "apollo_torch.APOLLOAdamW": ("projector", "apollo_torch.random_projector.GradientProjector"),
}
"""A slot with objects, whose class users register."""

NAMES = [
    *(f"torch.optim.{name}" for name in TORCH),
    *(f"pytorch_optimizer.{name}" for name in PYTORCH_OPTIMIZER),
    *(f"bitsandbytes.optim.{name}" for name in BITSANDBYTES),
    *OTHERS,
]

# State with objects, which are refused without a registered class.
REFUSED = {
    "pytorch_optimizer.ScalableShampoo": "PreConditioner",
    "pytorch_optimizer.SCION": "LMONorm",
    **{name: kind.rpartition(".")[2] for name, (_, kind) in WITH_OBJECTS.items()},
}

SHARDED = (
    *(f"torch.optim.{name}" for name in TORCH if name not in ("Adafactor", "LBFGS", "Rprop")),
    *("pytorch_optimizer.ScheduleFreeAdamW", "pytorch_optimizer.ScheduleFreeSGD", "pytorch_optimizer.GaLore"),
    *("pytorch_optimizer.APOLLO", "pytorch_optimizer.Fira", "pytorch_optimizer.AdEMAMix", "pytorch_optimizer.BCOS"),
    *("pytorch_optimizer.Grams", "pytorch_optimizer.LaProp", "pytorch_optimizer.Lion", "pytorch_optimizer.Ranger"),
    *("pytorch_optimizer.TAM", "schedulefree.AdamWScheduleFree", "schedulefree.SGDScheduleFree", "lion_pytorch.Lion"),
    *("muon.SingleDeviceMuonWithAuxAdam", "galore_torch.GaLoreAdamW", "adam_mini.Adam_mini"),
)
ELASTIC = ("torch.optim.AdamW", "torch.optim.Muon", "pytorch_optimizer.GaLore", "galore_torch.GaLoreAdamW")
"""Loaded on other numbers of ranks in each test run; the others as slow tests."""

STEPS_FIRST = ("adam_mini.Adam_mini",)
"""It has 0-dim DTensors, which a load fills in place, but does not make."""

REFUSED_ON_SHARDS = {
    "torch.optim.LBFGS": r"optim\.state\.0\.weight\.al: .*register_slot",
    "prodigyopt.Prodigy": r"optim\.param_groups: .*different settings",  # its sums differ between ranks
    "pytorch_optimizer.EmoNavi": r"optim\.state\.ema: .*optim_state_dict",
    "pytorch_optimizer.SCION": r"optim\.param_groups\.0\.norm_type",
    **{f"heavyball.{name}": r"optim\.state\.0\.weight\.0: .*register_slot" for name in ("SOAP", "Muon", "AdamW")},
}
"""On shards, each with the place that its message names. The rest raises in its own step."""

Training = tuple[nn.Module, torch.optim.Optimizer]

LOW_RANK = {"rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "muon.SingleDeviceMuonWithAuxAdam": ({"use_muon": True}, {"use_muon": False}),
    "galore_torch.GaLoreAdamW": (LOW_RANK, {}),
    "apollo_torch.APOLLOAdamW": ({**LOW_RANK, "proj": "random", "scale_type": "channel"}, {}),
}
"""Settings of the groups with matrices and with the rest."""


@pytest.fixture(autouse=True)
def _no_rules_nor_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_RULES", {})
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # some compile their steps


@cache
def find(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    return getattr(import_module(module), kind)


def begin(name: str, seed: int, world: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 6))
    if world:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    settings: dict[str, Any] = {"lr": 1e-3} if "lr" in inspect.signature(find(name)).parameters else {}
    if name == "adam_mini.Adam_mini":
        return model, find(name)(model.named_parameters(), dim=64, n_heads=4, verbose=False, **settings)
    parameters: list[Any] = [each for each in model.parameters() if each.dim() == 2 or name != "torch.optim.Muon"]
    if name in GROUPS:
        settings = {} if name.startswith("muon.") else settings
        split = [each for each in parameters if each.dim() == 2], [each for each in parameters if each.dim() != 2]
        parameters = [{"params": each, **own} for each, own in zip(split, GROUPS[name], strict=True)]
    optimizer = find(name)(parameters, **settings)
    if name.startswith("schedulefree."):
        optimizer.train()
    return model, optimizer


def train(training: Training, steps: range) -> None:
    model, optimizer = training
    for step in steps:
        torch.manual_seed(100 + step)
        np.random.seed(step)
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


@pytest.mark.parametrize("name", WITH_OBJECTS)
def test_objects_with_a_registered_class_are_resumed_by_their_attributes(name: str, tmp_path: Path) -> None:
    slot, kind = WITH_OBJECTS[name]
    training = begin(name, 0)
    train(training, range(1))
    assert "register_slot" in refused(shardckpt.save, as_state(training), tmp_path / "before")
    shardckpt.register_slot(find(name), slot, find(kind))
    test_a_resumed_run_goes_on_bit_for_bit(name, tmp_path)


@pytest.mark.parametrize("name", WITH_OBJECTS)
def test_a_load_without_the_registered_class_is_refused(name: str, tmp_path: Path) -> None:
    slot, kind = WITH_OBJECTS[name]
    shardckpt.register_slot(find(name), slot, find(kind))
    first, second = begin(name, 0), begin(name, 1)
    train(first, range(2))
    train(second, range(1))
    shardckpt.save(as_state(first), tmp_path / "step")
    shardckpt.register_slot(find(name), slot, "replicated")
    before, held = list_weights(second[0]), [each.get(slot) for each in second[1].state.values()]
    with pytest.raises(ShardckptError, match=rf"{slot}: it was saved as {kind}.*register_slot"):
        shardckpt.load(as_state(second), tmp_path / "step")
    assert all(map(torch.equal, list_weights(second[0]), before))
    assert [each.get(slot) for each in second[1].state.values()] == held


@pytest.mark.parametrize("name", REFUSED)
def test_state_with_objects_is_refused_by_name(name: str, tmp_path: Path) -> None:
    training = begin(name, 0)
    train(training, range(2))
    with pytest.raises(UnsupportedError, match=rf"optim\..*{REFUSED[name]}"):
        shardckpt.save(as_state(training), tmp_path / "step")
    assert not list(tmp_path.rglob("COMMIT"))


def register(name: str) -> None:
    if name in WITH_OBJECTS:
        slot, kind = WITH_OBJECTS[name]
        shardckpt.register_slot(find(name), slot, find(kind))


def require_equal_runs(name: str, worlds: tuple[int, ...], step: Path) -> None:
    """Save on two ranks, and require that runs on others go on alike."""
    register(name)

    def save(rank: int, world: int) -> list[torch.Tensor]:
        training = begin(name, 0, world)
        train(training, range(2))
        shardckpt.save(as_state(training), step)
        train(training, range(2, 4))
        return list_weights(training[0])

    def load(rank: int, world: int) -> list[torch.Tensor]:
        training = begin(name, 1, world)
        train(training, range(name in STEPS_FIRST))
        shardckpt.load(as_state(training), step)
        train(training, range(2, 4))
        return list_weights(training[0])

    wanted = run(2, save)[0]
    for world in worlds:
        loaded = run(world, load)[0]
        if world == 2:
            assert all(map(torch.equal, loaded, wanted))
        for own, expected in zip(loaded, wanted, strict=True):  # sums over other shards round otherwise
            torch.testing.assert_close(own, expected, rtol=1e-3, atol=0.02 if name.startswith("muon.") else 1e-4)


@pytest.mark.parametrize("name", ELASTIC)
def test_a_sharded_run_goes_on_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    require_equal_runs(name, (1, 2, 3), tmp_path / "step")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(SHARDED) - set(ELASTIC)))
def test_each_optimizer_that_takes_shards_goes_on_on_two_and_three_ranks(name: str, tmp_path: Path) -> None:
    require_equal_runs(name, (2, 3), tmp_path / "step")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*NAMES, *WITH_OBJECTS} - set(SHARDED)))
def test_each_other_optimizer_is_refused_or_raises_in_its_own_step(name: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        try:
            training = begin(name, 0, world)
            train(training, range(2))
        except Exception as error:  # noqa: BLE001  (whatever the optimizer raises)
            return type(error).__name__
        return refused(shardckpt.save, as_state(training), tmp_path / "step")

    told = run(2, body)[0]
    if name in REFUSED_ON_SHARDS:
        assert re.search(REFUSED_ON_SHARDS[name], told), told
    else:
        assert told in ("RuntimeError", "NotImplementedError", "AssertionError")
