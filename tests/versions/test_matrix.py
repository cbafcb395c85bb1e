"""`make matrix`: pairs are parsed, pins are kept except torch's, and the table replaces the last one."""

from __future__ import annotations

import argparse
import datetime

import matrix
import pytest
from matrix import Pair, Result
from repeat import Counts

DATE = datetime.date(2026, 11, 23)


def test_a_pair_is_python_and_torch() -> None:
    assert Pair.parse("3.10:2.6.0") == Pair("3.10", "2.6.0")
    for wrong in ("2.6.0", "3.10:2.6", "3.10:2.6.0; rm", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="PYTHON:TORCH"):
            Pair.parse(wrong)


def test_the_table_holds_the_pinned_torch() -> None:
    pins = (matrix.ROOT / "constraints.txt").read_text().splitlines()
    assert f"torch=={matrix.PAIRS[2].torch}" in pins


def test_pins_are_kept_but_for_torch() -> None:
    pins = matrix.build_constraints(Pair("3.12", "2.9.1")).splitlines()
    assert pins[0] == "torch==2.9.1"
    assert sum(pin.startswith("torch==") for pin in pins) == 1
    assert any(pin.startswith("numpy==") for pin in pins)
    assert matrix.build_constraints(Pair("3.10", "2.6.0")) == "torch==2.6.0\n"


def test_a_failure_an_unread_form_and_a_pair_that_was_not_run_are_not_clean() -> None:
    pair = Pair("3.11", "2.13.0")
    assert Result(pair, Counts(5, [], 1, 0), (12, 12)).is_clean
    assert not Result(pair, Counts(5, ["a"], 1, 1), (12, 12)).is_clean
    assert not Result(pair, Counts(5, [], 1, 0), (11, 12)).is_clean
    assert not Result(pair, note="python3.11 is not installed").is_clean


def test_a_row_has_the_counts_or_the_reason() -> None:
    found = matrix.build_table(
        [Result(Pair("3.11", "2.13.0"), Counts(10_000, ["a"], 3, 1), (23, 24)), Result(Pair("3.9", "2.6.0"), note="x")],
        DATE,
    )
    assert "Run on 2026-11-23" in found
    assert "the fast part of the suite" in found
    assert "tests `tests/core tests/state`" in matrix.build_table([], DATE, ["tests/core", "tests/state"])
    assert "| 2.13.0 | 3.11 | 10,000 | 1 | 3 | 23 of 24 |" in found
    assert "| 2.6.0 | 3.9 | not run: x | | | |" in found


def test_a_table_replaces_the_one_before_and_nothing_else() -> None:
    page = f"# Versions\n{matrix.BEGIN}old\n{matrix.END}rest\n"
    once = matrix.replace_table(page, "new\n")
    assert once == f"# Versions\n{matrix.BEGIN}\nnew\n\n{matrix.END}rest\n"
    assert matrix.replace_table(once, "new\n") == once
    with pytest.raises(ValueError, match="must have the lines"):
        matrix.replace_table("# Versions\n", "new\n")


def test_the_page_has_a_place_for_the_table() -> None:
    matrix.replace_table((matrix.ROOT / "docs" / "compatibility.md").read_text(), "new\n")


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"python3\.999 is not installed"):
        matrix.find_python("3.999")
