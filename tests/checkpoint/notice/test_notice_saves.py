"""The save that a notice asks for: where it goes, when it is over, what is reported."""

from __future__ import annotations

import json
import logging

import pytest

from shardckpt.checkpoint.notice.notice_saves import NoticeSaves, NoticeShare
from shardckpt.checkpoint.notice.notices import Clocks, Notices, RankNotice
from shardckpt.errors import StorageError
from shardckpt.events import FallbackEvent, PromotionEvent, ReplicateEvent, SaveEvent

PLACES = ("memory", "local", "root")
FULL = StorageError("full")


class Run:
    """A run's saves, in time that the test moves."""

    def __init__(self, grace: float | None = 30.0, root: str = "s3://bucket/run") -> None:
        self.now, self.events = 0.0, []
        clocks = Clocks(lambda: self.now, lambda: self.now)
        self.notices = Notices(grace, clocks)
        self.saves = NoticeSaves(root, PLACES, self.notices, self.events.append, clocks)

    def end(self, place: str, step: int = 1, seconds: float = 1.0, error: Exception | None = None, **values) -> None:
        """A save has ended in a place."""
        kind = PromotionEvent if place == "local" else SaveEvent
        tier = {"tier": "local"} if place == "local" else {}
        event = kind(f"x/step-{step:08d}", seconds, step, nbytes=100, error=error, **tier, **values)
        self.saves.listen(place, None)(event)

    def measure(self, **seconds: float) -> None:
        for place, each in seconds.items():
            self.end(place, seconds=each)

    def plan(self, left_s: float | None, step: int = 9, names=PLACES, share: NoticeShare | None = None):
        return self.saves.plan(step, RankNotice(True, left_s, 1), names, share)


def test_the_farthest_place_that_past_saves_fit_is_chosen():
    run = Run()
    run.measure(memory=1, local=4, root=20)
    assert [run.plan(left).chosen for left in (31, 29, 8, 7, 1, 0)] == [
        "root", "local", "local", "memory", "memory", "memory"
    ]  # fmt: skip
    assert run.plan(1).fits is False


def test_a_save_in_the_root_that_runs_leaves_no_time_for_the_next_one():
    run = Run()
    run.measure(memory=1, root=20)
    run.saves.note_root_start()
    run.now = 10
    assert run.plan(49, names=("memory", "root")).chosen == "memory", "20 s of the first, 30 of the second"
    assert run.plan(50, names=("memory", "root")).chosen == "root"
    run.end("root", 5, 20.0)
    assert run.plan(30, names=("memory", "root")).chosen == "root"


def test_waiting_for_the_save_before_does_not_count_as_the_time_of_a_place():
    run = Run()
    run.saves.listen("root", None)(SaveEvent("x/step-00000001", 100.0, 1, phases={"waiting": 90.0}))
    assert run.plan(15.0, names=("root",)).fits


def test_a_failed_save_measures_nothing():
    run = Run()
    run.end("root", error=FULL)
    assert run.plan(1.0, names=("root",)).fits is False


