"""A thread that runs is never taken for ended, also after a signal interrupted a wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shardckpt.checkpoint.background_thread import BackgroundThread
from tests.kit.damage.interruptions import interrupted_by


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    opened = threading.Event()
    yield opened
    opened.set()


@pytest.mark.parametrize("timeout", [None, 60])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the step took too long")])
def test_a_wait_that_a_signal_ends_raises_and_the_next_one_waits(
    gate: threading.Event, error: BaseException, timeout: float | None
) -> None:
    thread = BackgroundThread(gate.wait, "test")
    thread.start()

    with interrupted_by(error), pytest.raises(type(error)):
        thread.join(timeout)

    assert thread.is_running
    assert not thread.join(0.01)
    gate.set()
    assert thread.join()
    assert not thread.is_running


def test_a_thread_that_was_not_started_has_nothing_to_wait_for() -> None:
    thread = BackgroundThread(lambda: None, "test")

    assert thread.join()
    assert not thread.is_running


def test_a_thread_does_not_wait_for_itself() -> None:
    ended = []
    thread = BackgroundThread(lambda: ended.append(thread.join()), "test")
    thread.start()

    assert thread.join()
    assert ended == [False]
