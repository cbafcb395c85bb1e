"""Slots with a registered rule are saved and loaded on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardckpt
from shardckpt import core
from shardckpt.errors import UsageError
from shardckpt.state.keys import slots
from tests.kit.models.states import refused
from tests.kit.ranks.harness import run


@pytest.fixture(autouse=True)
def _no_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(slots, "_RULES", {})
    yield


class Factored(torch.optim.Optimizer):
    """Keeps a moment for each row of the local shard, the last sums of all ranks, and a buffer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                sharded = parameter.grad
                grad = sharded.to_local() if isinstance(sharded, DTensor) else sharded
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                state = self.state[parameter]
                if not state:
                    state |= {"rows": torch.zeros(grad.shape[0]), "sums": []}
                state.setdefault("buffer", torch.zeros(3))
                state["rows"].lerp_(grad if grad.dim() == 1 else grad.flatten(1).mean(1), 0.1)
                state["sums"].append(torch.tensor([float(len(state["sums"]))]))
                own.sub_(state["rows"].view(-1, *[1] * (grad.dim() - 1)), alpha=group["lr"])


class Special(Factored):
    pass


def register() -> None:
    shardckpt.register_slot(Factored, "rows", 0)
    shardckpt.register_slot(Factored, "sums", "replicated")
    shardckpt.register_slot(Factored, "buffer", "rebuilt")


FSDP = {"torch": fully_shard, "engine": core.fully_shard}


def begin(seed: int, fsdp: str, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 5))
    FSDP[fsdp](model, mesh=init_device_mesh("cpu", (world,)))
    return model, Special(model.parameters())


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(10 + step)
        model(torch.randn(4, 8)).square().sum().backward()
        optim.step()
        optim.zero_grad()


def list_slots(model: nn.Module, optim: torch.optim.Optimizer, slot: str) -> dict[str, Any]:
    found = {name: optim.state[each] for name, each in model.named_parameters() if each in optim.state}
    return {name: deepcopy(state.get(slot)) for name, state in found.items()}


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("fsdp", FSDP)
def test_slots_are_loaded_by_their_rules_on_any_number_of_ranks(fsdp: str, has_stepped: bool, tmp_path: Path) -> None:
    def save(rank: int, world: int) -> dict[str, Any]:
        register()
        model, optim = begin(0, fsdp, world)
        train(model, optim, 2)
        shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
        return list_slots(model, optim, "rows")

    def load(rank: int, world: int) -> dict[str, dict[str, Any]]:
        register()
        model, optim = begin(1, fsdp, world)
        if has_stepped:
            train(model, optim, 1)
        shardckpt.load({"model": model, "optim": optim}, tmp_path / "step")
        found = {slot: list_slots(model, optim, slot) for slot in ("rows", "sums", "buffer")}
        if has_stepped:
            train(model, optim, 1)
        return found

    def join(ranks: list[dict[str, Any]], name: str) -> torch.Tensor:
        return torch.cat([each[name] for each in ranks if name in each])

    saved = run(2, save)
    for world in (1, 2, 3):
        loaded = run(world, load)
        for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
            assert torch.equal(join([each["rows"] for each in loaded], name), join(saved, name)), (world, name)
            assert [value.item() for value in loaded[0]["sums"][name]] == [0.0, 1.0]
            assert loaded[0]["buffer"][name] is None
    state = shardckpt.load(tmp_path / "step")["optim"]["state"]["1.weight"]
    assert state.keys() == {"rows", "sums"}
    assert state["rows"].shape == (5,)


