"""Simulated histories: all invariants hold under faults, and a seed gives the same events again."""

from __future__ import annotations

import builtins
import gc
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shardckpt.checkpoint.save.staging import BufferPool
from shardckpt.storage.retry import RequestWatch
from tests.simulation import Scenario, run_history
from tests.simulation.faults import EVERYTHING, FaultKind, PlannedFault
from tests.simulation.scheduler import Scheduler
from tests.simulation.seams import Machine

ROOT = Path(__file__).resolve().parents[2]
FEW = 2_000  # each mutant in `test_mutants` is found within so many
MANY = 100_000
PART = 100  # so many take the time of other tests: workers share them


def failures(seeds: range) -> dict[int, str]:
    histories = ((seed, run_history(seed)) for seed in seeds)
    return {seed: str(history.failure) for seed, history in histories if history.failure is not None}


@pytest.mark.parametrize("first", range(0, FEW, PART))
def test_all_invariants_hold_in_every_history(first: int) -> None:
    assert failures(range(first, first + PART)) == {}, "python -m tests.simulation --seed N prints the events of one"


def test_a_capture_that_is_overwritten_while_it_is_promoted_is_no_failed_promotion() -> None:
    seed = 502_374
    history = run_history(seed, replace(Scenario.from_seed(seed), faults=()))
    assert history.fired == []
    assert history.failure is None


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_all_invariants_hold_in_many_histories() -> None:
    """They run in processes of their own; the output has a line for each that fails."""
    command = [sys.executable, "-m", "tests.simulation", "--jobs", str(os.cpu_count()), "--from", str(FEW)]
    command += ["--count", str(MANY - FEW)]
    campaign = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"{MANY - FEW} histories" in campaign.stdout, campaign.stderr
    assert campaign.returncode == 0, campaign.stdout


def test_a_seed_gives_the_same_history_in_every_process() -> None:
    seeds = range(6)
    command = [sys.executable, "-m", "tests.simulation", "--seed", *map(str, seeds)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}  # another than that of this process
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown == "".join(f"{run_history(seed)}\n" for seed in seeds)


@pytest.mark.parametrize("store", ["disk", "bucket"])
def test_a_history_without_faults_has_no_errors(store: str) -> None:
    history = run_history(1, Scenario(store, worlds=(2, 1), saves=2, readers=1, prunes=1))
    assert history.failure is None
    verbs = [event.verb for event in history.events]
    assert "failed" not in verbs
    of_jobs = [event for event in history.events if event.verb == "saved" and event.who.startswith("job")]
    assert len(of_jobs) == 2 * 2 + 1 * 2, "each rank reports each save"
    assert len(of_jobs) < verbs.count("saved"), "after the last fault, a new job saves too"


def test_a_history_has_no_watch_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch belongs to the process: a history would depend on those before it."""
    watched: list[str] = []
    monkeypatch.setattr(RequestWatch, "waiting", lambda _, where: nullcontext(watched.append(where)))
    assert run_history(1, Scenario("bucket", worlds=(2,), saves=2)).failure is None
    assert watched == []


def test_a_history_opens_no_file_of_the_machine_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and its mounts would be part of the history."""
    scenario = Scenario("disk", worlds=(2,), saves=2, memory_bytes=1 << 30)
    assert run_history(1, scenario).failure is None
    opened: list[object] = []
    open_file = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda path, *args, **named: opened.append(path) or open_file(path, *args, **named)
    )
    assert run_history(2, scenario).failure is None
    assert opened == []


def test_a_power_failure_spares_a_step_in_a_folder_that_the_record_of_a_restore_made() -> None:
    """The first step is in memory alone: its restore is the first write into the root."""
    scenario = Scenario("disk", worlds=(1, 1, 1), saves=1, memory_bytes=1 << 30)
    events = run_history(1, scenario).events
    at = next(event.number for event in events if (event.verb, event.subject) == ("saved", "step 2"))
    loss = PlannedFault(at + 1, FaultKind("power loss", EVERYTHING))
    history = run_history(1, replace(scenario, faults=(loss,)))
    assert [*history.fired] == [loss]
    assert history.failure is None


def test_a_history_is_printed_with_one_line_an_event() -> None:
    history = run_history(1, Scenario("disk", worlds=(1,), saves=1))
    lines = str(history).splitlines()
    assert len(lines) == len(history.events) + 2
    assert lines[0].startswith("seed 1: Scenario(store='disk'")
    assert lines[-1] == "all invariants hold"


def count_histories() -> int:
    """Return the number of parts of histories in memory."""
    return sum(type(each) in (Machine, Scheduler) for each in gc.get_objects())


def test_a_history_that_has_ended_is_out_of_memory_without_a_look_at_all_objects() -> None:
    gc.collect()
    gc.disable()
    try:
        assert count_histories() == 0
        for seed in range(6):
            run_history(seed)
            assert count_histories() == 0, seed
    finally:
        gc.enable()


def test_histories_that_have_ended_keep_no_memory() -> None:
    """A worker that runs thousands of them has to fork later."""

    def count_kept() -> int:
        gc.collect()
        return count_histories()

    run_history(0)
    kept = count_kept()
    histories = [run_history(seed) for seed in range(1, 11)]
    assert any(history.fired for history in histories)
    assert count_kept() == kept, "the last history may stay"


def test_histories_take_few_addresses_for_staging_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    add = BufferPool._added
    monkeypatch.setattr(BufferPool, "_added", lambda self: made.append(len((block := add(self)).view)) or block)
    for seed in range(20):
        run_history(seed)
    assert made, "no history has staged a state"
    assert sum(made) < 20 << 20, "at most 1 MiB a history"
