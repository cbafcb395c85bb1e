"""`make test` runs a covering set: each function, each value and each pair of values; `make test-all` the rest."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.covering import CHOICES, OTHERS, RANKS, TEST, Settings, choose_covering, is_matching

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


def find_marks(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each mark `shown_by` of a module: what has it, the id of the faster test, and the patterns of values."""
    module = path.relative_to(ROOT / "tests").as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = getattr(node, "name", "")
        calls = getattr(node, "decorator_list", ()) or getattr(node, "values", ())
        for call in calls:
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "shown_by":
                faster, *patterns = map(ast.literal_eval, call.args)
                own = f"{module}::{name}{faster}" if faster.startswith("[") else f"{module}{faster}"
                yield f"{module}::{name}", own if faster.startswith(("[", "::")) else faster, patterns


def test_a_faster_test_exists_and_make_test_runs_it() -> None:
    marks = [mark for path in (ROOT / "tests").rglob("test_*.py") for mark in find_marks(path)]
    missing = []
    for slower, faster, _ in marks:
        function, _, values = faster.removesuffix("]").partition("[")
        path, _, names = function.partition("::")
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        missing += [faster for each in names.split("::") if not re.search(rf"(def|class) {each}\b", source)]
        own = {f"{path}::{each}" for each in names.split("::")}
        left_out = any(name in own and is_matching(values, *patterns) for name, _, patterns in marks)
        missing += [f"{faster}, which {slower} names, is left out, too"] * left_out
    assert missing == []


def test_patterns_are_values_of_a_test_of_which_some_or_all_are_left_out() -> None:
    assert is_matching("x-1")
    assert is_matching("x-1", "x-*")
    assert is_matching("x[1]-1", "y", "x[1]-*")
    assert not is_matching("x-1", "y-*")
