"""Every form of an optimizer's state converts to every other and back, whatever its values are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.boxes import full_box
from shardckpt.errors import FormatError, NameCollisionError, UsageError
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.manifest import Piece, Span, TensorEntry
from shardckpt.plan.optim.optim_keys import (
    FlatUnit,
    Nested,
    flatten,
    from_paths,
    is_flattened,
    nest,
    pack_state,
    rename_params,
    split_groups,
    split_key,
    split_slots,
    to_ids,
    to_names,
    to_paths,
)

NAMES = ["a", "a.b", "a.b.step", "weight", "state.x", "7"]
SLOTS = ["step", "exp_avg", "shampoo.0"]
UNITS = [
    FlatUnit("_flat_param", FlatLayout(tuple(ParamSpec(name, (2,), "float32") for name in ("a", "weight")), 2)),
    FlatUnit("b._flat_param", FlatLayout((ParamSpec("a.b", (2,), "float32"),), 2)),
]


def entry(at: int) -> TensorEntry:
    return TensorEntry(("optim", at), (2,), "float32", (Piece(full_box((2,)), "file", Span(at, 8)),))


VALUES: dict[str, Callable[[int], Any]] = {"tensors": lambda at: torch.full((2,), float(at)), "entries": entry}


@st.composite
def states(draw, value: Callable[[int], Any]) -> Nested:
    """Some of the names, in any order and in up to three groups that are not empty; names without slots."""
    names = draw(st.permutations(draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))))
    ends = sorted(draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2)))
    parts = [names[i:j] for i, j in zip([0, *ends], [*ends, len(names)], strict=True)]
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(part)} for part in parts if part]
    rows = {name: draw(st.lists(st.sampled_from(SLOTS), unique=True)) for name in names}
    slots = {n: {s: value(i * 9 + j) for j, s in enumerate(row)} for i, (n, row) in enumerate(rows.items()) if row}
    return {"state": slots, "param_groups": groups}


@dataclass(frozen=True)
class Form:
    """Functions from names to a form, and back with the names in each group."""

    encode: Callable[[Nested], Any]
    decode: Callable[[Any, list[list[str]]], Nested]


def read_nested_paths(paths: Any, groups: list[list[str]]) -> Nested:
    leaves = {path: value for path, value in paths.items() if len(path) == 3}
    return from_paths(leaves, {path: value for path, value in paths.items() if path not in leaves})


def to_flat_params(state: Nested) -> Any:
    return pack_state(state, UNITS, lambda unit, slot, values: dict(values))[0]


def from_flat_params(state: Any, groups: list[list[str]]) -> Nested:
    slots = split_slots(state["state"], UNITS, lambda unit, slot, values: values)
    members = [name for group in split_groups(state["param_groups"], UNITS) for name in group["params"]]
    assert set(members) >= {name for group in groups for name in group}
    hypers = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    return {"state": slots, "param_groups": [{**h, "params": g} for h, g in zip(hypers, groups, strict=True)]}


FORMS = {
    "names": Form(dict, lambda state, groups: dict(state)),
    "ids": Form(to_ids, to_names),
    "flattened": Form(flatten, nest),
    "paths": Form(to_paths, read_nested_paths),
    "flat-parameters": Form(to_flat_params, from_flat_params),
}


def assert_same(state: Nested, expected: Nested) -> None:
    """Compare keys and groups; values are the same objects."""
    assert state["param_groups"] == expected["param_groups"]
    rows, others = state["state"], expected["state"]
    assert {name: set(row) for name, row in rows.items()} == {name: set(row) for name, row in others.items()}
    assert all(rows[name][slot] is others[name][slot] for name in others for slot in others[name])


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("first", "second"), list(permutations(FORMS, 2)))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_pair_of_forms_converts_and_comes_back(first: str, second: str, values: str, data: st.DataObject) -> None:
    state = data.draw(states(VALUES[values]))
    groups = [group["params"] for group in state["param_groups"]]
    one, two = FORMS[first], FORMS[second]
    there = one.decode(one.encode(state), groups)
    assert_same(there, state)
    back = two.decode(two.encode(there), groups)
    assert_same(back, state)


@given(states(entry), st.booleans())
def test_ids_that_a_planner_wrote_as_text_become_ids_again(state: Nested, as_leaves: bool) -> None:
    by_id = to_ids(state)
    tensors = {("state", str(key), slot): value for key, row in by_id["state"].items() for slot, value in row.items()}
    groups = {("param_groups",): by_id["param_groups"]}
    if as_leaves:
        groups = {("param_groups", i, k): v for i, g in enumerate(by_id["param_groups"]) for k, v in g.items()}
    assert_same(from_paths(tensors, groups), by_id)


def test_text_with_more_digits_than_an_id_has_stays_text() -> None:
    digits = "9" * 5000
    state = from_paths({("state", digits, "m"): 1}, {("param_groups",): [{"params": [0]}]})
    assert list(state["state"]) == [digits]


def test_a_key_is_split_after_the_longest_name() -> None:
    names = {"a", "a.b"}
    assert split_key("a.b.step", names.__contains__) == ("a.b", "step")
    assert split_key("a.shampoo.0", names.__contains__) == ("a", "shampoo.0")
    assert split_key("c.d.step", names.__contains__) == ("c.d", "step")


def test_flattened_keys_are_recognized() -> None:
    assert is_flattened(["state.a.step", "param_groups.a.lr"])
    assert not is_flattened([])
    assert not is_flattened(["state.a.step", "state"])
    assert not is_flattened(["model.a"])


def test_keys_of_other_forms_are_refused() -> None:
    for key in ("model.a.step", "state.b.step", "state"):
        with pytest.raises(UsageError, match="does not fit a flattened optimizer state"):
            nest({key: 1}, [["a"]])
    with pytest.raises(UsageError, match="different settings; found a, b"):
        nest({"param_groups.a.lr": 1, "param_groups.b.lr": 2}, [["a", "b"]])
    with pytest.raises(UsageError, match="cannot be flattened"):
        flatten({"state": {0: {}}, "param_groups": []})
    with pytest.raises(FormatError, match=r"expected state\.<name>\.<slot>"):
        from_paths({("state", "a"): 1}, {})
    with pytest.raises(FormatError, match="must be a list of dicts; found int"):
        from_paths({}, {("param_groups",): 3})


def test_two_keys_that_become_one_name_are_refused_if_they_share_a_slot() -> None:
    state = {"state": {"a": {"m": 1}, "b": {"m": 2}}, "param_groups": []}
    with pytest.raises(NameCollisionError, match="both be named 'c/m'"):
        rename_params(state, {"a": "c", "b": "c"})
    apart = {"state": {"a": {"m": 1}, "b": {"v": 2}}, "param_groups": []}
    assert rename_params(apart, {"a": "c", "b": "c"})["state"] == {"c": {"m": 1, "v": 2}}
