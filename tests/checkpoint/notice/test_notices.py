"""What a process knows of its end: signals, graces and functions that give a deadline."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardckpt.checkpoint.notice import notices as module
from shardckpt.checkpoint.notice.notices import Clocks, Notices, RankNotice, find_staying
from shardckpt.errors import UsageError
from shardckpt.storage.orphans import find_machine_id
from tests.kit.runs.tier_runs import wait_for


def on_this_machine(has_notice: bool, left_s: float | None, notices: int) -> RankNotice:
    return RankNotice(has_notice, left_s, notices, find_machine_id())


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.now, lambda: self.now + 1e9)

    def at(self, seconds: float) -> float:
        """Return the time in some seconds, since the epoch."""
        return self.now + 1e9 + seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


class TestAGrace:
    def test_it_counts_from_the_first_signal(self, clock):
        notices = Notices(30, clock.clocks)
        assert notices.describe() == on_this_machine(False, None, 0)
        notices.note_signal()
        clock.now += 10
        notices.note_signal()
        assert notices.describe() == on_this_machine(True, 20.0, 2)

    def test_it_counts_from_the_arrival_of_a_signal_not_from_its_handler(self, clock):
        notices = Notices(30.0, clock.clocks)
        notices.note_arrival()
        clock.now += 12
        assert notices.find_left_s() == 18.0
        assert not notices.has_notice, "the handler has not run"
        notices.note_signal()
        clock.now += 20
        assert notices.describe() == on_this_machine(True, -2.0, 1)

    @pytest.mark.parametrize("grace", [0, -1, -0.5, math.nan, math.inf, True, "30", [30]], ids=repr)
    def test_what_is_no_grace_is_refused(self, grace):
        with pytest.raises(
            UsageError, match=r"`deadline` must be a positive number of seconds, or a function.*found.*deadline=30"
        ):
            Notices(grace)


class TestAFunction:
    def test_it_gives_a_notice_without_a_signal(self, clock):
        answers = iter([None, clock.at(40), clock.at(60), clock.at(25)])
        notices = Notices(lambda: next(answers), clock.clocks)
        seen = []
        for _ in range(4):
            notices.ask()
            seen.append(notices.describe())
        assert seen == [
            on_this_machine(False, None, 0),
            on_this_machine(True, 40.0, 1),
            on_this_machine(True, 40.0, 1),
            on_this_machine(True, 25.0, 1),
        ], "the earliest deadline counts"

    def test_a_signal_without_an_answer_has_no_known_deadline(self, clock):
        notices = Notices(lambda: None, clock.clocks)
        notices.note_signal()
        notices.ask()
        assert notices.describe() == on_this_machine(True, None, 1)

    def test_a_deadline_in_the_past_is_a_notice_and_one_warning(self, clock):
        notices = Notices(lambda: clock.at(-30), clock.clocks)
        with pytest.warns(UserWarning, match="a time that passed 30 s ago; a step is saved all the same"):
            notices.ask()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            notices.ask()
        assert notices.describe() == on_this_machine(True, -30.0, 1)

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (math.nan, "or None without a notice; found nan"),
            (-math.inf, "found -inf"),
            (False, "found False"),
            ("soon", "found 'soon'"),
            (1.79e12, "seconds, not milliseconds.*Divide them by 1000"),
        ],
        ids=repr,
    )
    def test_an_answer_that_is_no_time_is_one_warning_and_no_notice(self, value, text, clock):
        notices = Notices(lambda: value, clock.clocks)
        with pytest.warns(UserWarning, match=text) as given:
            notices.ask()
            notices.ask()
        assert len(given) == 1 and notices.describe() == on_this_machine(False, None, 0)

    def test_infinity_is_a_notice_without_a_known_deadline_until_one_is_given(self, clock):
        answers = iter([math.inf, math.inf, clock.at(20)])
        notices = Notices(lambda: next(answers), clock.clocks)
        seen = []
        for _ in range(3):
            notices.ask()
            seen.append(notices.describe())
        assert seen == [on_this_machine(True, None, 1), on_this_machine(True, None, 1), on_this_machine(True, 20.0, 1)]

    def test_it_is_asked_outside_the_main_thread_too_without_a_signal(self, clock):
        before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}

        def wait_in_thread() -> tuple[RankNotice, object]:
            notices = Notices(lambda: clock.at(30), clock.clocks)
            with notices.watch((signal.SIGUSR1,)):
                wait_for(lambda: notices.has_notice)
                return notices.describe(), signal.getsignal(signal.SIGUSR1)

        with ThreadPoolExecutor(1) as pool:
            notice, handler = pool.submit(wait_in_thread).result(30)
        assert notice == on_this_machine(True, 30.0, 1) and handler is before[signal.SIGUSR1]

    def test_seconds_need_the_main_thread_because_they_count_from_a_signal(self):
        def watch() -> None:
            with Notices(30).watch((signal.SIGUSR1,)):
                pass

        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="expected the main thread"):
            pool.submit(watch).result(30)

    def test_one_that_raises_is_one_warning_and_a_signal_still_counts(self, clock):
        def fail() -> float:
            raise ConnectionError("no metadata")

        notices = Notices(fail, clock.clocks)
        with pytest.warns(UserWarning, match="`deadline` failed, so that the time left is unknown: no metadata"):
            notices.ask()
        notices.note_signal()
        assert notices.describe() == on_this_machine(True, None, 1)

    def test_a_save_waits_for_its_answer_to_a_signal_but_not_for_long(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_ASK_S", 0.05)
        hold, asked = threading.Event(), []

        def ask() -> None:
            asked.append(1)
            hold.wait(20)

        notices = Notices(ask)
        with notices.watch((signal.SIGUSR1,)):
            wait_for(lambda: asked)
            signal.raise_signal(signal.SIGUSR1)
            assert notices.describe() == on_this_machine(True, None, 1), "the function hangs"
            hold.set()


class TestTheWatcher:
    def test_a_signal_is_seen_while_the_main_thread_is_in_c_code(self):
        notices, (readable, writable) = Notices(30), os.pipe()
        handled: list[bool] = []

        def release() -> None:
            if notices.find_left_s() is not None and not handled:
                handled.append(notices.has_notice)
                os.write(writable, b"x")

        notices.on_tick = release
        with notices.watch((signal.SIGUSR1,)):
            signal.siginterrupt(signal.SIGUSR1, False)  # as in a collective: C code that goes on after a signal
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            ctypes.CDLL(None).read(readable, ctypes.create_string_buffer(1), ctypes.c_size_t(1))
        assert handled == [False] and notices.count == 1, "the handler runs only once the call ends"
        os.close(readable)
        os.close(writable)

    def test_without_a_deadline_no_thread_and_no_socket_exist(self):
        before = threading.active_count()
        with Notices().watch((signal.SIGUSR1,)):
            assert threading.active_count() == before
            assert signal.set_wakeup_fd(-1) == -1

    def test_the_block_ends_its_thread_and_gives_the_wakeup_socket_back(self):
        own, other = socket.socketpair()
        other.setblocking(False)
        before = signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
        try:
            with Notices(30).watch((signal.SIGUSR1,)):
                signal.raise_signal(signal.SIGUSR1)
                own.settimeout(20)
                assert own.recv(1) == bytes([signal.SIGUSR1]), "it is passed on, as to an event loop of asyncio"
            assert signal.set_wakeup_fd(-1) == other.fileno()
        finally:
            signal.set_wakeup_fd(before)
            own.close()
            other.close()
        wait_for(lambda: all(thread.name != "shardckpt-notice" for thread in threading.enumerate()))

    def test_a_signal_to_a_fork_is_no_notice_of_its_parent(self):
        notices = Notices(30)
        with notices.watch((signal.SIGUSR1,)):
            if not (child := os.fork()):
                signal.signal(signal.SIGUSR1, lambda *_: None)
                signal.raise_signal(signal.SIGUSR1)
                os._exit(signal.set_wakeup_fd(-1) != -1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            time.sleep(0.05)  # for the watcher, if it had been woken
            assert notices.find_left_s() is None

    def test_it_runs_on_after_the_block_until_the_last_report(self):
        ticks: list[int] = []
        notices = Notices(30)
        notices.on_tick = lambda: 0.01 if len(ticks) < 4 and not ticks.append(1) else None
        with notices.watch((signal.SIGUSR1,)):
            pass
        wait_for(lambda: len(ticks) == 4)
        wait_for(lambda: all(thread.name != "shardckpt-notice" for thread in threading.enumerate()))

    def test_blocks_may_be_nested(self):
        outer, inner = Notices(30), Notices(20)
        with outer.watch((signal.SIGUSR1,)), inner.watch((signal.SIGUSR2,)):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            assert outer.has_notice and inner.has_notice
            wait_for(lambda: outer.find_left_s() is not None)
        assert signal.set_wakeup_fd(-1) == -1


def test_ranks_know_together_the_earliest_deadline():
    given = [
        RankNotice(False, None, 0),
        RankNotice(True, 30.0, 1),
        RankNotice(True, 12.0, 2),
        RankNotice(True, None, 1),
    ]
    assert RankNotice.merge(given) == RankNotice(True, 12.0, 2)
    assert RankNotice.merge(given[:1]) == RankNotice(False, None, 0)


def test_ranks_on_a_machine_with_a_notice_leave_together():
    def on(*machines: str) -> list[RankNotice]:
        return [RankNotice(each.isupper(), None, 0, each.lower()) for each in machines]

    assert find_staying(on("a", "A", "b", "b")) == (2, 3)
    assert find_staying(on("A", "b", "C")) == (1,)
    assert find_staying(on("a", "b")) == find_staying(on("A", "B")) == find_staying(on("a", "A")) == ()
