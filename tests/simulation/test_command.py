"""`python -m tests.simulation` runs campaigns of histories."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import Scenario, SimulatedHistory
from tests.simulation import __main__ as command
from tests.simulation.scheduler import HistoryError, HistoryEvent

ROOT = Path(__file__).resolve().parents[2]
SUMS = re.compile(r"(\d+) histories, (\d+) events, (\d+) faults, (\d+) failed, \d+ s, \d+ s of processors")


def run_some_failing(seed: int) -> SimulatedHistory:
    event = HistoryEvent(0, 0.0, "a", "save", "step 1")
    failure = HistoryError("deadlock:\n    a waits") if seed in (3, 28) else None
    return SimulatedHistory(seed, Scenario("disk"), [event] * seed, [], failure)


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
    assert tuple(map(int, counted.groups())) == (28, sum(range(2, 30)), 0, 2)


def test_a_campaign_that_is_interrupted_says_where_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_until_interrupt(seed: int) -> SimulatedHistory:
        if seed == 30:
            raise KeyboardInterrupt
        return SimulatedHistory(seed, Scenario("disk"))

    monkeypatch.setattr(command, "run_history", run_until_interrupt)
    assert command.main(["--from", "2", "--count", "100"]) == 1
    sums, advice = capfd.readouterr().out.splitlines()
    assert sums.startswith("25 histories, ")
    assert advice == "interrupted: go on with --from 27 --count 75"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_campaign_that_is_terminated_prints_what_it_has_done(jobs: str) -> None:
    """Its output is a file, and its workers are terminated too, as by the end of a shell job."""
    code = (
        "import os, signal, sys, time\n"
        "from tests.simulation import __main__ as command\n"
        "from tests.simulation import Scenario, SimulatedHistory\n"
        "def run(seed):\n"
        "    if seed == 51:\n"
        "        time.sleep(0.5)\n"  # parts before this one are reported
        "        os.killpg(0, signal.SIGTERM)\n"
        "        time.sleep(60)\n"
        "    return SimulatedHistory(seed, Scenario('disk'))\n"
        "command.run_history = run\n"
        f"sys.exit(command.main(['--from', '1', '--count', '75', '--jobs', '{jobs}']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True, start_new_session=True
    )
    assert ended.returncode == 1, ended.stderr
    sums, advice = ended.stdout.splitlines()
    assert sums.startswith("50 histories, ")
    assert advice == "interrupted: go on with --from 51 --count 25"


def test_a_campaign_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "run_history", lambda seed: SimulatedHistory(seed, Scenario("disk")))
    command.main(["--from", "7", "--count", "2100", "--jobs", "2"])
    told = capfd.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in told] == ["1000 histories", "2000 histories"]
    assert {line.rpartition(", ")[2] for line in told} == {"of 2100 histories"}
