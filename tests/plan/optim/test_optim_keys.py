"""Numbers, names, nested and flattened keys of an optimizer's state lead to one another, for any groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import UsageError
from shardckpt.state import ConflictError, flatten, nest, to_ids, to_names

NAMES = ["a", "a.b", "a.b.step", "weight", "state.x"]


@st.composite
def states(draw) -> dict[str, Any]:
    """Some of the names in up to four groups, in any order, some groups empty, some names without state."""
    names = draw(st.permutations(draw(st.lists(st.sampled_from(NAMES), unique=True))))
    cuts = sorted(draw(st.lists(st.integers(0, len(names)), min_size=3, max_size=3)))
    parts = [names[i:j] for i, j in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    groups = [{"lr": draw(st.sampled_from([0.1, 0.2])), "betas": (0.9, 0.99), "params": list(part)} for part in parts]
    state = {
        name: {"step": torch.tensor(float(at)), "exp_avg": torch.full((2,), float(at)), "rounds": at}
        for at, name in enumerate(names)
        if draw(st.booleans())
    }
    return {"state": state, "param_groups": groups}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    kept, other = found["state"], expected["state"]
    return (
        found["param_groups"] == expected["param_groups"]
        and kept.keys() == other.keys()
        and all(kept[n].keys() == other[n].keys() for n in kept)
        and all(kept[n][slot] is other[n][slot] for n in kept for slot in kept[n])
    )


@given(states())
def test_numbers_lead_back_to_names(state: dict[str, Any]) -> None:
    before = copy.deepcopy(state["param_groups"])
    groups = [group["params"] for group in state["param_groups"]]
    numbered = to_ids(state)
    assert [n for g in numbered["param_groups"] for n in g["params"]] == list(range(sum(map(len, groups))))
    assert same(to_names(numbered, groups), state)
    told = [{**g, "param_names": names} for g, names in zip(numbered["param_groups"], groups, strict=True)]
    assert same(to_names({**numbered, "param_groups": told}), state)
    assert same(to_names(state), state)
    assert same(to_ids(numbered), numbered)
    assert state["param_groups"] == before


@given(states())
def test_flattened_names_lead_back(state: dict[str, Any]) -> None:
    groups = [group["params"] for group in state["param_groups"]]
    back = nest(flatten(state), groups)
    kept = [group if group["params"] else {"params": []} for group in state["param_groups"]]  # nobody has its settings
    assert same(back, {**state, "param_groups": kept})


@given(states(), st.data())
def test_numbers_of_another_grouping_take_settings_by_name(state: dict[str, Any], data: st.DataObject) -> None:
    names = [name for group in state["param_groups"] for name in group["params"]]
    order = data.draw(st.permutations(names))
    lr = {name: group["lr"] for group in state["param_groups"] for name in group["params"]}
    groups = [[name for name in order if lr[name] == rate] for rate in (0.2, 0.1)]
    made = to_ids(state, groups)
    number = {name: at for at, name in enumerate(name for group in groups for name in group)}
    assert {number[name] for name in state["state"]} == made["state"].keys()
    assert all(made["state"][number[name]] is state["state"][name] for name in state["state"])
    for group, rate, of in zip(made["param_groups"], (0.2, 0.1), groups, strict=True):
        assert group["params"] == [number[name] for name in of]
        assert not of or group["lr"] == rate


def two(first: float = 0.1, second: float = 0.1) -> dict[str, Any]:
    groups = [{"lr": first, "params": ["a"]}, {"lr": second, "params": ["b"]}, {"lr": 0.7, "params": []}]
    return {"state": {"a": {"step": 1}}, "param_groups": groups}


def test_a_group_that_draws_from_groups_that_differ_is_refused_with_both_values() -> None:
    with pytest.raises(ConflictError, match=r"lr=0.1 of a; lr=0.2 of b"):
        to_ids(two(0.1, 0.2), [["a", "b"]])
    assert to_ids(two(), [["b", "a"]])["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]


def test_a_group_without_names_has_the_settings_of_one_without_names() -> None:
    made = to_ids(two(), [["b", "a"], []])["param_groups"]
    assert made == [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.7, "params": []}]


def test_names_that_do_not_match_the_groups_are_refused() -> None:
    numbered = to_ids(two())
    for groups in ([["a"], ["b"]], [["a"], ["b"], [], ["c"]]):
        with pytest.raises(UsageError, match=rf"must be given for each group; found {len(groups)}; expected 3"):
            to_names(numbered, groups)
    with pytest.raises(UsageError, match=r"param_groups\[1\].*found 2 names; expected 1"):
        to_names(numbered, [["a"], ["b", "c"], []])
    with pytest.raises(UsageError, match="names in a group are not known"):
        to_names(numbered)
    with pytest.raises(UsageError, match="in no group of the optimizer; found a"):
        to_ids(two(), [["b"]])


def test_numbers_and_names_in_one_state_are_refused() -> None:
    state = {"state": {0: {}, "a": {}}, "param_groups": []}
    for turn in (to_names, to_ids, flatten):
        with pytest.raises(ValueError, match="must be all ids or all names; found int, str"):
            turn(state)
