"""Simulated histories of trainings that do what only some do: fail after a restore, overwrite, do not wait."""

from __future__ import annotations

import pytest

from tests.simulation import Scenario, SimulatedHistory, run_history


def subjects(history: SimulatedHistory, verb: str, of: str) -> list[str]:
    return [event.subject for event in history.events if event.verb == verb and event.who.startswith(of)]


@pytest.mark.parametrize("most", [1, 2])
def test_a_step_after_which_the_run_fails_is_passed_over_and_saved_again(most: int) -> None:
    worlds = (2, 1, 2, 1)[: most + 2]
    history = run_history(1, Scenario("disk", worlds=worlds, saves=2, most_failed=most, bad_step=2))
    assert history.failure is None
    for start in range(1, most + 1):
        assert {*subjects(history, "restored", f"job{start}")} == {"step 2"}
        assert subjects(history, "saved", f"job{start}") == []
    assert {*subjects(history, "restored", f"job{most + 1}")} == {"step 1"}
    assert {*subjects(history, "saved", f"job{most + 1}")} == {"step 2", "step 3"}


@pytest.mark.parametrize("store", ["disk", "bucket", "plain"])
def test_a_step_is_saved_and_overwritten_on_every_store(store: str) -> None:
    history = run_history(1, Scenario(store, worlds=(2,), saves=2, overwrite_every=2))
    assert history.failure is None
    assert subjects(history, "saved", "job0.0") == ["step 1", "step 2", "step 2"]


def test_captures_that_nobody_waits_for_are_all_promoted() -> None:
    scenario = Scenario(
        "bucket", worlds=(1, 1), saves=3, memory_bytes=1 << 30, local_every=1, root_every=4, has_waits=False
    )
    history = run_history(1, scenario)
    assert history.failure is None
    assert subjects(history, "claims", "job0") == ["step 3 in memory (process), local (process)"]
    assert subjects(history, "restored", "job1") == ["step 3"]


def test_two_jobs_with_tiers_beside_each_other_leave_a_run_that_goes_on() -> None:
    for seed in range(4):
        scenario = Scenario("bucket", worlds=(2, 1), saves=2, memory_bytes=1 << 30, has_zombies=True)
        assert run_history(seed, scenario).failure is None
