"""Ranks reuse the plan of an earlier save only if the states of all fit it: each save is that of new savers."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import shardckpt
from shardckpt.checkpoint.save import planner
from shardckpt.checkpoint.save.planner import SaveOptions
from shardckpt.checkpoint.save.session import Saver
from shardckpt.checkpoint.stateful.state_trace import trace_state
from shardckpt.ranks.process_group import get_ranks
from tests.kit.models.states import FRONT_ENDS, Net, step
from tests.kit.ranks.harness import raised_everywhere, run

State = dict[str, Any]
NUMBERS = itertools.count()
TRACED = ["plain", "in place", "torch in place"]


def save(saver: Saver, state: State, folder: Path, number: int | None = None) -> dict[str, bytes]:
    """Save a state and return the contents of all files, which are the same for the same state and number."""
    number = next(NUMBERS) if number is None else number
    target = folder / f"{len(list(folder.iterdir()))}"
    dist.barrier()  # all ranks have counted
    with patch.object(planner, "new_save_id", lambda: f"{number:015}"):
        saver.save(state, SaveOptions(str(target), overwrite=False, checksums=True, custom_metadata={}))
    return {path.name: path.read_bytes() for path in target.iterdir()}


def assert_saves_as_new(saver: Saver, state: State, folder: Path) -> None:
    number = next(NUMBERS)
    assert save(saver, state, folder, number) == save(Saver(get_ranks(None)), state, folder, number)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the states that this rank flattens."""
    count = [0]

    def flatten(*args: Any) -> Any:
        count[0] += 1
        return original(*args)

    original = planner.flatten_state
    with patch.object(planner, "flatten_state", flatten):
        yield count


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def build_state(style: str) -> State:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = FRONT_ENDS[style](Net((1,)))  # rank 1 has no row of one parameter
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    mesh = init_device_mesh("cpu", (2,))
    placements = {"w0": Shard(0), "w1": Shard(1), "w2": Replicate(), "w3": Shard(0)}
    return {
        "model": model,
        "optim": optim,
        "schedule": torch.optim.lr_scheduler.StepLR(optim, 2),
        "sharded": {name: distribute_tensor(numbers(6, 4), mesh, [way]) for name, way in placements.items()},
        "full": [numbers(6), {"deep": numbers(2, 3)}],
        "step": 3,
        "note": {"text": "a", "set": {1, 2}},
    }


def place(state: State, name: str, value: torch.Tensor, placement: Any, mesh: DeviceMesh | None = None) -> None:
    state["sharded"][name] = distribute_tensor(value, mesh or state["sharded"]["w1"].device_mesh, [placement])


def train(state: State) -> None:
    step(state["model"], state["optim"], seed=1)
    state["schedule"].step()


def replace_sharded(state: State) -> None:
    place(state, "w0", numbers(6, 4, start=9), Shard(0))


def write_in_place(state: State) -> None:
    state["sharded"]["w0"].to_local().add_(1)
    state["full"][0].add_(1)


def count_step(state: State) -> None:
    state["step"] += 1
    state["note"]["set"].add(9)
    state["optim"].param_groups[0]["lr"] *= 0.5


def load_optimizer(state: State) -> None:
    state["optim"].load_state_dict(state["optim"].state_dict())


def make_mesh_again(state: State) -> None:
    place(state, "w0", numbers(6, 4, start=5), Shard(0), init_device_mesh("cpu", (2,)))


def shard_another_dim(state: State) -> None:
    place(state, "w0", numbers(6, 4), Shard(1))


def replicate(state: State) -> None:
    place(state, "w0", numbers(6, 4), Replicate())


def reverse_ranks(state: State) -> None:
    place(state, "w0", numbers(6, 4), Shard(0), DeviceMesh("cpu", [1, 0]))


def change_shape(state: State) -> None:
    place(state, "w0", numbers(7, 4), Shard(0))


def change_shape_of_rank_1(state: State) -> None:
    place(state, "w0", numbers(5, 4), Shard(0))


def leave_one_row(state: State) -> None:
    place(state, "w0", numbers(1, 4), Shard(0))


def change_dtype(state: State) -> None:
    place(state, "w0", numbers(6, 4).to(torch.float64), Shard(0))


def make_plain(state: State) -> None:
    state["sharded"]["w2"] = numbers(6, 4)


