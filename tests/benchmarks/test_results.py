"""A benchmark's goals come below its section, and the newest of each opens RESULTS.md."""

from __future__ import annotations

import importlib
import math

import pytest

from tests.benchmarks.benchmark_scripts import FOLDER, imported


@pytest.fixture
def results(monkeypatch, tmp_path):
    with imported("results") as module:
        monkeypatch.setattr(module, "RESULTS", tmp_path / "RESULTS.md")
        yield module


def record(results, title, *goals):
    report = results.Lines()
    report.say("One line.")
    for area, what, measured in goals:
        report.goal(area, what, measured, 1.3, "x cp")
    results.record(title, report.lines, report.goals)
    return report


def rows(text):
    return [[cell.strip() for cell in line.split("|")[1:6]] for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_summary_shows_a_figure_beside_its_goal_by_area(results):
    record(results, "Loads", ("loads", "4 GB", 1.25), ("loads", "2 to 4", 1.31))
    record(results, "Copies", ("consolidate", "4 GB", 0.5))
    found = rows(results.summarize(results.RESULTS.read_text(encoding="utf-8")))
    assert found[0] == ["consolidate", "4 GB", "0.500 x cp", "1.3", "met"]
    assert ["loads", "4 GB", "1.250 x cp", "1.3", "met"] in found
    assert ["loads", "2 to 4", "1.310 x cp", "1.3", "MISSED"] in found


def test_a_figure_without_a_goal_replaces_the_row_that_had_one(results):
    record(results, "Old", ("consolidate", "1 GB", 2.0))
    report = results.Lines()
    report.goal("consolidate", "1 GB", 1.9, math.inf, "x cp")
    results.record("New", [], report.goals)
    found = rows(results.summarize(results.RESULTS.read_text(encoding="utf-8")))
    assert found[0] == ["consolidate", "1 GB", "1.900 x cp", "", "no goal"]
    assert report.failed == []


def test_an_area_without_a_figure_is_not_measured(results):
    record(results, "Copies", ("consolidate", "4 GB", 0.5))
    found = rows(results.summarize(results.RESULTS.read_text(encoding="utf-8")))
    assert [row[0] for row in found] == list(results.AREAS)
    assert {row[1] for row in found[1:]} == {"not measured"}


def test_the_figure_recorded_last_replaces_one_of_another_section(results):
    record(results, "First", ("loads", "4 GB", 1.5), ("loads", "2 to 4", 1.0))
    record(results, "Second", ("loads", "4 GB", 1.2))
    assert [
        row[2] for row in rows(results.summarize(results.RESULTS.read_text(encoding="utf-8"))) if row[0] == "loads"
    ] == [
        "1.000 x cp",
        "1.200 x cp",
    ]


def test_an_older_figure_replaces_no_newer_one_of_another_section(results):
    row = "| loads | 4 GB | {} x cp | 1.3 | met | {} | here |"
    sections = [("Whole", "1.100", "2026-11-23"), ("Whole: part", "1.500", "2026-11-22")]
    text = "# Results\n" + "".join(
        f"\n## {title}\n\n{results.GOALS}\n{row.format(figure, date)}\n" for title, figure, date in sections
    )
    assert [row[2] for row in rows(results.summarize(text)) if row[0] == "loads"] == ["1.100 x cp"]


def test_goals_of_one_row_beside_two_peers_are_both_shown(results):
    peers = ("1.67 x raw", "0.85 x peer")
    goals = "".join(f"| loads | 2 to 4 | {measured} | 1.0 | MISSED | 2026-11-23 | here |\n" for measured in peers)
    text = f"# Results\n\n## Loads\n\n### Goals\n{goals}"
    assert [row[2] for row in rows(results.summarize(text)) if row[0] == "loads"] == ["1.67 x raw", "0.85 x peer"]


def test_a_section_recorded_again_loses_its_old_goals(results):
    record(results, "First", ("loads", "4 GB", 1.5), ("loads", "2 to 4", 1.0))
    record(results, "First", ("loads", "4 GB", 1.2))
    text = results.RESULTS.read_text(encoding="utf-8")
    assert text.count("## First") == 1
    assert "2 to 4" not in text


def test_a_part_of_the_cases_has_a_section_of_its_own(results):
    every = ("steps", "memory", "units")
    assert results.section_title("Engine", ["units", "memory", "steps"], every) == "Engine"
    assert results.section_title("Engine", ["memory"], every) == "Engine: memory"
    record(results, results.section_title("Engine", every, every), ("loads", "4 GB", 1.5), ("loads", "2 to 4", 1.0))
    record(results, results.section_title("Engine", ["memory"], every), ("loads", "4 GB", 1.2))
    text = results.RESULTS.read_text(encoding="utf-8")
    assert [row[2] for row in rows(results.summarize(text)) if row[0] == "loads"] == ["1.000 x cp", "1.200 x cp"]


def test_a_recorded_section_is_below_the_summary(results):
    record(results, "First", ("loads", "4 GB", 1.5))
    record(results, "Without goals")
    text = results.RESULTS.read_text(encoding="utf-8")
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [results.TITLE, "## First", "## Without goals"]
    assert results.with_summary(text) == text


def test_a_missed_goal_fails_the_benchmark(results):
    assert record(results, "First", ("loads", "4 GB", 1.5), ("loads", "2 to 4", 1.0)).failed == [
        "4 GB: 1.50 x cp; the limit is 1.3"
    ]


def test_a_goal_of_an_unknown_area_is_refused(results):
    with pytest.raises(SystemExit, match=r"one of consolidate, .* got 'speed'"):
        results.Lines().goal("speed", "4 GB", 1.0, 1.3, "x cp")


def test_the_summary_is_printed_and_drawn_anew(results, capsys):
    record(results, "First", ("loads", "4 GB", 1.5))
    edited = results.RESULTS.read_text(encoding="utf-8").replace("| 1.500 x cp |", "| 1.400 x cp |", 1)
    results.RESULTS.write_text(edited, encoding="utf-8")
    importlib.import_module("summary").main()
    assert "| 1.500 x cp |" in capsys.readouterr().out
    assert results.RESULTS.read_text(encoding="utf-8").count("| 1.500 x cp |") == 2


def test_the_results_of_the_project_open_with_their_summary(results):
    text = (FOLDER / "RESULTS.md").read_text(encoding="utf-8")
    assert results.with_summary(text) == text, "run `python benchmarks/summary.py`"