class TestTheReport:
    def test_it_comes_once_when_all_chosen_places_have_ended(self, caplog):
        caplog.set_level(logging.INFO, "shardckpt")
        run = Run()
        run.measure(memory=1, root=2)
        run.plan(10, names=("memory", "root"))
        run.now = 1
        run.end("memory", 9)
        run.end("memory", 8)
        assert not run.events
        run.now = 3
        run.end("root", 9)
        run.end("root", 9)
        (event,) = run.events
        assert (event.step, event.seconds, event.grace_s, event.chosen) == (9, 3, 10, "root")
        assert event.committed == ("memory", "root") and event.error is None and event.warnings == ()
        assert event.survives == ("process", "node", "2 nodes", "leaving nodes")
        assert (event.notices, event.saves_begun, event.saves_committed) == (1, 1, 1)
        assert event.expected_s == {"memory": 1.5, "root": 3.0}
        lines = [record.message for record in caplog.records if record.message.startswith("preemption")]
        assert lines == [
            "preemption s3://bucket/run: 3.00 s, 7.0 s left, step 9 is in memory and root, survives losing process, "
            "node, 2 nodes, leaving nodes (notices: 1, saves begun: 1, committed: 1)"
        ]

    def test_it_comes_before_the_deadline_with_what_is_committed_by_then(self):
        run = Run()
        run.measure(memory=1, root=2)
        run.plan(10, names=("memory", "root"))
        run.end("memory", 9)
        run.now = 8.9
        assert 0 < run.saves.tick() < 0.11 and not run.events
        run.now = 9.0
        assert run.saves.tick() is None
        (event,) = run.events
        assert event.committed == ("memory",) and event.warnings == ("not in root: it did not end in time",)
        run.end("root", 9)
        assert run.saves.tick() is None and len(run.events) == 1

    def test_without_a_commit_it_is_an_error_that_says_why(self, caplog):
        run = Run()
        run.plan(10, names=("root",))
        run.end("root", 9, error=FULL)
        (event,) = run.events
        assert event.committed == () and event.survives == ()
        assert "no save was committed after the notice" in str(event.error) and "not in root: full" in str(event.error)
        assert (event.saves_begun, event.saves_committed) == (1, 0)
        assert [record.levelname for record in caplog.records] == ["ERROR"]

    def test_a_failed_capture_fails_its_copies_and_the_root_goes_on(self):
        run = Run()
        run.measure(memory=1, local=1)
        run.plan(60)
        run.end("memory", 9, error=FULL)
        assert not run.events
        run.end("root", 9)
        (event,) = run.events
        assert event.committed == ("root",)

    def test_a_capture_that_is_not_copied_to_the_folder_stays_in_memory(self):
        run = Run()
        run.measure(memory=1, local=1, root=99)
        assert run.plan(10).names == ("memory", "local")
        run.end("memory", 9)
        run.saves.listen("local", None)(FallbackEvent("x/step-00000009", step=9, warnings=("newer steps wait",)))
        (event,) = run.events
        assert event.committed == ("memory",) and event.warnings == ("not in local: newer steps wait",)
        assert event.survives == ("process",)

    @pytest.mark.parametrize(
        ("share", "warnings", "survives"),
        [
            (NoticeShare(1, has_leaving=True), (), ("process", "leaving nodes")),
            (NoticeShare(2, has_leaving=True), (), ("process", "node", "leaving nodes")),
            (NoticeShare(2), (), ("process", "node")),
            (NoticeShare(2, has_leaving=True), ("rank 1: full",), ("process",)),
        ],
    )
    def test_copies_of_a_capture_count_if_none_failed(self, share, warnings, survives):
        run = Run()
        run.measure(memory=1, root=99)
        run.plan(3, names=("memory", "root"), share=share)
        run.saves.listen("memory", None)(ReplicateEvent("x/step-00000009", step=9, warnings=warnings))
        run.end("memory", 9)
        assert run.events[0].survives == survives

    def test_a_step_that_was_captured_before_the_notice_was_known_counts(self):
        run = Run()
        run.measure(root=99)
        run.end("memory", 9)
        assert not run.saves.is_planned(9)
        run.saves.plan(9, RankNotice(True, 10.0, 1), ("memory", "root"), has_started=True)
        assert run.saves.is_planned(9)
        run.end("root", 9)
        (event,) = run.events
        assert (event.chosen, event.committed) == ("memory", ("memory", "root"))
        assert not run.saves.is_planned(9)

    def test_a_base_that_was_removed_leads_to_a_full_save_not_to_a_failure(self):
        run = Run()
        run.plan(60, names=("root",))
        run.saves.listen("root", None)(FallbackEvent("x/step-00000009", step=9, warnings=("the base was removed",)))
        assert not run.events
        run.end("root", 9)
        assert run.events[0].committed == ("root",)

    def test_a_second_attempt_reports_the_first_one(self):
        run = Run()
        run.plan(60, 8, ("root",))
        run.plan(50, 9, ("root",))
        run.end("root", 9)
        first, second = run.events
        assert first.error is not None and second.committed == ("root",)
        assert (second.saves_begun, second.saves_committed) == (2, 1)

    def test_nothing_that_fits_is_a_warning(self):
        run = Run()
        run.measure(root=20)
        run.plan(5, names=("root",))
        run.end("root", 9)
        assert run.events[0].warnings == ("no place was expected to fit into the time left",)

    def test_without_a_measured_save_nothing_was_expected(self):
        run = Run()
        run.plan(5, names=("root",))
        run.end("root", 9)
        assert run.events[0].warnings == ()


