"""`make test` runs a covering set: each function, each value and each pair of values; `make test-all` the rest."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.covering import (
    CHOICES,
    OTHERS,
    RANKS,
    SHOWN_FASTER,
    TEST,
    Settings,
    choose_covering,
    find_faster,
    is_matching,
)

ROOT = Path(__file__).resolve().parents[1]
BEHAVIORS = st.fixed_dictionaries(
    {TEST: st.sampled_from(["trains", "saves", "loads"])},
    optional={name: st.integers(0, 3) for name in ("front_end", "strategy", "world")},
)


def find_pairs(every: Sequence[Settings]) -> set[frozenset[tuple[str, object]]]:
    """Return each function, each value, and each two values of one test, by brute force."""
    found = set()
    for settings in every:
        values = {each for each in settings.items() if each[0] != TEST}
        found |= {frozenset([(TEST, settings[TEST])]), *(frozenset([each]) for each in values)}
        found |= {frozenset(pair) for pair in itertools.product(values, values)}
    return found


@given(st.lists(BEHAVIORS, max_size=40))
def test_the_chosen_settings_have_each_function_each_value_and_each_pair(every: list[Settings]) -> None:
    chosen = choose_covering(every)
    assert find_pairs([every[number] for number in chosen]) == find_pairs(every)


def test_functions_take_turns_with_a_value_and_triples_are_left_out() -> None:
    fronts, strategies = ("flat", "orig", "in place"), ("full", "grad_op")
    behaviors = [f"test_{number}" for number in range(9)]
    every = [{TEST: test, "front_end": front} for test in behaviors for front in fronts]
    chosen = [every[number] for number in choose_covering(every)]
    assert [each[TEST] for each in chosen] == behaviors
    assert sorted(each["front_end"] for each in chosen) == sorted(fronts * 3)
    triples = itertools.product(behaviors, fronts, strategies)
    every = [{TEST: test, "front_end": front, "strategy": strategy} for test, front, strategy in triples]
    assert len(choose_covering(every)) == len(behaviors)


def test_the_suite_is_covered_in_pairs(request: pytest.FixtureRequest) -> None:
    """Of the modules that this run has collected, which are all in `make test`."""
    choices = request.config.stash[CHOICES].values()
    assert [find_pairs(choice.every) - find_pairs(choice.chosen) for choice in choices] == [set()] * len(choices)


def test_modules_that_fork_ranks_are_found_by_the_module_they_import() -> None:
    assert importlib.util.find_spec(RANKS) is not None
    assert [path for path in OTHERS if not (ROOT / "tests" / path).is_file()] == []


def test_what_a_faster_test_shows_names_a_test_that_make_test_runs() -> None:
    missing = []
    for pattern, faster in SHOWN_FASTER.items():
        for name in (pattern, faster):
            path, _, functions = name.partition("[")[0].partition("::")
            source = (ROOT / "tests" / path).read_text(encoding="utf-8")
            missing += [name for each in functions.split("::") if not re.search(rf"(def|class) {each}\b", source)]
        missing += [f"{faster} is left out, too"] * (find_faster(f"tests/{faster}") is not None)
    assert missing == []


def test_patterns_are_ids_of_tests_of_which_some_or_all_values_are_left_out() -> None:
    assert is_matching("a.py::test_b[x-1]", "a.py::test_b")
    assert is_matching("a.py::test_b[x-1]", "a.py::test_b[x-*]")
    assert is_matching("a.py::test_b[x[1]-1]", "a.py::test_b[x[1]-*]")
    assert is_matching("a.py::TestC::test_b[x-1]", "a.py::TestC")
    assert not is_matching("a.py::test_b[x-1]", "a.py::test_b[y-*]")
    assert not is_matching("a.py::test_bc", "a.py::test_b")
