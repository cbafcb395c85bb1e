"""Objects that hold sharded models: their tensors are filled in place, then they take them; or nothing changes."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

import shardckpt
from shardckpt import core
from shardckpt.errors import UsageError
from shardckpt.state import model_state_dict, optim_state_dict
from tests.kit.models.states import FRONT_ENDS, Net, differing, flat, quiet, step, whole, wrapper
from tests.kit.models.torch_limits import SAVES_EMPTY_SHARDS
from tests.kit.ranks.harness import run

SHARDED = {name: FRONT_ENDS[name] for name in ("flat", "orig", "in place", "torch in place", "ddp")}
SHARDED["torch's wrapper"] = wrapper(theirs, use_orig_params=True)


class AppState(Stateful):
    """As in torch's tutorial of its distributed checkpoint."""

    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class ModelWrapper(Stateful):
    """As in torchtitan."""

    def __init__(self, *parts: nn.Module) -> None:
        self.model = parts
        self.cache_state_dict = self._get_state_dict()

    def _get_state_dict(self):
        return {k: v for sd in map(get_model_state_dict, self.model) for k, v in sd.items()}

    def state_dict(self):
        return self.cache_state_dict

    def load_state_dict(self, state_dict):
        func = functools.partial(
            set_model_state_dict, model_state_dict=state_dict, options=StateDictOptions(strict=False)
        )
        list(map(func, self.model))
        self.cache_state_dict = self._get_state_dict()