class TestAStepThatDoesNotEnd:
    def test_it_is_reported_once_and_the_last_step_is_named(self):
        run = Run()
        run.measure(memory=4)
        run.end("memory", 7, 4.0)
        run.notices.note_signal()
        run.saves.tick()
        run.now = 23.9
        assert 0 < run.saves.tick() < 0.11
        assert not run.events
        run.now = 24.1
        run.saves.tick()
        run.saves.tick()
        (event,) = run.events
        assert "the running step did not end in time" in str(event.error) and "step 7 in memory" in str(event.error)
        assert (event.step, event.notices, event.saves_begun) == (None, 1, 0)

    def test_it_is_saved_all_the_same_if_it_ends_later(self):
        run = Run()
        run.notices.note_signal()
        run.saves.tick()
        run.now = 29.0
        run.saves.tick()
        run.plan(0.5, names=("root",))
        run.end("root", 9)
        assert [event.committed for event in run.events] == [(), ("root",)]

    def test_ranks_that_have_agreed_wait_for_the_save(self):
        run = Run()
        run.notices.note_signal()
        run.saves.tick()
        run.saves.is_agreed = True
        run.now = 29.0
        assert run.saves.tick() is None
        assert not run.events


def test_without_a_deadline_the_events_go_where_they_went():
    saves, seen = NoticeSaves(), []
    assert saves.listen("root", None) is None
    assert saves.listen("root", seen.append) == seen.append


class TestAReportByAnotherRank:
    def test_it_has_what_rank_0_chose_and_rank_0_reports_nothing(self):
        first, other = Run(), Run()
        first.measure(memory=1, root=20)
        chosen = first.plan(31)
        sent = json.loads(json.dumps(first.saves.hand_over()))
        assert first.saves.is_planned(9) and first.saves.hand_over() is None
        other.saves.take_over(sent)
        for run in (first, other):
            run.end("memory", 9)
            run.end("root", 9)
        assert first.events == [] and (first.saves.begun, other.saves.begun) == (0, 1)
        (event,) = other.events
        assert (event.chosen, event.committed, event.grace_s) == (chosen.chosen, ("memory", "root"), 31)
        assert event.expected_s == {"memory": 1.5, "root": 30.0}

    def test_a_step_that_was_captured_before_counts(self):
        first, other = Run(), Run()
        other.end("memory", 9)
        first.saves.plan(9, RankNotice(True, 60.0, 1), ["memory", "root"], has_started=True)
        other.saves.take_over(json.loads(json.dumps(first.saves.hand_over())))
        other.end("root", 9)
        assert other.events[0].committed == ("memory", "root")

    def test_the_next_plan_is_reported_by_rank_0_again(self):
        run = Run()
        run.plan(60)
        run.saves.hand_over()
        run.plan(60, step=10, names=("root",))
        run.end("root", 10)
        assert [event.step for event in run.events] == [10] and not run.saves.is_planned(9)


def test_a_rank_that_left_does_not_count_the_save_as_committed_or_measured():
    run = Run()
    run.plan(60, names=("root",))
    run.end("root", 9, has_left=True)
    assert run.events == [] and not run.saves._past["root"]