def tie(state: State) -> None:
    state["sharded"]["w3"] = state["sharded"]["w0"]


def share_local_tensor(state: State) -> None:
    first = state["sharded"]["w0"]
    state["sharded"]["w3"] = DTensor.from_local(first.to_local(), first.device_mesh, first.placements, run_check=False)


def share_parameter(state: State) -> None:
    state["sharded"]["w3"] = next(iter(state["model"].parameters()))


def swap(state: State) -> None:
    sharded = state["sharded"]
    sharded["w0"], sharded["w1"] = sharded["w1"], sharded["w0"]


def rename(state: State) -> None:
    state["sharded"]["other"] = state["sharded"].pop("w0")


def append(state: State) -> None:
    state["full"].append(numbers(3))


def share_a_part(state: State) -> None:
    both = numbers(8)
    state["full"][0], state["full"][1]["deep"] = both[:6], both[2:8].view(2, 3)


def drop_slots(state: State) -> None:
    state["optim"].state.clear()


def swap_states(state: State) -> None:
    kept, (first, second, *_) = state["optim"].state, state["optim"].param_groups[0]["params"]
    kept[first], kept[second] = kept[second], kept[first]


def replace_data(state: State) -> None:
    for parameter in state["model"].parameters():
        parameter.data = parameter.data.clone() * 2


def keep_a_number(state: State) -> None:
    state["optim"].state[state["optim"].param_groups[0]["params"][0]]["count"] = 7


def add_buffer(state: State) -> None:
    state["model"].register_buffer("extra", numbers(3))


def hold_numpy(state: State) -> None:
    state["full"] = [np.arange(3.0)]


def keep_per_rank(state: State) -> None:
    state["note"] = shardckpt.PerRank(state["note"])


FITTING = [train, replace_sharded, write_in_place, count_step, load_optimizer, make_mesh_again, replace_data]
CHANGES: list[Callable[[State], None]] = [
    value
    for value in list(globals().values())
    if callable(value) and getattr(value, "__annotations__", {}).keys() == {"state", "return"}
]
OF_MODELS = [train, load_optimizer, share_parameter, drop_slots, swap_states, replace_data, keep_a_number, add_buffer]
REFUSED = (KeyError, AttributeError, TypeError, RuntimeError, ValueError, IndexError)


@pytest.mark.parametrize("style", TRACED)
def test_changed_states_are_saved_as_by_new_savers(style: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        for change in CHANGES if style == "plain" else OF_MODELS:
            saver, state = Saver(get_ranks(None)), build_state(style)
            save(saver, state, tmp_path)
            change(state)
            assert_saves_as_new(saver, state, tmp_path)
            if change in OF_MODELS:
                with torch.no_grad():
                    next(state["model"].parameters()).mul_(2)
                assert_saves_as_new(saver, state, tmp_path)

    run(2, body)


@settings(max_examples=1, deadline=None, phases=[Phase.generate])  # each example forks ranks
@given(
    st.lists(
        st.tuples(st.sampled_from(TRACED), st.lists(st.sampled_from(CHANGES), min_size=3, max_size=6)),
        min_size=3,
        max_size=6,
    )
)
def test_states_changed_again_and_again_are_saved_as_by_new_savers(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[str, list[Callable[[State], None]]]]
) -> None:
    folder = tmp_path_factory.mktemp("saves")

    def body(rank: int, world: int) -> None:
        saver = Saver(get_ranks(None))
        for style, changes in runs:
            state = build_state(style)
            for change in changes:
                try:
                    change(state)
                except REFUSED:
                    continue  # it does not apply to the result of another one
                assert_saves_as_new(saver, state, folder)

    run(2, body)


