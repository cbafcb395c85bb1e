"""Simulated histories of jobs whose ranks are on several nodes, with copies in each other's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation import Scenario, run_history
from tests.simulation.faults import EVERYTHING, FaultKind, PlannedFault

ON_TWO = Scenario(
    "bucket", worlds=(2, 2, 2), saves=1, nodes=(0, 1), places=((0, 1), (0, 1), (0, 1)), copies=1, root_every=4
)
LOSS = FaultKind("node loss", EVERYTHING)


def subjects(history, verb: str, *, of: str = "") -> list[str]:
    return [event.subject for event in history.events if event.verb == verb and event.who.startswith(of)]


def lose_node_after(scenario: Scenario, step: int, seed: int = 1) -> Scenario:
    """Return a scenario in which a node is lost after a step was saved by all ranks."""
    events = run_history(seed, scenario).events
    at = [event.number for event in events if (event.verb, event.subject) == ("saved", f"step {step}")][-1]
    return replace(scenario, faults=(PlannedFault(at + 1, LOSS),))


def test_ranks_on_other_nodes_restore_what_is_in_memory() -> None:
    places = ((0, 1, 2), (0, 2), (1, 1, 2))
    history = run_history(
        1,
        Scenario("bucket", worlds=(3, 2, 3), memory_bytes=1 << 30, nodes=(0, 1, 2), places=places, copies=1),
    )
    assert history.failure is None
    assert subjects(history, "failed") == []
    assert subjects(history, "restored", of="job1") == ["step 2"] * 2
    assert subjects(history, "restored", of="job2") == ["step 4"] * 3
    assert subjects(history, "claims", of="job0")[0] == "step 1 in memory (node)"


@pytest.mark.parametrize(("machines", "survives"), [((0, 1), "node"), ((0, 0), "process")])
def test_nodes_of_one_machine_count_as_one(machines: tuple[int, int], survives: str) -> None:
    history = run_history(1, replace(ON_TWO, memory_bytes=1 << 30, nodes=machines))
    assert subjects(history, "claims", of="job0")[0] == f"step 1 in memory ({survives})"


def test_a_copied_capture_survives_the_loss_of_a_node() -> None:
    history = run_history(1, lose_node_after(replace(ON_TWO, memory_bytes=1 << 30), 1))
    assert history.failure is None
    assert subjects(history, "restored", of="job2") == ["step 1"] * 2


def test_a_copied_capture_stays_until_a_later_start_has_copied_another() -> None:
    """The memory has no space for the copies of the second start."""
    history = run_history(1, lose_node_after(replace(ON_TWO, memory_bytes=15_500), 2))
    assert subjects(history, "claims", of="job0") == ["step 1 in memory (node)"] * 2
    assert subjects(history, "claims", of="job1") == ["step 2 in memory (process)"] * 2
    assert history.failure is None
    assert subjects(history, "restored", of="final") == ["step 1"] * 2


def test_captures_of_a_job_without_some_nodes_are_newer_than_those_it_could_not_read() -> None:
    """The third start has a part of step 2: it begins anew, and captures another step 1."""
    places = ((0, 1), (0, 1), (0,), (0, 1))
    history = run_history(1, replace(ON_TWO, memory_bytes=1 << 30, copies=0, worlds=(2, 2, 1, 2), places=places))
    assert history.failure is None
    assert subjects(history, "restored", of="job2") == ["step None"]
    assert subjects(history, "restored", of="job3") == ["step 1"] * 2


def test_captures_of_a_start_on_other_nodes_are_newer() -> None:
    """The third start has no part of what the second one captured, and begins anew; the fourth one can read both."""
    places = ((0,), (0,), (1,), (0, 1))
    history = run_history(1, replace(ON_TWO, worlds=(1, 1, 1, 2), places=places, copies=0, memory_bytes=1 << 30))
    assert subjects(history, "claims", of="job1") == ["step 2 in memory (process)"]
    assert subjects(history, "claims", of="job2") == ["step 1 in memory (process)"]
    assert subjects(history, "restored", of="job3") == ["step 1"] * 2
    assert history.failure is None


@pytest.mark.parametrize("tier", [{"memory_bytes": 1 << 30}, {"local_every": 1}], ids=["memory", "local"])
def test_a_claimed_capture_may_go_for_one_on_more_nodes(tier: dict[str, int]) -> None:
    """The second start captures on both nodes; the third one has a part of that, and nothing before it."""
    places = ((0,), (0, 1), (0,))
    history = run_history(1, replace(ON_TWO, worlds=(1, 2, 1), places=places, copies=0, **tier))
    assert [*{*subjects(history, "claims", of="job1")}] == [
        f"step 2 in {'local' if 'local_every' in tier else 'memory'} (process)"
    ]
    assert history.failure is None
    assert subjects(history, "restored", of="job2") == ["step None"]


def test_a_claimed_capture_of_one_node_may_go_for_later_ones_on_three() -> None:
    assert run_history(508_181).failure is None


def test_captures_after_a_part_of_the_nodes_are_newer_though_a_clock_is_late() -> None:
    """The second start has a part of step 1, and captures another one; its clock is behind that of the first start."""
    places = ((0, 1), (1,), (0, 1))
    scenario = replace(ON_TWO, memory_bytes=1 << 30, copies=0, worlds=(2, 1, 2), places=places)
    for seed in range(6):  # forward and back
        events = run_history(seed, scenario).events
        began = next(event.number for event in events if event.subject == "step 1 as attempt 2001")
        jump = PlannedFault(began + 1, FaultKind("clock jump", EVERYTHING))
        history = run_history(seed, replace(scenario, faults=(jump,)))
        assert history.failure is None
        assert history.fired == [jump]
        assert subjects(history, "restored", of="job2") == ["step 1"] * 2


def find_second_mark(scenario: Scenario) -> int:
    """Return the number of the event at which rank 0 writes `COMMIT` of a capture that replaces one."""
    renames = [each for each in run_history(1, scenario).events if each.verb == "rename"]
    marks = [each for each in renames if each.subject.endswith("/step-00000001/COMMIT") and each.who[:6] == "job0.0"]
    return marks[1].number


def test_a_capture_stays_until_all_nodes_have_the_one_that_overwrites_it() -> None:
    """The first node has its marks of the new capture; the other one never gets them."""
    scenario = replace(ON_TWO, memory_bytes=1 << 30, worlds=(2, 2), places=((0, 1), (0, 1)), overwrite_every=1)
    lost = PlannedFault(
        find_second_mark(scenario), FaultKind("marks lost", frozenset({"send"}), "lost", within="0 -> 1")
    )
    history = run_history(1, replace(scenario, faults=(lost,)))
    assert history.failure is None
    assert history.fired == [lost]
    assert subjects(history, "restored", of="job1") == ["step 1"] * 2


def test_a_job_killed_while_it_overwrites_a_capture_leaves_the_old_or_the_new_one() -> None:
    """The files of a capture without copies are on one node each."""
    places = ((0, 1), (0, 1))
    scenario = replace(ON_TWO, memory_bytes=1 << 30, copies=0, worlds=(2, 2), places=places, overwrite_every=1)
    events = run_history(1, scenario).events
    ranks = [each.number for each in events[find_second_mark(scenario) :] if each.who.startswith("job0")]
    for at in ranks[:40:2]:
        killed = PlannedFault(at, FaultKind("kill", EVERYTHING))
        history = run_history(1, replace(scenario, faults=(killed,)))
        assert history.failure is None
        assert history.fired == [killed]
        assert subjects(history, "restored", of="job1") == ["step 1"] * 2
    assert run_history(720_037).failure is None


def test_a_capture_saved_again_survives_no_loss_of_a_node_between_marks_and_copies() -> None:
    """Before and after that, the earlier save or the later one survives."""
    places = ((0, 1), (0, 1))
    scenario = replace(ON_TWO, memory_bytes=1 << 30, worlds=(2, 2), places=places, overwrite_every=1)
    events = run_history(1, scenario).events
    marked = find_second_mark(scenario)
    copied = [event.number for event in events if event.verb == "claims"][2]
    found: dict[int, str] = {}
    for at in (marked - 10, *range(marked, copied - 1, 6), copied - 1):
        loss = PlannedFault(at, LOSS)
        history = run_history(1, replace(scenario, faults=(loss,)))
        assert history.failure is None
        assert history.fired == [loss]
        (found[at],) = {*subjects(history, "restored", of="job1")}
    assert (found[marked - 10], found[copied - 1]) == ("step 1", "step 1")
    assert "step None" in found.values(), "neither save is on the other node"
    assert run_history(1_032_462).failure is None


def test_a_capture_of_which_a_part_is_lost_before_it_is_copied_replaces_none() -> None:
    places = ((0, 1, 2), (0, 1, 2))
    scenario = replace(ON_TWO, memory_bytes=1 << 30, worlds=(3, 3), saves=2, nodes=(0, 0, 1), places=places)
    events = run_history(1, scenario).events
    began = next(event.number for event in events if event.subject == "step 2 as attempt 1002")
    written = [e.number for e in events if e.verb == "rename" and e.subject.endswith("step-00000002/COMMIT")][-1]
    assert written > began
    for seed in range(1, 4):
        kill = PlannedFault(written + 1, FaultKind("memory emptied", frozenset({"list"}), within="step-00000002"))
        history = run_history(seed, replace(scenario, faults=(kill,)))
        assert history.failure is None
        assert subjects(history, "restored", of="job1") == ["step 1"] * 3


def test_a_restore_that_loses_a_rank_while_it_reads_memory_fails() -> None:
    """It must not begin anew, as if there were no captures."""
    scenario = replace(ON_TWO, memory_bytes=1 << 30, worlds=(1, 2), places=((1,), (0, 1)))
    saved = next(event.number for event in run_history(1, scenario).events if event.verb == "saved")
    lost = FaultKind("data lost", frozenset({"send"}), "lost", within="data")
    history = run_history(1, replace(scenario, faults=(PlannedFault(saved + 1, lost),)))
    assert history.failure is None
    assert subjects(history, "restored", of="job1") == []
    assert subjects(history, "restored", of="final") == ["step 1"] * 2


def test_a_bit_that_flips_in_one_of_two_copies_is_no_loss() -> None:
    quiet = replace(ON_TWO, memory_bytes=1 << 30, worlds=(2, 2), places=((0, 1), (0, 1)))
    wanted = {"safetensors", "manifest", "COMMIT"}
    for seed in range(40):
        saved = [event.number for event in run_history(seed, quiet).events if event.verb == "saved"][1]
        flip = PlannedFault(saved + 1, FaultKind("flip in memory", EVERYTHING))
        history = run_history(seed, replace(quiet, faults=(flip,)))
        assert history.failure is None
        assert subjects(history, "restored", of="job1") == ["step 1"] * 2
        (damaged,) = subjects(history, "flip")
        wanted -= {kind for kind in wanted if kind in damaged}
        if not wanted:
            return
    pytest.fail(f"no bit of {wanted} was flipped")
