"""The engine's benchmark still runs, its engines train the same model, and it fails where it has to."""

from __future__ import annotations

import sys

import pytest

from tests.benchmarks.benchmark_scripts import run_script, script_fixture

step = script_fixture("engine_step")


@pytest.mark.slow
def test_a_small_run_prints_a_row_for_every_engine():
    small = ["--layers", "1", "--hidden", "32", "--tokens", "8", "--rounds", "1"]
    done = run_script("engine_step", *small, "--rows", "composable", "--parts", "steps,memory")
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    engines = ["shardckpt fully_shard", "torch FSDP2", "DDP"]
    assert [rows.count(name) for name in engines] == [2] * len(engines)


@pytest.mark.parametrize("arguments", [("--rows", "no-such-row"), ("--parts", "no-such-part")])
def test_what_cannot_be_run_is_refused(step, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["engine_step.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        step.main()
    assert caught.value.code == 2


@pytest.mark.parametrize(("seconds", "failures"), [(1.0, 0), (1.04, 0), (1.06, 1)])
def test_a_step_may_not_take_longer_than_torchs(step, seconds, failures):
    report, (ours, theirs) = step.Report(), step.ROWS["flat"]
    found = {ours.name: [step.Step(seconds, 1.0)] * 3}
    found |= {each.name: [step.Step(1.0, 1.0)] * 3 for each in (theirs, step.DDP)}
    report.steps([ours, theirs, step.DDP], found)
    assert len(report.failed) == failures


@pytest.mark.parametrize(("peak", "failures"), [(99, 0), (100, 0), (101, 1)])
def test_a_step_may_not_need_more_memory_than_torchs(step, peak, failures):
    report, (ours, theirs) = step.Report(), step.ROWS["flat"]
    report.memory([ours, theirs], {ours.name: (peak, 1), theirs.name: (100, 1)})
    assert len(report.failed) == failures


def test_ratios_are_medians_of_the_rounds_own(step):
    assert step.median_ratio([1.0, 9.0, 3.0], [1.0, 9.0, 2.0]) == 1.0