class OptimizersContainer(torch.optim.Optimizer, Stateful):
    """As in torchtitan: an optimizer by its class, which has no state of its own."""

    def __init__(self, *parts: nn.Module, lr: float) -> None:
        self.model_parts = parts
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for model in parts]
        torch.optim.Optimizer.__init__(self, [p for model in parts for p in model.parameters()], {"lr": lr})

    def step(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self):
        func = functools.partial(get_optimizer_state_dict, options=StateDictOptions(flatten_optimizer_state_dict=True))
        found = map(func, self.model_parts, self.optimizers)
        return {k: v for sd in found for k, v in sd.items()}

    def load_state_dict(self, state_dict):
        func = functools.partial(
            set_optimizer_state_dict,
            optim_state_dict=state_dict,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        list(map(func, self.model_parts, self.optimizers))


def made(face: str, seed: int, steps: int = 0):
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model = quiet(SHARDED[face], Net((1,)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01 if steps else 9.0)
    for number in range(steps):
        step(model, optim, number)
    return model, optim


def looked_at(model: nn.Module, optim) -> tuple[dict, dict]:
    weights = {name: whole(value) for name, value in model_state_dict(model, "FULL").items()}
    state = optim_state_dict(model, optim, "FULL")
    groups = [dict(sorted(group.items())) for group in state["param_groups"]]
    return weights, flat({**state, "param_groups": groups})


def compared(found, expected) -> list[str]:
    return [*differing(found[0], expected[0]), *differing(found[1], expected[1])]


@pytest.mark.parametrize("form", ["native", "dcp"])
def test_the_tutorials_object_is_resumed_on_other_numbers_of_ranks(tmp_path: Path, form: str) -> None:
    faces = ("orig", "torch in place") if form == "dcp" else [*SHARDED][: None if SAVES_EMPTY_SHARDS else -1]

    def save_it(rank: int, world: int):
        found = {}
        for face in faces:
            model, optim = made(face, 0, steps=2)
            state = {"app": AppState(model, optim), "epoch": 3}
            if form == "native":
                shardckpt.save(state, tmp_path / face)
            else:
                dcp.save(state, checkpoint_id=tmp_path / face)
            found[face] = looked_at(model, optim)
        return found

    def load_it(rank: int, world: int) -> dict:
        wrong = {}
        for face in faces:
            model, optim = made(face, 8)
            state = {"epoch": 0, "app": AppState(model, optim)}
            shardckpt.load(state, tmp_path / face)
            step_now = [*compared(looked_at(model, optim), expected[face]), *([] if state["epoch"] == 3 else ["epoch"])]
            step(model, optim)  # what it took lies as the parameters do
            if step_now:
                wrong[face] = step_now
        return wrong

    expected = run(2, save_it, timeout=120)[0]
    for world in (2, 1, 3) if form == "native" else (3,):
        assert run(world, load_it, timeout=120) == [{}] * world


def test_the_objects_of_torchtitan_are_resumed(tmp_path: Path) -> None:
    def save_it(rank: int, world: int):
        found = {}
        for face in ("torch in place", "in place"):
            model, _ = made(face, 0)
            optims = OptimizersContainer(model, lr=0.01)
            step(model, optims)
            shardckpt.save({"model": ModelWrapper(model), "optimizer": optims}, tmp_path / face)
            found[face] = looked_at(model, optims.optimizers[0])
        return found

    def load_it(rank: int, world: int) -> dict:
        wrong = {}
        for face in ("torch in place", "in place"):
            model, _ = made(face, 8)
            optims = OptimizersContainer(model, lr=9.0)
            shardckpt.load({"model": ModelWrapper(model), "optimizer": optims}, tmp_path / face)
            step_now = compared(looked_at(model, optims.optimizers[0]), expected[face])
            step(model, optims)
            if step_now:
                wrong[face] = step_now
        return wrong

    expected = run(2, save_it, timeout=120)[0]
    assert run(3, load_it, timeout=120) == [{}] * 3


class Lazy(Stateful):
    """It gives the optimizer's own state, which an optimizer that never stepped does not have."""

    def __init__(self, model: nn.Module, optim) -> None:
        self.model, self.optim, self.calls = model, optim, 0

    def state_dict(self):
        return {"model": self.model.state_dict(), "optim": self.optim.state_dict()}

    def load_state_dict(self, state) -> None:
        self.calls += 1
        self.model.load_state_dict(state["model"])
        self.optim.load_state_dict(state["optim"])


def test_what_nobody_knows_how_to_cut_is_told_before_anything_changes(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        model, optim = made("torch in place", 0, steps=2)
        shardckpt.save({"app": Lazy(model, optim), "head": torch.ones(3)}, tmp_path / "c")
        other, fresh = made("torch in place", 8)
        app, head = Lazy(other, fresh), torch.zeros(3)
        before = {name: whole(value) for name, value in other.state_dict().items()}
        with pytest.raises(shardckpt.errors.MismatchError, match=r"no tensor for app\.optim\.state\.0\.exp_avg: "):
            shardckpt.load({"head": head, "app": app}, tmp_path / "c")
        wrong = differing({name: whole(value) for name, value in other.state_dict().items()}, before)
        step(other, fresh)
        shardckpt.load({"head": head, "app": app}, tmp_path / "c")
        return [*wrong, *compared(looked_at(other, fresh), looked_at(model, optim)), *(["called"] * (app.calls != 1))]

    assert run(2, body) == [[], []]


def test_a_sharded_tensor_that_the_checkpoint_lacks_is_named_before_a_change(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, state) -> None:
            self.state, self.calls = state, 0

        def state_dict(self):
            return self.state

        def load_state_dict(self, state) -> None:
            self.calls += 1

    def body(rank: int, world: int) -> bool:
        model, _ = made("torch in place", 0)
        weights = dict(model.state_dict())
        name = next(iter(weights))
        shardckpt.save({"app": Holder({name: weights[name]})}, tmp_path / "c")
        holder = Holder(weights)
        with pytest.raises(shardckpt.errors.MismatchError, match=r"missing: app\."):
            shardckpt.load({"app": holder}, tmp_path / "c")
        shardckpt.load({"app": holder}, tmp_path / "c", strict=False)
        return holder.calls == 1

    assert run(2, body) == [True, True]


def test_a_local_state_is_refused_but_inside_per_rank(tmp_path: Path) -> None:
    class Local:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def state_dict(self):
            return model_state_dict(self.model, "LOCAL")

        def load_state_dict(self, state) -> None:
            self.loaded = state

    def body(rank: int, world: int) -> bool:
        for face in ("flat", "orig", "in place"):
            local = Local(made(face, 0)[0])
            with pytest.raises(shardckpt.errors.UsageError, match="app: a LOCAL state"):
                shardckpt.save({"app": local}, tmp_path / "refused", checksums=False)
            shardckpt.save({"app": shardckpt.PerRank(local)}, tmp_path / face)
            shardckpt.load({"app": shardckpt.PerRank(local)}, tmp_path / face)
            if differing(dict(local.loaded), dict(local.state_dict())):
                return False
        torchs = made("torch's wrapper", 0)[0]
        with (
            quiet(theirs.FullyShardedDataParallel.state_dict_type, torchs, theirs.StateDictType.LOCAL_STATE_DICT),
            pytest.raises(shardckpt.errors.UsageError, match=r"m\..*flat parameter"),
        ):
            shardckpt.save({"m": torchs.state_dict()}, tmp_path / "refused", checksums=False)
        return not (tmp_path / "refused").exists()

    assert run(2, body) == [True, True]


class Kept:
    """A plain object that takes what it is handed, or copies it."""

    def __init__(self, values: torch.Tensor, copies: bool) -> None:
        self.values, self.copies, self.note = values, copies, "new"

    def state_dict(self):
        return {"values": self.values, "list": [self.values + 1, 3], "note": self.note}

    def load_state_dict(self, state) -> None:
        if self.copies:
            self.values.copy_(state["values"])
        else:
            self.values = state["values"]
        self.more, self.note = state["list"], state["note"]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("room", [torch.zeros(4), torch.zeros(2), torch.zeros(1).expand(4), torch.zeros(4).long()])
def test_a_plain_object_takes_what_it_saved(tmp_path: Path, copies: bool, room: torch.Tensor) -> None:
    saved = Kept(torch.arange(4.0), copies)
    saved.note = "old"
    shardckpt.save({"kept": saved}, tmp_path / "c")
    fits = room.is_contiguous() and room.shape == (4,) and room.is_floating_point()
    other = Kept(room.clone() if fits else room, copies and fits)
    shardckpt.load({"kept": other}, tmp_path / "c")
    assert torch.equal(other.values, torch.arange(4.0)) and other.note == "old"
    assert torch.equal(other.more[0], torch.arange(4.0) + 1) and other.more[1] == 3
    assert type(other.more) is list


def test_an_object_that_refuses_says_which_others_got_nothing(tmp_path: Path) -> None:
    class Refuses(Kept):
        def load_state_dict(self, state) -> None:
            raise shardckpt.errors.UsageError("it cannot be now")

    shardckpt.save({"a": Kept(torch.ones(2), True), "b": Kept(torch.ones(2), True)}, tmp_path / "c")
    last = Kept(torch.zeros(2), False)
    with pytest.raises(shardckpt.errors.UsageError, match=r"a could not load its state, and b was not reached\."):
        shardckpt.load({"a": Refuses(torch.zeros(2), True), "b": last}, tmp_path / "c")
    assert last.note == "new"


def test_a_container_of_optimizers_is_not_saved_without_their_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net((1,))
    optims = OptimizersContainer(net, lr=0.01)
    step(net, optims)
    shardckpt.save({"model": net, "optim": optims}, tmp_path / "c")
    assert any("exp_avg" in name for name in shardckpt.open(tmp_path / "c"))
    assert not any(isinstance(value, DTensor) for value in net.state_dict().values())


def test_new_optimizer_state_of_two_dtypes_is_what_its_placement_says(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> dict[str, set[torch.dtype]]:
        def build() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = core.fully_shard(nn.Linear(4, 4, bias=False).bfloat16())
            return model, torch.optim.SGD(model.parameters(), lr=0.1)

        model, optim = build()
        (parameter,) = model.parameters()
        kept = {"average": parameter.detach().clone(), "master": parameter.detach().float()}
        optim.state[parameter] = kept
        shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
        model, optim = build()
        shardckpt.load({"model": model, "optim": optim}, tmp_path / "step")
        (found,) = optim.state.values()
        assert torch.equal(found["master"].to_local(), kept["master"].to_local())
        return {name: {value.dtype, value._spec.tensor_meta.dtype} for name, value in found.items()}

    assert run(1, body) == [{"average": {torch.bfloat16}, "master": {torch.float32}}]


class Best:
    """Best weights so far; those of the model until there are better ones, as in loops that stop early."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = model.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def _trained_after_its_best(path: Path) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    best = Best(model)
    best.weights = {name: tensor.clone() for name, tensor in best.weights.items()}
    nn.init.ones_(model.weight)
    state = {"model": model, "best": best}
    shardckpt.save(state, path)
    return state


@pytest.mark.parametrize("order", [("model", "best"), ("best", "model")])
def test_an_object_that_still_has_the_memory_of_a_model_gets_tensors_of_its_own(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    saved = _trained_after_its_best(tmp_path / "step")
    model = nn.Linear(2, 2)
    parts = {"model": model, "best": Best(model)}

    shardckpt.load({name: parts[name] for name in order}, tmp_path / "step")

    assert torch.equal(model.weight, saved["model"].weight)
    assert torch.equal(parts["best"].weights["weight"], saved["best"].weights["weight"])


def test_an_object_that_still_has_the_shards_of_a_model_gets_shards_of_its_own(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model, _ = made("torch in place", 0)
        return {"model": model, "best": Best(model)}

    def compare(rank: int, world: int) -> list[bool]:
        saved = make()
        saved["best"].weights = {name: tensor.clone() for name, tensor in saved["best"].weights.items()}
        with torch.no_grad():
            for parameter in saved["model"].parameters():
                parameter += 1
        shardckpt.save(saved, tmp_path / "step")
        loaded = make()
        shardckpt.load(loaded, tmp_path / "step")
        models = [part["model"].state_dict() for part in (saved, loaded)]
        bests = [part["best"].weights for part in (saved, loaded)]
        return [
            torch.equal(whole(one), whole(other))
            for pair in (models, bests)
            for one, other in zip(pair[0].values(), pair[1].values(), strict=True)
        ]

    assert all(all(equal) for equal in run(2, compare))


def test_an_object_whose_tensor_overlaps_a_part_of_another_gets_one_of_its_own(tmp_path: Path) -> None:
    class Window(Best):
        def __init__(self, tensor: torch.Tensor) -> None:
            self.weights = {"rows": tensor}

    shardckpt.save({"all": torch.arange(6.0), "part": Window(torch.full((2,), -1.0))}, tmp_path / "step")
    whole = torch.zeros(6)
    part = Window(whole[2:4])

    shardckpt.load({"all": whole, "part": part}, tmp_path / "step")

    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert part.weights["rows"].tolist() == [-1, -1]


def test_an_object_that_was_saved_sharing_memory_with_a_model_shares_it_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    shardckpt.save({"model": model, "best": Best(model)}, tmp_path / "step")
    loaded = nn.Linear(2, 2)
    best = Best(loaded)

    shardckpt.load({"model": loaded, "best": best}, tmp_path / "step")

    assert torch.equal(loaded.weight, model.weight)
    assert best.weights["weight"].data_ptr() == loaded.weight.data_ptr()


def test_tensors_of_a_state_that_share_memory_must_have_equal_saved_values(tmp_path: Path) -> None:
    shardckpt.save({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "step")
    shared = torch.full((3,), 7.0)

    with pytest.raises(UsageError, match="b is the memory of a in this state, but their saved values"):
        shardckpt.load({"a": shared, "b": shared}, tmp_path / "step")

    assert shared.tolist() == [7, 7, 7]


def test_tensors_of_a_state_that_share_memory_are_loaded_from_equal_saved_values(tmp_path: Path) -> None:
    shardckpt.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "step")
    shared = torch.zeros(3)

    shardckpt.load({"a": shared, "b": shared}, tmp_path / "step")

    assert shared.tolist() == [1, 1, 1]
