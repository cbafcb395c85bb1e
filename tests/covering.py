"""Which tests `make test` leaves to `make test-all`: combinations beyond a covering set, and what a faster test shows.

The product of behaviors and settings (front ends, strategies, numbers of ranks) takes most of the time of the suite.
Of each module that forks ranks, and of `OTHERS`, `make test` runs each test function, each value of each parameter, and
each pair of values that any of its tests brings together. Other combinations get the mark `full`, as do tests with the
mark `shown_by(faster, *values)`: `faster` is the id of a test that shows the same, from `tests/`, from its module
(`::test_a`) or from its function (`[1]`). With `values`, patterns of values in brackets, only these get the mark.
"""

from __future__ import annotations

import fnmatch
import heapq
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

OTHERS = (
    "checkpoint/test_kill_incremental.py",
    "checkpoint/test_kill_matrix.py",
    "readers/test_hostile.py",
    "fuzz/test_fuzz.py",
    "integrations/test_transformers.py",
    "storage/test_kill_matrix.py",
)
"""Modules that do not import `RANKS` and whose tests kill, damage or train at many places."""
RANKS = "tests.kit.ranks.harness"
"""The module whose functions fork ranks."""
OUTSIDE = ("slow", "gpu")
"""Marks of tests that are not among those to choose from."""
TEST = "test function"

Settings = Mapping[str, Hashable]
"""The value of each parameter of a test, and under `TEST` the id of the function."""


@dataclass(frozen=True)
class Choice:
    """What `make test` runs of a module: the settings of all its tests, and of the chosen ones."""

    every: Sequence[Settings]
    chosen: Sequence[Settings]


CHOICES = pytest.StashKey[dict[Path, Choice]]()
"""Where the configuration of pytest keeps the choice from each module."""


def mark_full(items: Iterable[pytest.Item], root: Path) -> dict[Path, Choice]:
    """Mark as `full` the tests that `make test` leaves out; return the choice from each module."""
    modules = defaultdict(list)
    for item in items:
        if any(item.get_closest_marker(mark) for mark in OUTSIDE):
            continue
        if is_shown_faster(item):
            item.add_marker(pytest.mark.full)
        elif is_covered(item, root):
            modules[item.path].append(item)
    choices = {}
    for path, members in modules.items():
        every = [get_settings(item) for item in members]
        chosen = choose_covering(every)
        for number, item in enumerate(members):
            if number not in chosen:
                item.add_marker(pytest.mark.full)
        choices[path] = Choice(every, [every[number] for number in sorted(chosen)])
    return choices


def is_shown_faster(item: pytest.Item) -> bool:
    """Return True if a mark names a faster test that shows the same as this test, or as this test with its values."""
    values = item.nodeid.partition("[")[2].removesuffix("]")
    return any(is_matching(values, *mark.args[1:]) for mark in item.iter_markers("shown_by"))


def is_matching(values: str, *patterns: str) -> bool:
    """Return True if no patterns are given, or one matches; brackets are text, and `*` is any text."""
    return not patterns or any(fnmatch.fnmatchcase(values, each.replace("[", "[[]")) for each in patterns)


def is_covered(item: pytest.Item, root: Path) -> bool:
    """Return True if `make test` runs a covering set of the module of `item`."""
    if item.path.relative_to(root).as_posix() in OTHERS:
        return True
    return any(getattr(value, "__module__", None) == RANKS for value in vars(getattr(item, "module", item)).values())


def get_settings(item: pytest.Item) -> Settings:
    """Return the settings of a test; a value is the same in all tests of its module."""
    call = getattr(item, "callspec", None)
    values = {} if call is None else {name: _identify(value) for name, value in call.params.items()}
    return {TEST: item.nodeid.partition("[")[0], **values}


def _identify(value: object) -> Hashable:
    """Return the value, or its identity if it has no hash: lists that several tests share hold the same objects."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def list_goals(settings: Settings) -> frozenset[Hashable]:
    """Return what a test adds to a covering set: its function, its values, and each pair of them."""
    values = [(name, value) for name, value in settings.items() if name != TEST]
    pairs = itertools.combinations(sorted(values, key=operator.itemgetter(0)), 2)
    return frozenset({(TEST, settings[TEST]), *values, *pairs})


def choose_covering(every: Sequence[Settings]) -> set[int]:
    """Return the numbers of few settings that have each function, each value and each pair of values of `every`.

    Each step takes the settings with the most that is missing, and of equal ones those whose values were taken least.
    """
    goals = [list_goals(settings) for settings in every]
    missing = set(itertools.chain.from_iterable(goals))
    taken: Counter[Hashable] = Counter()
    chosen: set[int] = set()
    queue = [(-len(goal), 0, number) for number, goal in enumerate(goals)]  # what is added only falls: looked at last
    while missing:
        added, times, number = heapq.heappop(queue)
        now = -len(goals[number] & missing), sum(taken[goal] for goal in goals[number]), number
        if now != (added, times, number):
            heapq.heappush(queue, now)
            continue
        chosen.add(number)
        missing -= goals[number]
        taken.update(goals[number])
    return chosen
