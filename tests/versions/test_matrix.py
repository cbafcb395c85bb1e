"""`matrix.py`: pairs are parsed, pins are kept except torch's, and rows replace those of the same pairs."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from pathlib import Path

import pytest

from tests.repeat import Counts
from tests.versions import matrix
from tests.versions.matrix import Pair, Result, Source

SOURCE = Source(datetime.date(2026, 11, 23), "1a2b3c4")


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
    found = matrix.build_row(Result(Pair("3.11", "2.13.0"), Counts(10_000, ["a"], 3, 1), (23, 24)), SOURCE)
    assert found == "| 2.13.0 | 3.11 | all fast ones | 10,000 | 1 | 3 | 23 of 24 | 2026-11-23 | 1a2b3c4 |\n"
    part = dataclasses.replace(SOURCE, arguments=("tests/core", "tests/state"))
    found = matrix.build_row(Result(Pair("3.9", "2.6.0"), note="no such Python"), part)
    assert found.startswith("| 2.6.0 | 3.9 | `tests/core tests/state` | not run: no such Python |")
    assert found.count("|") == len(matrix.COLUMNS) + 1
    interrupted = Result(Pair("3.13", "2.15.0"), Counts(3_198, [], 5, 2), (12, 12))
    assert not interrupted.is_clean
    assert " | not whole: pytest exited with code 2 |  |  |  | 2026" in matrix.build_row(interrupted, SOURCE)


def row(torch: str, passed: int, *tests: str) -> str:
    result = Result(Pair("3.11", torch), Counts(passed, [], 0, 0), (6, 6))
    return matrix.build_row(result, dataclasses.replace(SOURCE, arguments=tests))


def test_rows_replace_those_of_the_same_versions_and_tests_and_nothing_else() -> None:
    page = f"# Versions\n{matrix.BEGIN}old\n{matrix.END}rest\n"
    once = matrix.merge_rows(page, [row("2.13.0", 10), row("2.9.1", 20), row("2.9.1", 2, "tests/core")])
    assert once.startswith(f"# Versions\n{matrix.BEGIN}\n| torch | Python |")
    assert once.endswith(f"\n{matrix.END}rest\n")
    assert "old" not in once

    again = matrix.merge_rows(once, [row("2.9.1", 30)])
    lines = [line + "\n" for line in again.splitlines() if line.startswith("| 2")]
    assert lines == [row("2.9.1", 2, "tests/core"), row("2.9.1", 30), row("2.13.0", 10)]
    with pytest.raises(ValueError, match="must have the lines"):
        matrix.merge_rows("# Versions\n", [])


def test_the_page_has_rows_that_a_run_can_replace() -> None:
    page = (matrix.ROOT / "docs" / "compatibility.md").read_text()
    assert matrix.merge_rows(page, []) == page


def test_environments_are_found_by_their_mark(tmp_path: Path) -> None:
    for name in ("python-3.10-torch-2.6.0", "python-3.13-torch-2.15.0"):
        (tmp_path / name).mkdir()
    (tmp_path / "python-3.10-torch-2.6.0" / ".installed").touch()
    python = tmp_path / "python-3.10-torch-2.6.0" / "bin" / "python"
    assert matrix.find_installed(tmp_path) == {Pair("3.10", "2.6.0"): python}


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"python3\.999 is not installed"):
        matrix.find_python("3.999")


def report(**outcomes: str) -> str:
    kinds = {"passed": "", "failed": "<failure/>", "skipped": "<skipped/>"}
    cases = (f'<testcase classname="tests.m" name="{name}">{kinds[how]}</testcase>' for name, how in outcomes.items())
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_parts_are_added_up_and_a_test_that_was_run_again_counts_once() -> None:
    parts = [report(a="passed", b="failed", c="skipped"), report(b="passed", d="failed"), report()]
    assert matrix.add_up(parts) == Counts(2, ["tests.m::d"], 1, 1)
    assert matrix.add_up(parts[:1]) == Counts(1, ["tests.m::b"], 1, 1)
    interrupted = report(a="passed").replace("</testsuite>", '<testcase time="0.001" /></testsuite>')
    assert matrix.add_up([interrupted, report(e="passed")]) == Counts(2, [], 0, 0)


def test_reports_of_parts_are_of_one_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["--reports", str(tmp_path)])
    assert "must be of one --pair" in capsys.readouterr().err


def test_reports_of_parts_make_a_row_that_names_their_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "make_environment", lambda pair, root: Path("python"))
    monkeypatch.setattr(matrix, "find_installed", lambda root: {})
    monkeypatch.setattr(matrix, "read_across", lambda pythons, folder: {Pair("3.11", "2.13.0"): (6, 6)})
    (tmp_path / "1.xml").write_text(report(a="passed"))
    (tmp_path / "2.xml").write_text(report(b="passed", c="skipped"))
    table = tmp_path / "page.md"
    table.write_text(f"{matrix.BEGIN}{matrix.END}")
    arguments = ["--pair", "3.11:2.13.0", "--reports", str(tmp_path), "--table", str(table)]
    assert matrix.main([*arguments, "--", "tests/core", "-m", "not full"]) == 0
    assert "| 2.13.0 | 3.11 | `tests/core -m not full` | 2 | 0 | 1 | 6 of 6 |" in table.read_text()