@pytest.mark.parametrize("fsdp", FSDP)
def test_a_rank_without_rows_has_an_empty_slot_or_none(fsdp: str, tmp_path: Path) -> None:
    def make(seed: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(8, 1, bias=False)
        FSDP[fsdp](model, mesh=init_device_mesh("cpu", (world,)))
        return model, Special(model.parameters())

    def body(rank: int, world: int) -> list[float]:
        register()
        model, optim = make(0, world)
        train(model, optim, 2)
        shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
        fresh, other = make(1, world)
        shardckpt.load({"model": fresh, "optim": other}, tmp_path / "step")
        train(fresh, other, 1)
        shardckpt.save({"model": fresh, "optim": other}, tmp_path / "again")
        return optim.state[next(model.parameters())]["rows"].tolist() if not rank else []

    rows = run(2, body)[0]
    saved = shardckpt.load(tmp_path / "step")["optim"]["state"]["weight"]["rows"]
    assert len(rows) == 1
    assert saved.tolist() == rows


def test_a_slot_without_a_rule_is_refused_and_the_message_names_the_way() -> None:
    def body(rank: int, world: int) -> str:
        model, optim = begin(0, "torch", world)
        train(model, optim, 1)
        return refused(shardckpt.save, {"model": model, "optim": optim}, "unused")

    for told in run(2, body):
        assert "optim.state.0.weight.rows" in told
        assert "register_slot" in told


def test_a_slot_that_does_not_fit_its_rule_is_refused_by_name(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        register()
        model, optim = begin(0, "torch", world)
        train(model, optim, 1)
        optim.state[next(model.parameters())]["rows"] = torch.zeros(3)
        return refused(shardckpt.save, {"model": model, "optim": optim}, tmp_path / "step")

    for told in run(2, body):
        assert "optim.state.0.weight.rows" in told
        assert "found [3]; expected [5]" in told
    assert not list(tmp_path.rglob("COMMIT"))


def test_a_saved_slot_of_another_length_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    register()
    model = nn.Linear(8, 10)
    optim = Special(model.parameters())
    train(model, optim, 1)
    optim.state[model.weight]["rows"] = torch.zeros(7)
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")

    def body(rank: int, world: int) -> str:
        register()
        torch.manual_seed(1)
        fresh = nn.Linear(8, 10)
        fully_shard(fresh, mesh=init_device_mesh("cpu", (world,)))
        before = fresh.weight.to_local().clone()  # type: ignore[attr-defined]
        state = {"model": fresh, "optim": Special(fresh.parameters())}
        told = refused(shardckpt.load, state, tmp_path / "step")
        assert torch.equal(fresh.weight.to_local(), before)  # type: ignore[attr-defined]
        return told

    for told in run(2, body):
        assert "weight/rows: size mismatch: found (7,), expected (10,)" in told


@pytest.mark.parametrize(
    ("optimizer", "slot", "rule", "text"),
    [
        (nn.Linear, "rows", 0, "must be a class of optimizers"),
        (Special(nn.Linear(1, 1).parameters()), "rows", 0, "must be a class of optimizers"),
        (Factored, 3, 0, "must be a key"),
        (Factored, "rows", -1, "must be a dimension, 'replicated', 'rebuilt' or a class"),
        (Factored, "rows", True, "must be a dimension"),
        (Factored, "rows", "anything", "must be a dimension"),
    ],
)
def test_an_invalid_rule_is_refused(optimizer: Any, slot: Any, rule: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        shardckpt.register_slot(optimizer, slot, rule)


class Projector:
    """Has a tensor and a number."""

    def __init__(self, rank: int) -> None:
        self.rank, self.matrix = rank, torch.arange(6.0).view(2, 3).t()


class Projecting(torch.optim.SGD):
    pass


def begin_projecting(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2, bias=False)
    optim = Projecting(model.parameters(), lr=0.1)
    optim.state[model.weight]["projector"] = Projector(rank)
    return model, optim


def test_an_object_with_a_registered_class_is_built_anew_from_its_attributes(tmp_path: Path) -> None:
    shardckpt.register_slot(Projecting, "projector", Projector)
    model, optim = begin_projecting(4)
    other, fresh = begin_projecting(5)
    before = fresh.state[other.weight]["projector"]
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
    shardckpt.load({"model": other, "optim": fresh}, tmp_path / "step")
    found = fresh.state[other.weight]["projector"]
    assert (type(found), found.rank, before.rank) == (Projector, 4, 5)
    assert torch.equal(found.matrix, before.matrix) and found.matrix.stride() == (1, 3)


@pytest.mark.parametrize("rule", [None, "replicated", Factored])
def test_an_object_without_its_class_as_the_rule_is_neither_saved_nor_loaded(rule: Any, tmp_path: Path) -> None:
    shardckpt.register_slot(Projecting, "projector", Projector)
    model, optim = begin_projecting(4)
    state = {"model": model, "optim": optim}
    shardckpt.save(state, tmp_path / "step")
    slots._RULES.clear()
    if rule is not None:
        shardckpt.register_slot(Projecting, "projector", rule)
    assert "optim.state.weight.projector" in refused(shardckpt.save, state, tmp_path / "again")
    told = refused(shardckpt.load, state, tmp_path / "step")
    assert "projector: it was saved as" in told
    assert "register_slot(Projecting, 'projector', class)" in told
    assert optim.state[model.weight]["projector"].rank == 4


@pytest.mark.parametrize("value", [None, 3, "text", [1, {"rank": 3}]])
def test_plain_values_in_a_slot_of_objects_stay_plain(value: Any, tmp_path: Path) -> None:
    shardckpt.register_slot(Projecting, "projector", Projector)
    model, optim = begin_projecting(4)
    other, fresh = begin_projecting(5)
    optim.state[model.weight]["projector"] = value
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
    shardckpt.load({"model": other, "optim": fresh}, tmp_path / "step")
    assert fresh.state[other.weight]["projector"] == value


def test_a_slot_that_is_rebuilt_is_not_loaded_from_a_step_with_objects(tmp_path: Path) -> None:
    shardckpt.register_slot(Projecting, "projector", Projector)
    model, optim = begin_projecting(4)
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
    shardckpt.register_slot(Projecting, "projector", "rebuilt")
    shardckpt.load({"model": model, "optim": optim}, tmp_path / "step")
    assert "projector" not in optim.state[model.weight]


class Slotted:
    __slots__ = ("rank",)


class Both(Slotted):
    """Has attributes and slots."""


class Counted(int):
    """Is a number with attributes."""


@pytest.mark.parametrize("kind", [Slotted, Both, Counted, ValueError])
def test_a_class_with_more_than_attributes_is_refused_as_a_rule(kind: type) -> None:
    with pytest.raises(UsageError, match="no `__slots__`, no `__new__` and no built-in base"):
        shardckpt.register_slot(Projecting, "projector", kind)


class Stateful(Projector):
    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}


def put_parameter(value: Projector) -> Any:
    value.matrix = nn.Parameter(value.matrix)
    return value


ODD = {
    "its own state": lambda value: Stateful(3),
    "a parameter": put_parameter,
    "a saved form": lambda value: {"__class__": "Projector", "attributes": {}, "dtensors": []},
}


@pytest.mark.parametrize("kind", ODD)
def test_what_would_come_back_as_another_value_is_refused(kind: str, tmp_path: Path) -> None:
    shardckpt.register_slot(Projecting, "projector", Projector)
    model, optim = begin_projecting(4)
    optim.state[model.weight]["projector"] = ODD[kind](Projector(3))
    told = refused(shardckpt.save, {"model": model, "optim": optim}, tmp_path / "step")
    assert "optim.state.weight.projector" in told


@pytest.mark.parametrize("attributes", [[1, 2], None, 5, "ab", {1: 2}, [("a", 1)]])
def test_damaged_attributes_are_refused(attributes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = {"__class__": slots._name_class(Projector), "attributes": attributes, "dtensors": []}
    shardckpt.register_slot(Projecting, "projector", Projector)
    model, optim = begin_projecting(4)
    with monkeypatch.context() as patch:
        patch.setattr("shardckpt.state.local.optim_shards.take_attributes", lambda *_: saved)
        shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
    assert "projector: it was saved as" in refused(shardckpt.load, {"model": model, "optim": optim}, tmp_path / "step")
    assert optim.state[model.weight]["projector"].rank == 4


def test_sharded_attributes_come_back_as_replicated_ones(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> tuple[bool, list[float]]:
        shardckpt.register_slot(Projecting, "projector", Projector)
        mesh = init_device_mesh("cpu", (world,))
        model = nn.Linear(3, 2, bias=False)
        fully_shard(model, mesh=mesh)
        optim = Projecting(model.parameters(), lr=0.1)
        made = optim.state[model.weight]["projector"] = Projector(4)
        made.matrix = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        if world == 2:
            shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
        made.matrix = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
        shardckpt.load({"model": model, "optim": optim}, tmp_path / "step")
        found = optim.state[model.weight]["projector"].matrix
        return found.placements == (Replicate(),), found.to_local().tolist()

    for world in (2, 1):
        assert run(world, body) == [(True, [0.0, 1.0, 2.0, 3.0])] * world


def test_a_flat_parameter_has_no_objects(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        shardckpt.register_slot(Projecting, "projector", Projector)
        model = core.FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
        optim = Projecting(model.parameters(), lr=0.1)
        optim.state[next(model.parameters())]["projector"] = Projector(4)
        return refused(shardckpt.save, {"model": model, "optim": optim}, tmp_path / "step")

    for told in run(2, body):
        assert "an object in a flat parameter's state cannot be saved" in told


@pytest.mark.parametrize("rule", [None, 0, "replicated"])
def test_a_slot_whose_elements_share_memory_gets_its_own(rule: Any, tmp_path: Path) -> None:
    if rule is not None:
        shardckpt.register_slot(Projecting, "projector", rule)
    model, optim = begin_projecting(4)
    for value in (torch.arange(6.0).view(2, 3), torch.arange(12.0).view(2, 6)):
        optim.state[model.weight]["projector"] = value
        shardckpt.save({"model": model, "optim": optim}, tmp_path / f"{value.numel()}")
        optim.state[model.weight]["projector"] = torch.zeros(1, 1).expand(value.shape)
        shardckpt.load({"model": model, "optim": optim}, tmp_path / f"{value.numel()}")
        assert torch.equal(optim.state[model.weight]["projector"], value)


@pytest.mark.parametrize("strides", [(2, 7), (10, 2), (1, 3)])
def test_a_slot_that_is_a_view_keeps_its_memory(strides: tuple[int, int], tmp_path: Path) -> None:
    model, optim = begin_projecting(4)
    memory = torch.arange(40.0)
    value = optim.state[model.weight]["projector"] = memory.as_strided((2, 3), strides)
    expected = memory.clone()
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
    value.zero_()
    shardckpt.load({"model": model, "optim": optim}, tmp_path / "step")
    assert torch.equal(memory, expected)
