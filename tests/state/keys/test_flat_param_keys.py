"""States by names become states of flat parameters and come back bit for bit; a rank's part is what it would hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import shardckpt
from shardckpt.errors import ShardckptError, UsageError
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.state import (
    ConflictError,
    FlatUnit,
    OpaqueStateError,
    flat_units,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
    to_flat_parameters,
    to_ids,
    to_names,
    to_original_parameters,
)
from tests.kit.models.states import FRONT_ENDS, Net, differing, flat, step
from tests.kit.ranks.harness import run

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def units(draw) -> list[FlatUnit]:
    """One to three flat parameters, of one to four parameters of any shape and order in memory."""
    made = []
    for index in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        specs = []
        for position in range(draw(st.integers(1, 4))):
            shape = draw(SHAPES)
            order = tuple(draw(st.permutations(range(len(shape))))) if len(shape) > 1 and draw(st.booleans()) else ()
            aliases = (f"alias.{index}.{position}",) if draw(st.booleans()) else ()
            specs.append(ParamSpec(f"{index}.{position}", shape, str(dtype)[6:], order, aliases))
        layout = FlatLayout(tuple(specs), draw(st.integers(1, 4)), draw(st.sampled_from([1, 4])))
        made.append(FlatUnit(f"{index}._flat_param", layout))
    return made


def value(spec: ParamSpec, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(spec.shape, generator=generator).to(dtype or getattr(torch, spec.dtype))
    if spec.order:
        back = [spec.order.index(dim) for dim in range(len(spec.order))]
        made = made.permute(spec.order).contiguous().permute(back)
    return made


def weights(made: list[FlatUnit]) -> dict[str, torch.Tensor]:
    found = {"buffer": torch.ones(2)}
    for seed, spec in enumerate(spec for unit in made for spec in unit.layout.specs):
        found |= dict.fromkeys((spec.name, *spec.aliases), value(spec, seed))
    return found


@st.composite
def moments(draw, made: list[FlatUnit]) -> dict[str, Any]:
    """A state with groups in any order, empty ones, units split over groups alike, and parameters without state."""
    names = [spec.name for unit in made for spec in unit.layout.specs] + ["outside"]
    group_of = {name: draw(st.integers(0, 2)) for name in names}
    order = draw(st.permutations(names))
    groups = [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": [name for name in order if group_of[name] == at]} for at in range(4)
    ]
    state: dict[str, Any] = {}
    for unit in made:
        for seed, spec in enumerate(unit.layout.specs):
            if draw(st.integers(0, 3)):
                state[spec.name] = {
                    "step": torch.tensor(3.0),
                    "exp_avg": value(spec, seed),
                    "exp_avg_sq": value(spec, seed + 9, torch.float32),
                    "rounds": 7,
                }
    state["outside"] = {"exp_avg": torch.ones(3)}
    return {"state": state, "param_groups": groups}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have neighbours."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and tensor.numel()]


@st.composite
def optimizers(draw) -> tuple[list[FlatUnit], dict[str, Any]]:
    """Flat parameters, and the state of an optimizer of them."""
    made = draw(units())
    return made, draw(moments(made))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_models_come_back_bit_for_bit(data: st.DataObject) -> None:
    made = data.draw(units())
    state = weights(made)
    before = copy.deepcopy(state)
    whole = to_flat_parameters(state, made)
    assert set(whole) == {"buffer", *(unit.name for unit in made)}
    assert all(whole[unit.name].shape == (unit.layout.numel,) for unit in made)
    assert same(to_original_parameters(whole, made), state)
    world = data.draw(st.integers(1, 4))
    cut = [unit.resized(world) for unit in made]
    parts = [to_flat_parameters(state, cut, rank) for rank in range(world)]
    for unit in cut:
        assert torch.equal(torch.cat([part[unit.name] for part in parts]), whole[unit.name])
    back = to_original_parameters(parts, cut)
    assert same(back, state)
    assert all(steps(back[name]) == steps(state[name]) for name in state)
    assert same(state, before)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_optimizers_come_back_bit_for_bit(data: st.DataObject) -> None:
    made, state = data.draw(optimizers())
    before = copy.deepcopy(state)
    whole = to_flat_parameters(state, made)
    assert [len(group["params"]) for group in whole["param_groups"]][3] == 0
    assert sum(len(group["params"]) for group in whole["param_groups"]) == len(made) + 1
    assert same(to_original_parameters(whole, made)["state"], state["state"])
    assert to_original_parameters(whole, made)["param_groups"] == state["param_groups"]
    world = data.draw(st.integers(1, 4))
    cut = [unit.resized(world) for unit in made]
    parts = [to_flat_parameters(state, cut, rank) for rank in range(world)]
    assert same(to_original_parameters(parts, cut), before)
    tensors = [id(v) for row in whole["state"].values() for v in row.values() if isinstance(v, torch.Tensor)]
    assert len(set(tensors)) == len(tensors)
    assert same(state, before)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_numbers_names_and_flat_parameters_lead_to_one_another(data: st.DataObject) -> None:
    made, state = data.draw(optimizers())
    flat_names = to_flat_parameters(state, made)
    groups = [group["params"] for group in flat_names["param_groups"]]
    numbered = to_ids(flat_names)
    assert same(to_original_parameters(to_names(numbered, groups), made)["state"], state["state"])
    original = [group["params"] for group in state["param_groups"]]
    assert same(to_flat_parameters(to_names(to_ids(state), original), made), flat_names)


def two() -> list[FlatUnit]:
    specs = (ParamSpec("a", (2, 3), "float32"), ParamSpec("b", (3,), "float32"))
    return [FlatUnit("_flat_param", FlatLayout(specs, 2))]


def kept(**changes: Any) -> dict[str, Any]:
    state = {
        "a": {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 3)},
        "b": {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)},
    }
    for name, row in changes.items():
        state[name] = {**state[name], **row}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": ["b", "a"]}]}


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"b": {"step": torch.tensor(2.0)}}, UsageError, "step differs among parameters of _flat_param"),
        ({"b": {"exp_avg": torch.ones(2)}}, OpaqueStateError, r"b/exp_avg.*found \(2,\).*expected \(3,\)"),
        ({"b": {"exp_avg": torch.ones(3).double()}}, UsageError, "several types"),
    ],
)
def test_what_one_flat_parameter_cannot_hold_is_refused(
    changes: dict[str, Any], kind: type[ShardckptError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        to_flat_parameters(kept(**changes), two())


def test_settings_that_differ_within_a_flat_parameter_are_refused_with_both_values() -> None:
    state = {**kept(), "param_groups": [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b"]}]}
    for rank in (None, 0):
        with pytest.raises(ConflictError, match=r"lr=0.1 of a; lr=0.2 of b"):
            to_flat_parameters(state, two(), rank)


def test_what_does_not_fit_the_units_is_refused() -> None:
    state = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    parts = [to_flat_parameters(state, two(), rank) for rank in range(2)]
    with pytest.raises(UsageError, match="lacks flat parameters' members; found b"):
        to_flat_parameters({"a": state["a"]}, two())
    with pytest.raises(UsageError, match=r"rank does not exist; found 2; expected below 2"):
        to_flat_parameters(state, two(), 2)
    with pytest.raises(UsageError, match="does not fit its unit"):
        to_flat_parameters({**state, "b": torch.ones(4)}, two())
    with pytest.raises(UsageError, match="the states of some ranks are missing; found 1; expected 2"):
        to_original_parameters(parts[:1], two())
    with pytest.raises(UsageError, match="rank 0's shard does not fit its unit"):
        to_original_parameters(parts[::-1], two())
    with pytest.raises(UsageError, match="has no metadata on flat parameters"):
        flat_units(state)


def test_other_groups_may_be_asked_for() -> None:
    whole = to_flat_parameters(kept(), two())
    found = to_original_parameters(whole, two(), [["a"], [], ["b"]])
    assert found["param_groups"] == [{"lr": 0.1, "params": ["a"]}, {"params": []}, {"lr": 0.1, "params": ["b"]}]
    assert set(to_original_parameters(whole, two(), [["b"]])["state"]) == {"b"}


def trained(front_end: str, seed: int):
    torch.manual_seed(seed)
    model = FRONT_ENDS[front_end](Net())
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optim, seed)
    return model, optim


def test_the_parts_are_those_of_live_ranks_and_load_there() -> None:
    def body(rank, world):
        model, optim = trained("flat", 0)
        wrong = []
        for take, of in ((model_state_dict, (model,)), (optim_state_dict, (model, optim))):
            whole, local = take(*of), take(*of, "LOCAL")
            made = to_flat_parameters(whole, flat_units(local), rank)
            made.pop("originals", None)
            wrong += [] if same(dict(made), dict(local)) else [f"{take.__name__} on rank {rank}"]
        other, again = trained("flat", 1)
        load_model_state_dict(other, to_flat_parameters(model_state_dict(model), flat_units(local), rank))
        load_optim_state_dict(other, again, to_flat_parameters(whole, flat_units(local), rank))
        wrong += differing(model_state_dict(other), model_state_dict(model))
        return wrong + differing(flat(optim_state_dict(other, again)), flat(whole))

    assert run(2, body) == [[], []]


def test_ranks_of_another_number_are_written_without_a_job(tmp_path: Path) -> None:
    def body(rank, world):
        model, optim = trained("flat", 0)
        found = [model_state_dict(model), optim_state_dict(model, optim), flat_units(model_state_dict(model, "LOCAL"))]
        return copy.deepcopy(found)

    whole, kept, made = run(2, body)[0]
    cut = [unit.resized(3) for unit in made]
    (tmp_path / "ranks").mkdir()
    for rank in range(3):
        parts = {"model": to_flat_parameters(whole, cut, rank), "optim": to_flat_parameters(kept, cut, rank)}
        torch.save(parts, tmp_path / f"ranks/{rank}.pt")
    shardckpt.consolidate(str(tmp_path / "ranks"), str(tmp_path / "whole"), part="all")
    assert differing(load_file(tmp_path / "whole/model.safetensors"), whole) == []
    found = load_file(tmp_path / "whole/optimizer.safetensors")
    assert differing(found, {f"{n}/{s}": v for n, row in kept["state"].items() for s, v in row.items()}) == []

    def load(rank, world):
        model, optim = trained("flat", 1)
        parts = torch.load(tmp_path / f"ranks/{rank}.pt")
        load_model_state_dict(model, parts["model"])
        load_optim_state_dict(model, optim, parts["optim"])
        return differing(model_state_dict(model), whole) + differing(flat(optim_state_dict(model, optim)), flat(kept))

    assert run(3, load) == [[], [], []]
