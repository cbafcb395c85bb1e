"""Simulated histories of jobs that capture onto the disk of their node too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardckpt.testing.simulation import Scenario, run_history
from shardckpt.testing.simulation.faults import EVERYTHING, FaultKind, PlannedFault

IN_BOTH = Scenario("bucket", worlds=(2, 2), saves=1, memory_bytes=1 << 30, local_every=1, root_every=4)


def test_a_capture_in_memory_is_copied_to_the_disk_and_both_are_claimed() -> None:
    history = run_history(1, IN_BOTH)
    assert history.failure is None
    claims = [event.subject for event in history.events if event.verb == "claims"]
    assert claims[0] == "step 1 in memory (process), local (process)"


@pytest.mark.parametrize("kind", ["holder killed", "power loss"])
def test_a_step_on_the_disk_survives_the_loss_of_memory(kind: str) -> None:
    saved = [event.number for event in run_history(1, IN_BOTH).events if event.verb == "saved"][1]
    fault = PlannedFault(saved + 1, FaultKind(kind, EVERYTHING))
    history = run_history(1, replace(IN_BOTH, faults=(fault,)))
    assert history.failure is None
    assert history.fired == [fault]
    restored = [event.subject for event in history.events if event.verb == "restored"]
    assert "step 1" in restored[2:4]
