"""`python -m tests.simulation` runs campaigns of histories."""

from __future__ import annotations

import re

import pytest

from shardckpt.testing.simulation import SimulatedHistory, run_history
from shardckpt.testing.simulation.scheduler import HistoryError
from tests.simulation import __main__ as command

SUMS = re.compile(r"(\d+) histories, (\d+) events, (\d+) faults, (\d+) failed, \d+ s, \d+ s of processors")


def run_some_failing(seed: int) -> SimulatedHistory:
    history = run_history(seed)
    history.failure = HistoryError("deadlock:\n    a waits") if seed in (3, 28) else None
    return history


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_campaign_prints_a_line_for_each_failure_and_the_sums(
    jobs: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_history", run_some_failing)
    status = command.main(["--from", "2", "--count", "28", "--jobs", jobs])
    *failed, sums = capfd.readouterr().out.splitlines()
    assert status == 1
    assert sorted(failed) == [f"seed {seed}: HistoryError: deadlock: a waits" for seed in (28, 3)]
    counted = SUMS.fullmatch(sums)
    assert counted is not None
    histories = [run_history(seed) for seed in range(2, 30)]
    expected = (28, sum(len(each.events) for each in histories), sum(len(each.fired) for each in histories), 2)
    assert tuple(map(int, counted.groups())) == expected


def test_a_campaign_that_is_interrupted_says_where_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_until_interrupt(seed: int) -> SimulatedHistory:
        if seed == 30:
            raise KeyboardInterrupt
        return SimulatedHistory(seed, run_history(0).scenario)

    monkeypatch.setattr(command, "run_history", run_until_interrupt)
    assert command.main(["--from", "2", "--count", "100"]) == 1
    sums, advice = capfd.readouterr().out.splitlines()
    assert sums.startswith("25 histories, ")
    assert advice == "interrupted: go on with --from 27 --count 75"
