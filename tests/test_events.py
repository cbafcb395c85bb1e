"""Events reach those who subscribed, and the log; one that cannot take them harms nothing."""

from __future__ import annotations

import json
import logging
import random

import pytest

from shardckpt import events
from shardckpt.errors import UsageError
from shardckpt.events import (
    OperationEvent,
    PruneEvent,
    SaveEvent,
    emit,
    record_operation,
    recorder,
    run_events,
    subscribe,
)
from shardckpt.storage.retry import retry


def test_all_who_subscribed_get_an_event_until_they_end_it() -> None:
    first, second = [], []
    ends = [subscribe(first.append), subscribe(second.append)]
    emit(OperationEvent("a"))
    ends[0]()
    emit(OperationEvent("b"))
    ends[1]()
    ends[1]()
    emit(OperationEvent("c"))
    assert [event.path for event in first] == ["a"]
    assert [event.path for event in second] == ["a", "b"]


def test_only_functions_are_accepted() -> None:
    for wrong in (None, 5):
        with pytest.raises(UsageError, match="`on_event` must be a function that takes an OperationEvent"):
            subscribe(wrong)


def test_a_sink_that_fails_is_logged_and_the_next_gets_the_event(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: OperationEvent) -> None:
        raise KeyError(event.path)

    seen: list[OperationEvent] = []
    emit(SaveEvent("runs/a"), broken, seen.append)
    assert len(seen) == 1
    assert "on_event failed at the save of runs/a" in caplog.text


def test_rank_0_logs_one_line_of_level_info_or_of_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardckpt")
    phases = {"capture": 0.5, "write": 1.5}
    emit(SaveEvent("runs/a/step-7", 2.0, nbytes=4 * 10**9, phases=phases, retries=3, warnings=("slow",)))
    emit(SaveEvent("runs/a/step-7", 2.0, rank=1))
    emit(PruneEvent("runs/a", 0.25, removed=(1, 2), error=OSError("gone")))
    emit(PruneEvent("runs/a", 0.25, error=KeyboardInterrupt()))
    assert [record.message for record in caplog.records] == [
        "save runs/a/step-7: 2.00 s, 4.000 GB on this rank, 2.00 GB/s (capture 0.50 s, write 1.50 s), 3 retries; "
        "warning: slow",
        "prune runs/a: 0.25 s, removed 1, 2; failed: OSError: gone",
        "prune runs/a: 0.25 s; failed: KeyboardInterrupt",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR", "ERROR"]


def test_an_event_has_the_step_the_phases_the_retries_and_the_error() -> None:
    answers = iter([ConnectionError("reset"), ConnectionError("reset")])

    def request() -> str:
        for error in answers:
            raise error
        return "done"

    seen: list[OperationEvent] = []
    with (
        pytest.raises(ValueError, match="odd"),
        record_operation(SaveEvent, "s3://b/run/step-00000012", seen.append) as it,
    ):
        with it.phase("write"):
            assert retry(request, "cannot read", "b", pause=lambda _: None) == "done"
        raise ValueError("odd")
    (event,) = seen
    assert (event.step, event.store, event.retries, list(event.phases)) == (12, "s3", 2, ["write"])
    assert isinstance(event.error, ValueError)
    assert OperationEvent("runs/step-5/model").step is None


def test_a_retry_draws_no_random_number_of_the_training() -> None:
    answers = iter([ConnectionError("reset")])

    def request() -> None:
        for error in answers:
            raise error

    before = random.getstate()
    retry(request, "cannot read", "b", pause=lambda _: None)
    assert random.getstate() == before


def test_an_event_is_json() -> None:
    made = SaveEvent("runs/a", 2.0, nbytes=10**9, phases={"write": 1.0}, error=OSError("full")).as_dict()
    assert json.loads(json.dumps(made)) == {
        **{"operation": "save", "store": "file", "gb_per_second": 0.5, "path": "runs/a", "seconds": 2.0, "step": None},
        **{"rank": 0, "nbytes": 10**9, "phases": {"write": 1.0}, "retries": 0, "warnings": []},
        **{"error": "OSError: full", "is_background": False, "has_left": False},
    }


def test_all_kinds_of_events_are_public() -> None:
    kinds = {name for module in (recorder, run_events) for name in vars(module) if name.endswith("Event")}
    assert kinds == {name for name in events.__all__ if name.endswith("Event")}
