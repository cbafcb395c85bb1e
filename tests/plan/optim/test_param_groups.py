"""Param groups of several ranks become one list; ids, and names in two groups, do not."""

from __future__ import annotations

from typing import Any

import pytest

from shardckpt.plan.optim.param_groups import merge_groups


def group(*params: str | int, **settings: Any) -> dict[str, Any]:
    return {**settings, "params": list(params)}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([[group("a", lr=1)], [group("b", lr=1)]], [group("a", "b", lr=1)]),
        ([[group("a", lr=1)], [group("a", "b", lr=1)]], [group("a", "b", lr=1)]),
        ([[group("a", lr=1)], [group("b", lr=2)]], [group("a", lr=1), group("b", lr=2)]),
        ([[group("a"), group("b")], [group("c"), group("d")]], [group("a", "c"), group("b", "d")]),
        ([[group("a", lr=1), group("b", lr=2)], [group("c", lr=2)]], [group("a", lr=1), group("b", "c", lr=2)]),
        ([[], [group("a")]], [group("a")]),
    ],
    ids=["stages", "a subset", "other settings", "by index", "by settings", "no group"],
)
def test_groups_of_ranks_become_one_list(ranks: list[Any], expected: list[dict[str, Any]]) -> None:
    assert merge_groups(ranks) == expected


@pytest.mark.parametrize(
    "ranks",
    [
        [[group(0, lr=1)], [group(0, lr=2)]],
        [[group("a", lr=1)], [group("a", lr=2)]],
        [[group("a")], "no list"],
        [[group("a")], [{"lr": 1}]],
    ],
    ids=["ids", "contradiction", "no list", "no params"],
)
def test_groups_that_contradict_each_other_are_not_merged(ranks: list[Any]) -> None:
    assert merge_groups(ranks) is None