@pytest.mark.parametrize("style", TRACED)
def test_states_of_the_same_layout_are_not_flattened_again(style: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        saver, state = Saver(get_ranks(None)), build_state(style)
        save(saver, state, tmp_path)
        wrong = []
        for change in FITTING:
            change(state)
            with counted() as count:
                save(saver, state, tmp_path)
            wrong += [change.__name__] * count[0]
        return wrong

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("style", ["flat", "orig", "ddp"])
def test_other_wrappers_are_flattened_in_every_save(style: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> int:
        saver, state = Saver(get_ranks(None)), build_state(style)
        with counted() as count:
            for _ in range(2):
                save(saver, state, tmp_path)
        return count[0]

    assert run(2, body) == [2, 2]


class Subclass(torch.Tensor):
    """Tensor that has no trace."""


@pytest.mark.parametrize("odd", [0, 1])
def test_all_ranks_flatten_if_one_has_no_trace(odd: int, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[int]:
        saver, state = Saver(get_ranks(None)), build_state("plain")
        save(saver, state, tmp_path)
        counts = []
        for is_odd in (True, False, False):
            state["full"][0] = numbers(6, start=2).as_subclass(Subclass if is_odd and rank == odd else torch.Tensor)
            with counted() as count:
                save(saver, state, tmp_path)
            counts.append(count[0])
            assert_saves_as_new(saver, state, tmp_path)
        return counts

    assert run(2, body) == [[1, 1, 0]] * 2


def test_values_that_differ_between_ranks_are_refused_in_a_later_save_too(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        saver, state = Saver(get_ranks(None)), build_state("plain")
        save(saver, state, tmp_path)
        state["step"] = rank
        save(saver, state, tmp_path)

    assert all("`step` (int) differs between rank 0" in raised.message for raised in raised_everywhere(2, body))


def test_one_dtensor_under_two_names_is_not_taken_for_two_that_share_memory(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        saver, state = Saver(get_ranks(None)), build_state("plain")
        for change in (tie, share_local_tensor, tie):
            change(state)
            assert_saves_as_new(saver, state, tmp_path)

    run(2, body)


def test_a_strided_shard_is_not_taken_for_a_plain_one_which_torch_calls_equal(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        saver, strided = Saver(get_ranks(None)), _StridedShard(0, split_factor=2)
        ways: list[tuple[list[Placement], int]] = [
            ([Shard(0), Shard(0)], rank),
            ([strided, Shard(0)], rank % 2 * 2 + rank // 2),
        ]
        with patch.object(_StridedShard, "__eq__", lambda one, other: one.dim == other.dim):
            for placements, row in ways:
                value = DTensor.from_local(numbers(1, 4, start=4 * row), mesh, placements, run_check=False)
                save(saver, {"value": value}, tmp_path)
        saved = shardckpt.open(str(tmp_path / "1"))["value"][...]
        assert torch.equal(saved, numbers(4, 4)), saved

    run(4, body)


def test_partial_sums_are_refused_in_a_later_save_too(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        saver, state = Saver(get_ranks(None)), build_state("plain")
        save(saver, state, tmp_path)
        mesh = state["sharded"]["w2"].device_mesh
        state["sharded"]["w2"] = DTensor.from_local(numbers(6, 4), mesh, [Partial()], run_check=False)
        save(saver, state, tmp_path)

    assert all("partial sums" in raised.message for raised in raised_everywhere(2, body))


def test_replicas_that_differ_are_refused_in_a_later_save_too(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        saver, state = Saver(get_ranks(None)), build_state("plain")
        save(saver, state, tmp_path)
        state["full"][0] += rank
        save(saver, state, tmp_path)

    assert all("full.0" in raised.message for raised in raised_everywhere(2, body))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_missed_the_end_of_a_save_makes_all_flatten(missing: int, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[int]:
        saver, state = Saver(get_ranks(None)), build_state("plain")
        counts = []
        for number in range(4):
            shard_another_dim(state) if number == 1 else count_step(state)
            with counted() as count, patch.object(saver, "remember", saver.remember):
                if number == 1 and rank == missing:
                    saver.remember = lambda *_: None  # type: ignore[method-assign]
                save(saver, state, tmp_path)
            counts.append(count[0])
        dist.barrier()
        return counts

    assert run(2, body) == [[1, 1, 1, 0]] * 2


def test_a_mesh_is_described_at_the_first_save_with_it() -> None:
    def body(rank: int, world: int) -> list[int]:
        state = {name: distribute_tensor(numbers(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)]) for name in "ab"}
        get_coordinate, calls, counts = DeviceMesh.get_coordinate, [], []

        def count(mesh: DeviceMesh) -> Any:
            calls.append(mesh)
            return get_coordinate(mesh)

        with patch.object(DeviceMesh, "get_coordinate", count):
            for _ in range(3):
                trace_state(state, {})
                counts.append(len(calls))
        return counts

    for first, *later in run(2, body):
        assert first > 0
        assert later == [first, first]
