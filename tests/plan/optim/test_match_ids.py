"""Numbers get the one choice of names that fits, and otherwise none."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.plan.optim.match_ids import has_match, match_by_kind, match_in_order

KINDS = st.sampled_from([None, 1, 2])


def list_matches(wanted: list[int | None], choices: Iterable[tuple[tuple[str, int], ...]]) -> list[list[str]]:
    """Return the names of the choices that fit what is wanted, one by one."""
    return [
        [name for name, _ in chosen]
        for chosen in choices
        if all(want in (None, kind) for want, (_, kind) in zip(wanted, chosen, strict=True))
    ]


@given(wanted=st.lists(KINDS, max_size=4), offered=st.lists(st.sampled_from([1, 2, 3]), max_size=6))
def test_a_match_in_order_is_given_only_where_it_is_the_only_one(wanted: list[int | None], offered: list[int]) -> None:
    named = [(f"n{i}", kind) for i, kind in enumerate(offered)]
    ways = list_matches(wanted, combinations(named, len(wanted)))
    assert match_in_order([wanted], named) == (ways if len(ways) == 1 else None)


@given(wanted=st.lists(KINDS, max_size=4), offered=st.lists(st.sampled_from([1, 2, 3]), max_size=5))
def test_a_match_by_kind_is_the_only_one_in_any_order(wanted: list[int | None], offered: list[int]) -> None:
    named = [(f"n{i}", kind) for i, kind in enumerate(offered)]
    ways = list_matches(wanted, permutations(named, len(wanted)))
    assert match_by_kind(wanted, named) == (ways[0] if len(ways) == 1 else None)
    if None not in wanted:
        assert has_match(wanted, named) == bool(ways)


def test_groups_take_names_one_after_the_other() -> None:
    offered = [("a.w", 1), ("a.b", 2), ("c.w", 1), ("c.b", 2)]
    assert match_in_order([[2, 2], [1, 1]], offered) == [["a.b", "c.b"], ["a.w", "c.w"]]
    assert match_in_order([[1], [1]], offered) is None
    assert match_in_order([[1, 2, 1, 2, 1]], offered) is None


def test_many_groups_cost_no_product_of_their_numbers() -> None:
    count = 20_000
    offered = [pair for i in range(count) for pair in ((f"w{i}", "same"), (f"b{i}", i))]
    started = time.process_time()
    match = match_in_order([["same", i] for i in range(count)], offered)
    assert match is not None and match[-1] == [f"w{count - 1}", f"b{count - 1}"]
    assert time.process_time() - started < 10
