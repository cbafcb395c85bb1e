"""Simulated histories of a stream of weights: all claims hold under faults, and a seed gives the same events again."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation import StreamScenario, run_stream_history
from tests.simulation.faults import PlannedFault
from tests.simulation.scheduler import Scheduler
from tests.simulation.stream_history import STREAM_FAULTS

FEW = 200  # each mutant in `test_stream_mutants` is found within so many
MANY = 5_000
PART = 40


def failures(seeds: range) -> dict[int, str]:
    histories = ((seed, run_stream_history(seed)) for seed in seeds)
    return {seed: str(history.failure) for seed, history in histories if history.failure is not None}


@pytest.mark.parametrize("first", range(0, FEW, PART))
def test_all_claims_hold_in_every_history_of_a_stream(first: int) -> None:
    found = failures(range(first, first + PART))
    assert found == {}, "python -m tests.simulation --stream --seed N prints the events of one"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FEW, MANY, PART))
def test_all_claims_hold_in_many_histories_of_a_stream(first: int) -> None:
    assert failures(range(first, first + PART)) == {}


def test_a_seed_gives_the_same_history_of_a_stream() -> None:
    for seed in (2, 5, 11):
        assert run_stream_history(seed).events == run_stream_history(seed).events


def test_a_history_of_a_server_with_a_mirror_leaves_no_object_in_memory() -> None:
    def find_schedulers() -> set[int]:
        return {id(each) for each in gc.get_objects() if type(each) is Scheduler}

    before = find_schedulers()
    assert run_stream_history(1, StreamScenario("bucket", mirrors=(True,))).failure is None
    assert find_schedulers() <= before, "a campaign would need more and more memory"


@pytest.mark.parametrize("store", ["disk", "bucket"])
def test_without_faults_every_version_is_published_and_received(store: str) -> None:
    scenario = StreamScenario(store, worlds=(2, 3), versions=3, receivers=(2,), mirrors=(True,), stages=4)
    history = run_stream_history(1, scenario)
    assert history.failure is None, str(history.failure)
    verbs = Counter(event.verb for event in history.events)
    assert verbs["published"] >= 2 * 3 + 3 * 3
    assert verbs["activated"] >= 2 * 4
    assert verbs["failed"] <= 2, "a server may come before the publisher"


def test_a_server_waits_for_a_version_longer_than_its_workers_wait_for_each_other() -> None:
    """Rank 0 looks for a version; the others must not take it for lost meanwhile."""
    scenario = StreamScenario("disk", versions=1, receivers=(3,), stages=2, timeout_s=60.0)
    history = run_stream_history(1, scenario)
    assert history.failure is None, str(history.failure)
    assert history.events[-1].seconds > 60


def test_of_two_publishers_the_later_one_wins_and_the_other_is_told() -> None:
    told = 0
    for seed in range(6):
        history = run_stream_history(seed, StreamScenario("bucket", worlds=(1, 2), versions=4, has_zombies=True))
        assert history.failure is None, str(history.failure)
        told += any("PublisherReplacedError" in event.note for event in history.events)
    assert told >= 2


@pytest.mark.parametrize("retention", ["pruner", "compactor", "all"])
def test_versions_are_removed_while_they_are_published_and_received(retention) -> None:
    removed = 0
    for seed in range(3):
        scenario = StreamScenario("disk", worlds=(1, 2), versions=4, max_chain=1, receivers=(2,), stages=4)
        history = run_stream_history(seed, replace(scenario, retention=retention, passes=8))
        assert history.failure is None, str(history.failure)
        removed += sum(event.verb == "removed" and event.subject != "versions ()" for event in history.events)
    assert removed


@pytest.mark.parametrize("kind", STREAM_FAULTS, ids=lambda kind: kind.name)
def test_every_fault_of_a_stream_shows_and_does_no_harm(kind) -> None:
    """Each hits at several places; a fault that never shows would claim nothing."""
    fired = 0
    for seed in range(4):
        store = "bucket" if "commit" in kind.name and "put" in kind.verbs and seed % 2 else "disk"
        if kind.name in {"commit's answer lost", "commit refused"}:
            store = "bucket"
        fault = PlannedFault(10 + 150 * seed, kind, 100 + 150 * seed)
        scenario = StreamScenario(store, worlds=(2, 1), receivers=(2,), mirrors=(True,), starts=2, faults=(fault,))
        history = run_stream_history(seed, scenario)
        assert history.failure is None, f"seed {seed}: {history.failure}"
        fired += len(history.fired)
    assert fired
