"""Segments of wrappers go; numbers get the one choice of names that fits, and otherwise none."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.parameter_names import unique_match, unwrapped


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("_fsdp_wrapped_module.a._checkpoint_wrapped_module.w", "a.w"),
        ("_orig_mod.a.w", "a.w"),
        ("a.w", "a.w"),
        ("_orig_mod", "_orig_mod"),
        ("", ""),
    ],
)
def test_wrappers_leave_no_trace(name: str, clean: str) -> None:
    assert unwrapped(name) == clean


@given(
    wanted=st.lists(st.sampled_from([None, 1, 2]), max_size=4), offered=st.lists(st.sampled_from([1, 2, 3]), max_size=6)
)
def test_a_match_is_given_only_where_it_is_the_only_one(wanted: list[int | None], offered: list[int]) -> None:
    named = [(f"n{i}", kind) for i, kind in enumerate(offered)]
    ways = [
        [name for name, _ in chosen]
        for chosen in combinations(named, len(wanted))
        if all(want in (None, kind) for want, (_, kind) in zip(wanted, chosen, strict=True))
    ]
    assert unique_match(wanted, named) == (ways[0] if len(ways) == 1 else None)
