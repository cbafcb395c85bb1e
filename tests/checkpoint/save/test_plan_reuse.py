"""A save reuses the plan of the one before only for a state that it fits: each saves what a new saver would."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardckpt
import shardckpt.checkpoint.save.save as saving
from shardckpt.checkpoint.save import planner, session
from shardckpt.checkpoint.save.planner import SaveOptions
from shardckpt.checkpoint.save.session import Saver
from shardckpt.errors import StorageError, UnsupportedError
from shardckpt.ranks.linked_group import ALONE

NUMBERS = itertools.count()


def save(saver: Saver, state: Any, folder: Path) -> dict[str, bytes]:
    """Save a state and return the contents of all files, which are the same for the same state."""
    target = folder / f"save{next(NUMBERS)}"
    with patch.object(planner, "new_save_id", lambda: "0" * 15):
        saver.save(state, SaveOptions(str(target), overwrite=False, checksums=True, custom_metadata={}))
    return {path.name: path.read_bytes() for path in target.iterdir()}


def assert_saves_as_new(saver: Saver, state: Any, folder: Path) -> None:
    assert save(saver, state, folder) == save(Saver(ALONE), state, folder)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.third = nn.Linear(3, 5)
        self.left = nn.Parameter(torch.rand(2))
        self.register_parameter("right", None)
        self.register_buffer("upper", torch.rand(2))
        self.register_buffer("lower", None)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optim = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    return optim


def build_state() -> dict[str, Any]:
    model = Model()
    optim = stepped(model)
    return {
        "model": model,
        "optim": optim,
        "schedule": torch.optim.lr_scheduler.StepLR(optim, 2),
        "dicts": {"model": model.state_dict(), "optim": optim.state_dict()},
        "ema": {f"w{i}": torch.rand(4, 3) for i in range(3)},
        "more": [torch.arange(6), {"deep": torch.rand(2)}, (torch.zeros(2, 2), 5)],
        "step": 3,
        "note": {"text": "a", "rate": 0.5, "set": {1, 2}, 7: None},
    }


def replace_tensor(state: dict[str, Any]) -> None:
    state["ema"]["w1"] = torch.rand(4, 3)


def change_shape(state: dict[str, Any]) -> None:
    state["ema"]["w1"] = torch.rand(3, 4)


def change_dtype(state: dict[str, Any]) -> None:
    state["ema"]["w1"] = torch.rand(4, 3).to(torch.float64)


def change_kind_of_elements(state: dict[str, Any]) -> None:
    state["ema"]["w1"] = torch.randint(9, (4, 3), dtype=torch.int32)


def transpose(state: dict[str, Any]) -> None:
    state["ema"]["w1"] = torch.rand(3, 4).t()


def write_in_place(state: dict[str, Any]) -> None:
    with torch.no_grad():
        state["model"].first.weight.add_(1)
        state["ema"]["w0"].mul_(2)
        state["optim"].state[state["model"].first.weight]["exp_avg"].add_(1)


def set_data(state: dict[str, Any]) -> None:
    state["model"].first.weight.data = torch.rand(5, 3)


def set_data_of_another_shape(state: dict[str, Any]) -> None:
    state["ema"]["w2"].data = torch.rand(7)


def resize_storage(state: dict[str, Any]) -> None:
    state["ema"]["w0"].resize_(2, 2)


def move_storage(state: dict[str, Any]) -> None:
    state["ema"]["w0"].untyped_storage().resize_(1 << 12)


def share(state: dict[str, Any]) -> None:
    state["ema"]["w0"] = state["ema"]["w2"]


def share_storage(state: dict[str, Any]) -> None:
    state["ema"]["w0"] = state["ema"]["w2"].view(4, 3)


def share_a_part(state: dict[str, Any]) -> None:
    both = torch.rand(8, 3)
    state["ema"]["w0"], state["ema"]["w2"] = both[:4], both[2:6]


def unshare(state: dict[str, Any]) -> None:
    state["ema"]["w0"] = state["ema"]["w0"].clone()


def tie_parameters(state: dict[str, Any]) -> None:
    state["model"].tied = state["model"].second


def replace_parameter(state: dict[str, Any]) -> None:
    state["model"].second.weight = nn.Parameter(torch.rand(2, 5))
    state["optim"] = stepped(state["model"])


def freeze(state: dict[str, Any]) -> None:
    state["model"].first.weight.requires_grad_(False)


def add_bias(state: dict[str, Any]) -> None:
    state["model"].second.bias = nn.Parameter(torch.rand(2))


def add_buffer(state: dict[str, Any]) -> None:
    state["model"].register_buffer("extra", torch.rand(3))


def hide_buffer(state: dict[str, Any]) -> None:
    state["model"].norm._non_persistent_buffers_set.add("running_mean")


def drop_slots(state: dict[str, Any]) -> None:
    state["optim"].state.clear()


def drop_one_slot(state: dict[str, Any]) -> None:
    state["optim"].state[state["model"].first.weight].pop("exp_avg", None)


def keep_a_number(state: dict[str, Any]) -> None:
    state["optim"].state[state["model"].first.weight]["count"] = 7


def change_slot(state: dict[str, Any]) -> None:
    state["optim"].state[state["model"].first.weight]["exp_avg"] = torch.rand(5, 3, dtype=torch.float64)


def change_rate(state: dict[str, Any]) -> None:
    state["optim"].param_groups[0]["lr"] *= 0.5


def split_groups(state: dict[str, Any]) -> None:
    params = state["optim"].param_groups[0]["params"]
    if len(params) > 1:
        state["optim"].add_param_group({"params": [params.pop()], "lr": 0.1})


def reverse_params(state: dict[str, Any]) -> None:
    state["optim"].param_groups[0]["params"].reverse()


def swap_params(state: dict[str, Any]) -> None:
    params, model = state["optim"].param_groups[0]["params"], state["model"]
    first, third = (next(at for at, p in enumerate(params) if p is w) for w in (model.first.weight, model.third.weight))
    params[first], params[third] = params[third], params[first]


def swap_parameter_with_none(state: dict[str, Any]) -> None:
    state["model"].left, state["model"].right = state["model"].right, state["model"].left


def swap_buffer_with_none(state: dict[str, Any]) -> None:
    state["model"].upper, state["model"].lower = state["model"].lower, state["model"].upper


def rename_slot(state: dict[str, Any]) -> None:
    slots = state["optim"].state[state["model"].first.weight]
    kept = dict(slots)
    slots.clear()
    slots.update({"renamed" if slot == "exp_avg" else slot: value for slot, value in kept.items()})


def swap_states(state: dict[str, Any]) -> None:
    kept, model = state["optim"].state, state["model"]
    first, third = model.first.weight, model.third.weight
    kept[first], kept[third] = kept[third], kept[first]


def count_step(state: dict[str, Any]) -> None:
    state["step"] += 1


def change_values(state: dict[str, Any]) -> None:
    state["note"]["text"] += "b"
    state["note"]["set"].add(9)
    state["note"]["rate"] = -0.0


def change_type_of_value(state: dict[str, Any]) -> None:
    state["step"] = float(state["step"])


def make_value_equal_of_another_type(state: dict[str, Any]) -> None:
    state["note"][7] = 1 if state["note"][7] is True else True


def rename(state: dict[str, Any]) -> None:
    state["ema"]["other"] = state["ema"].pop("w1", torch.rand(2))


def reorder(state: dict[str, Any]) -> None:
    state["ema"] = dict(reversed(state["ema"].items()))


def reorder_values(state: dict[str, Any]) -> None:
    state["note"] = dict(reversed(state["note"].items()))


def append(state: dict[str, Any]) -> None:
    state["more"].append(torch.rand(2))


def make_tuple(state: dict[str, Any]) -> None:
    state["more"] = tuple(state["more"]) if type(state["more"]) is list else list(state["more"])


def swap(state: dict[str, Any]) -> None:
    state["ema"], state["more"] = state["more"], state["ema"]


def value_for_tensor(state: dict[str, Any]) -> None:
    state["ema"] = {"w0": torch.rand(2), "w1": 5, "w2": [torch.rand(1)]}


def tensor_for_value(state: dict[str, Any]) -> None:
    state["step"] = torch.tensor(4)


def numpy_for_tensor(state: dict[str, Any]) -> None:
    state["ema"] = {"w0": torch.rand(4, 3).numpy(), "w1": torch.rand(4, 3), "w2": torch.rand(4, 3)}


def module_for_dict(state: dict[str, Any]) -> None:
    state["ema"] = nn.Linear(2, 2)


def step_schedule(state: dict[str, Any]) -> None:
    state["schedule"].step()


def take_dicts_again(state: dict[str, Any]) -> None:
    write_in_place(state)
    state["dicts"] = {"model": state["model"].state_dict(), "optim": state["optim"].state_dict()}


def lend_storage(state: dict[str, Any]) -> None:
    state["ema"]["w0"].set_(state["ema"]["w2"])


def share_with_parameter(state: dict[str, Any]) -> None:
    state["ema"]["w0"] = state["model"].first.weight.detach()


def wrap(state: dict[str, Any]) -> None:
    state["ema"] = shardckpt.PerRank(state["ema"])


def share_module(state: dict[str, Any]) -> None:
    state["again"] = state["model"]


def keep_a_text(state: dict[str, Any]) -> None:
    state["optim"].state[state["model"].left]["kind"] = "text"


def give_extra_state(state: dict[str, Any]) -> None:
    class WithExtra(Model):
        def get_extra_state(self) -> Any:
            return {"seen": 5}

    state["model"].__class__ = WithExtra


def drop_optimizer(state: dict[str, Any]) -> None:
    state.pop("optim", None)


def add_conjugate(state: dict[str, Any]) -> None:
    value = torch.rand(3, dtype=torch.complex64)
    state["ema"] = {"w0": value, "w1": value.conj(), "w2": value.conj().imag}


def remove_conjugate(state: dict[str, Any]) -> None:
    state["ema"]["w1"] = state["ema"]["w0"].clone().conj()


def cast_model(state: dict[str, Any]) -> None:
    state["model"].double()


def empty(state: dict[str, Any]) -> None:
    state["ema"] = {"w0": torch.rand(0, 3), "w1": torch.rand(0, 3), "w2": torch.rand(4, 3)}


CHANGES: list[Callable[[dict[str, Any]], None]] = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}).keys() == {"state", "return"}
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_shared", [False, True], ids=["apart", "shared"])
def test_a_changed_state_is_saved_as_by_a_new_saver(
    change: Callable[[dict[str, Any]], None], is_shared: bool, tmp_path: Path
) -> None:
    saver, state = Saver(ALONE), build_state()
    if not is_shared:
        del state["dicts"]
    save(saver, state, tmp_path)
    assert_saves_as_new(saver, state, tmp_path)
    change(state)
    assert_saves_as_new(saver, state, tmp_path)
    assert_saves_as_new(saver, state, tmp_path)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(CHANGES), min_size=2, max_size=6))
def test_states_changed_again_and_again_are_saved_as_by_a_new_saver(
    tmp_path_factory: pytest.TempPathFactory, changes: list[Callable[[dict[str, Any]], None]]
) -> None:
    folder = tmp_path_factory.mktemp("saves")
    saver, state = Saver(ALONE), build_state()
    for change in changes:
        try:
            change(state)
        except (KeyError, AttributeError, TypeError, RuntimeError, ValueError):
            continue  # it does not apply to what another one left
        assert_saves_as_new(saver, state, folder)
    state["step"] = 100
    assert_saves_as_new(saver, state, folder)


def test_the_plan_of_a_save_that_failed_is_not_reused(tmp_path: Path) -> None:
    saver, state = Saver(ALONE), build_state()
    save(saver, state, tmp_path)
    change_shape(state)
    with patch.object(session, "write_payloads", side_effect=StorageError("full")), pytest.raises(StorageError):
        save(saver, state, tmp_path)
    assert_saves_as_new(saver, state, tmp_path)


def test_a_second_save_of_one_state_plans_nothing(tmp_path: Path) -> None:
    saver, state = Saver(ALONE), build_state()
    save(saver, state, tmp_path)
    with (
        patch.object(planner, "create_single_rank_plan", side_effect=AssertionError("planned again")),
        patch("shardckpt.checkpoint.planning.save_plan.arrange_files", side_effect=AssertionError("arranged again")),
    ):
        state["step"] += 1
        write_in_place(state)
        save(saver, state, tmp_path)


FITTING = [write_in_place, replace_tensor, move_storage, count_step, change_values, change_rate]


@pytest.mark.parametrize("change", [*FITTING, step_schedule, take_dicts_again], ids=lambda change: change.__name__)
def test_a_state_of_the_same_layout_is_not_flattened_again(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    saver, state = Saver(ALONE), build_state()
    save(saver, state, tmp_path)
    change(state)
    with patch.object(planner, "flatten_state", side_effect=AssertionError("flattened again")):
        save(saver, state, tmp_path)


def test_states_that_are_saved_in_turn_are_not_flattened_again(tmp_path: Path) -> None:
    saver, states = Saver(ALONE), [build_state(), {"tensor": torch.rand(3)}, {"tensor": torch.rand(4), "step": 1}]
    for state in states:
        save(saver, state, tmp_path)
    expected = [save(Saver(ALONE), state, tmp_path) for state in states]
    with patch.object(planner, "flatten_state", side_effect=AssertionError("flattened again")):
        assert [save(saver, state, tmp_path) for state in states] == expected
    for count in range(5, 12):
        save(saver, {"tensor": torch.rand(count)}, tmp_path)
    assert len(saver.cached_saves) == 4


def test_a_save_in_the_background_does_not_flatten_the_same_layout_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving.SAVERS, "_alone", Saver(ALONE))
    state = build_state()
    shardckpt.async_save(state, str(tmp_path / "first")).result()
    write_in_place(state)
    count_step(state)
    expected = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with patch.object(planner, "flatten_state", side_effect=AssertionError("flattened again")):
        handle = shardckpt.async_save(state, str(tmp_path / "second"))
    write_in_place(state)
    count_step(state)
    handle.result()
    saved = shardckpt.open(str(tmp_path / "second"))
    assert all(torch.equal(saved["model"][name][...], value) for name, value in expected.items())
    assert saved["step"] == 4


def test_the_state_of_an_object_is_asked_for_once_a_save(tmp_path: Path) -> None:
    class Counter:
        calls = 0

        def state_dict(self) -> dict[str, Any]:
            self.calls += 1
            return {"calls": self.calls, "tensor": torch.rand(2)}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    saver, counter = Saver(ALONE), Counter()
    for count in (1, 2, 3):
        save(saver, {"counter": counter, "numpy": torch.rand(2).numpy()}, tmp_path)
        assert counter.calls == count
    for count in (4, 5):
        save(saver, {"counter": counter}, tmp_path)
        assert counter.calls == count


def test_tensors_are_not_kept_between_saves(tmp_path: Path) -> None:
    saver = Saver(ALONE)
    tensors = {f"t{i}": torch.rand(300) for i in range(4)}
    kept = [weakref.ref(tensor) for tensor in tensors.values()]
    for _ in range(2):
        save(saver, {"tensors": tensors}, tmp_path)
    assert saver.cached_saves
    del tensors
    assert [each() for each in kept] == [None] * 4


def test_a_value_that_cannot_be_saved_is_refused_by_a_later_save_too(tmp_path: Path) -> None:
    saver, state = Saver(ALONE), build_state()
    save(saver, state, tmp_path)
    state["note"]["text"] = object()
    with pytest.raises(UnsupportedError, match=r"note\.text"):
        save(saver, state, tmp_path)


def test_a_tensor_and_its_conjugate_are_saved_as_two(tmp_path: Path) -> None:
    value = torch.rand(3, dtype=torch.complex64)
    state = {"a": value, "b": value.conj(), "c": value.imag, "d": value.conj().imag}
    shardckpt.save(state, str(tmp_path / "step"))
    saved = shardckpt.open(str(tmp_path / "step"))
    assert all(torch.equal(saved[name][...], state[name]) for name in state)


@pytest.mark.parametrize("nbytes", [0, 20])
@pytest.mark.parametrize("count", [0, 1])
def test_a_tensor_whose_memory_was_freed_is_refused(count: int, nbytes: int, tmp_path: Path) -> None:
    saver, tensor = Saver(ALONE), torch.rand(8)
    for _ in range(count):
        save(saver, {"a": [tensor]}, tmp_path)
    tensor.untyped_storage().resize_(nbytes)
    with pytest.raises(UnsupportedError, match=r"a\.0.*freed|freed.*a\.0"):
        save(saver, {"a": [tensor]}, tmp_path)


@pytest.mark.parametrize("tensor", [torch.rand(8), torch.rand(6, 8)[4:], torch.rand(8, 4).t()])
def test_a_tensor_whose_storage_became_smaller_is_refused_by_a_later_save(tensor: torch.Tensor, tmp_path: Path) -> None:
    saver = Saver(ALONE)
    save(saver, {"a": tensor}, tmp_path)
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() - 4)
    with pytest.raises(UnsupportedError, match=r"a.*made smaller|made smaller.*a"):
        save(saver, {"a": tensor}, tmp_path)


def test_a_dict_with_a_state_of_its_own_is_saved_by_that_state(tmp_path: Path) -> None:
    class Counter(dict[str, int]):
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    saver, counter = Saver(ALONE), Counter(other=1)
    for _ in range(3):
        counter.count += 1
        assert_saves_as_new(saver, counter, tmp_path)
    del counter["other"]
    for _ in range(3):
        counter.count += 1
        assert_saves_as_new(saver, counter, tmp_path)


def test_a_mapping_is_read_once_a_save(tmp_path: Path) -> None:
    class Counts(Mapping[str, Any]):
        reads = 0

        def __getitem__(self, key: str) -> Any:
            self.reads += 1
            return torch.full((2,), float(self.reads))

        def __iter__(self) -> Iterator[str]:
            return iter(["count"])

        def __len__(self) -> int:
            return 1

    saver, counts = Saver(ALONE), Counts()
    for reads in (1, 2, 3):
        save(saver, counts, tmp_path)
        assert counts.reads == reads


def test_an_optimizer_without_its_model_is_saved_by_its_state_dict(tmp_path: Path) -> None:
    first, second = (nn.Parameter(torch.rand(3)) for _ in range(2))
    optim = torch.optim.SGD([first, second], momentum=0.9)
    for parameter in (first, second):
        optim.state[parameter]["momentum_buffer"] = torch.rand(3)
    saver, state = Saver(ALONE), {"first": first, "second": second, "optim": optim}
    assert_saves_as_new(saver, state, tmp_path)
    optim.state["calls"] = 1  # type: ignore[index]
    for calls in (1, 2):
        optim.state["calls"] = calls  # type: ignore[index]
        assert_saves_as_new(saver, state, tmp_path)
    optim.state[first] = optim.state.pop(first)
    assert_saves_as_new(saver, state, tmp_path)
    optim.register_state_dict_post_hook(lambda _, saved: saved | {"hook": 1})
    assert_saves_as_new(saver, state, tmp_path)


def test_an_optimizer_of_two_models_is_saved_by_its_state_dict(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optim = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], momentum=0.9)
    saver, state = Saver(ALONE), {"models": models, "optim": optim}
    for calls in (1, 2):
        optim.state["calls"] = calls  # type: ignore[index]
        assert_saves_as_new(saver, state, tmp_path)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("count", [0, 1])
def test_a_module_that_only_an_object_returns_is_refused(count: int, tmp_path: Path) -> None:
    saver, model = Saver(ALONE), nn.Linear(2, 2)
    for _ in range(count):
        save(saver, {"holder": {"model": model}}, tmp_path)
    with pytest.raises(UnsupportedError, match=r"holder\.model.*Linear"):
        save(saver, {"holder": Holder({"model": model})}, tmp_path)


def test_a_module_that_is_also_in_the_state_may_be_returned_by_an_object(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saver, state = Saver(ALONE), {"holder": Holder({"model": model}), "model": model}
    for _ in range(2):
        assert_saves_as_new(saver, state, tmp_path)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_one_element_of_another_stride_is_copied_in_the_background(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.rand(1, dtype=dtype).conj().imag
    assert value.is_neg() and value.stride() == (2,)
    shardckpt.async_save({"value": value}, str(tmp_path / "step")).result()
    assert torch.equal(shardckpt.open(str(tmp_path / "step"))["value"][...], value)
