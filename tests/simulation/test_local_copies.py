"""Simulated histories of jobs that capture onto the disk of their node too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation import Scenario, SimulatedHistory, run_history
from tests.simulation.faults import EVERYTHING, FaultKind, PlannedFault

IN_BOTH = Scenario("bucket", worlds=(2, 2), saves=1, memory_bytes=1 << 30, local_every=1, root_every=4)


def test_a_capture_in_memory_is_copied_to_the_disk_and_both_are_claimed() -> None:
    history = run_history(1, IN_BOTH)
    assert history.failure is None
    claims = [event.subject for event in history.events if event.verb == "claims"]
    assert claims[0] == "step 1 in memory (process), local (process)"


@pytest.mark.parametrize("kind", ["memory emptied", "power loss"])
def test_a_step_on_the_disk_survives_the_loss_of_memory(kind: str) -> None:
    saved = [event.number for event in run_history(1, IN_BOTH).events if event.verb == "saved"][1]
    fault = PlannedFault(saved + 1, FaultKind(kind, EVERYTHING))
    history = run_history(1, replace(IN_BOTH, faults=(fault,)))
    assert history.failure is None
    assert history.fired == [fault]
    restored = [event.subject for event in history.events if event.verb == "restored"]
    assert "step 1" in restored[2:4]


ON_TWO = Scenario(
    "bucket",
    worlds=(2, 2),
    saves=2,
    nodes=(0, 1),
    places=((0, 1), (0, 1)),
    memory_bytes=1 << 30,
    local_every=1,
    root_every=9,
)


def subjects(history: SimulatedHistory, verb: str, of: str) -> list[str]:
    return [event.subject for event in history.events if event.verb == verb and event.who.startswith(of)]


def test_a_step_stays_on_all_disks_until_every_node_has_copied_the_next_one() -> None:
    """A node loses its power before it copies step 2, of which it alone had a part in memory."""
    loss = PlannedFault(0, FaultKind("node power loss", frozenset({"mkdir"}), within="step-00000002"))
    history = run_history(1, replace(ON_TWO, faults=(loss,)))
    assert history.failure is None
    assert history.fired == [loss]
    assert subjects(history, "restored", "job1") == ["step 1"] * 2


def test_a_step_leaves_the_disks_once_every_node_has_copied_the_next_one() -> None:
    history = run_history(1, replace(ON_TWO, saves=4))
    assert history.failure is None
    removed = subjects(history, "rmdir", "job0")
    assert sorted(each for each in removed if each.startswith("/local/")) == [
        f"/local/run/step-0000000{at}" for at in (1, 1, 2, 2)
    ]


def test_copies_on_disks_of_two_nodes_survive_the_loss_of_one() -> None:
    copied = replace(ON_TWO, copies=1, saves=1, worlds=(2, 2, 2), places=((0, 1), (0, 1), (0, 1)))
    quiet = run_history(1, copied)
    assert subjects(quiet, "claims", "job0") == ["step 1 in memory (node), local (node)"] * 2
    saved = [event.number for event in quiet.events if event.verb == "saved"][1]
    kinds = [FaultKind(kind, EVERYTHING) for kind in (*["memory emptied"] * 3, "node loss")]
    faults = tuple(PlannedFault(saved + at, kind) for at, kind in enumerate(kinds, 1))
    history = run_history(1, replace(copied, faults=faults))
    assert history.failure is None
    assert len(history.fired) == 4
    assert subjects(history, "restored", "job2") == ["step 1"] * 2


def test_a_power_loss_of_all_nodes_leaves_the_old_promotion_or_the_new_one() -> None:
    """Step 1 is saved again: at the fault one disk has the marks of the new save, and the other those of the old."""
    scenario = replace(ON_TWO, saves=1, overwrite_every=1)
    events = run_history(1, scenario).events
    marks = [e.number for e in events if e.verb == "rename" and e.subject.endswith("/local/run/step-00000001/COMMIT")]
    assert len(marks) == 4, "each of two nodes, twice"
    for at in range(marks[2] + 1, marks[3] + 30, 5):
        loss = PlannedFault(at, FaultKind("power loss", EVERYTHING))
        history = run_history(1, replace(scenario, faults=(loss,)))
        assert history.failure is None
        assert history.fired == [loss]
        assert subjects(history, "restored", "job1") == ["step 1"] * 2


def test_the_files_of_an_overwritten_promotion_go_once_every_node_has_the_new_one() -> None:
    history = run_history(1, replace(ON_TWO, saves=2, overwrite_every=1, worlds=(2,), places=((0, 1),)))
    assert history.failure is None
    removed = [
        e for e in history.events if e.verb == "unlink" and e.subject.endswith((".safetensors", "manifest.json"))
    ]
    of_first = [e.number for e in removed if "/local/run/step-00000001/" in e.subject and e.who.startswith("job0")]
    saved = [e.number for e in history.events if e.verb == "saved"]
    assert len(of_first) == 8, "of two saves on two nodes, each payload and manifest"
    assert saved[3] < of_first[0] < saved[5], "by the save after both promotions"


def test_a_restored_capture_is_claimed_apart_from_an_earlier_damaged_attempt() -> None:
    assert run_history(1_176_826).failure is None
