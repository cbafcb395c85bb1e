"""Turns of simulated threads: each runs on a greenlet, or on a thread where that library is missing.

One of them runs at a time. Histories are the same: a switch between greenlets is a call of a function, while one
between threads wakes another thread, and takes longer than the events between two switches.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

try:
    import greenlet
except ImportError:
    greenlet = None


class Runner(Protocol):
    """Greenlet or thread that runs a simulated thread."""

    def take_over(self, running: Any) -> None:
        """Continue this one in place of the running one; return when that one is continued."""

    def measure_work(self) -> float:
        """Return the processor seconds so far, for the running one."""

    def find_frame(self) -> FrameType | None:
        """Return the frame at which it is."""


class Turns(Protocol):
    """The runners of a history."""

    def start(self, name: str, run: Callable[[], None]) -> Runner:
        """Return a new runner, which calls a function when it takes over first."""

    def run_all(self, choose: Callable[[], Any]) -> None:
        """Run all to their end.

        Args:
            choose: Returns the runner to continue at the start, and when the running one has ended; None at the end.
        """


def make_turns(*, is_measured: bool = True) -> Turns:
    """Return turns of greenlets if they are installed, else those of threads.

    Args:
        is_measured: Whether the processor seconds of each runner are asked for: those of greenlets take time to count.
    """
    kind = ThreadTurns if greenlet is None else GreenletTurns
    return kind(is_measured=is_measured)


class ThreadTurns:
    """Turns of threads of the system.

    Args:
        is_measured: Ignored: the system counts the processor seconds of each thread.
    """

    def __init__(self, *, is_measured: bool = True) -> None:
        del is_measured
        self._end = threading.Lock()
        self._choose: Callable[[], Any] = lambda: None

    def start(self, name: str, run: Callable[[], None]) -> ThreadRunner:
        """Return a new runner, which calls a function when it takes over first."""

        def run_then_hand_over() -> None:
            run()
            self._hand_over()

        return ThreadRunner(name, run_then_hand_over)

    def run_all(self, choose: Callable[[], Any]) -> None:
        """Run all to their end."""
        self._choose = choose
        self._end.acquire()
        self._hand_over()
        self._end.acquire()

    def _hand_over(self) -> None:
        chosen = self._choose()
        if chosen is None:
            self._end.release()
        else:
            chosen.baton.release()


class ThreadRunner:
    """A thread of the system, which waits for its baton.

    Args:
        name: Name of the thread.
        run: Function to call.

    Attributes:
        baton: Lock that is released for the thread to run.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self._run = run
        self._thread = threading.Thread(target=self._wait_and_run, name=name, daemon=True)
        self._thread.start()

    def _wait_and_run(self) -> None:
        self.baton.acquire()
        self._run()

    def take_over(self, running: ThreadRunner) -> None:
        """Continue this one in place of the running one; return when that one is continued."""
        self.baton.release()
        running.baton.acquire()

    def measure_work(self) -> float:
        """Return the processor seconds so far, for the running one."""
        return time.thread_time()

    def find_frame(self) -> FrameType | None:
        """Return the frame at which it is."""
        return sys._current_frames().get(self._thread.ident or 0)


class GreenletTurns:
    """Turns of greenlets of the thread that makes them, and runs them to their end.

    Args:
        is_measured: As for `make_turns`.

    Attributes:
        is_measured: As given.
        counted_s: Processor seconds of the thread that greenlets have counted as theirs.
    """

    def __init__(self, *, is_measured: bool = True) -> None:
        self.is_measured = is_measured
        self._hub = greenlet.getcurrent()
        self._first: GreenletRunner | None = None
        self.counted_s = 0.0

    def start(self, name: str, run: Callable[[], None]) -> GreenletRunner:
        """Return a new runner, which calls a function when it takes over first."""
        del name
        return GreenletRunner(self, greenlet.greenlet(run, self._hub))

    def run_all(self, choose: Callable[[], Any]) -> None:
        """Run all to their end: one that has ended continues here."""
        has_grad = torch.is_grad_enabled()
        self.counted_s = time.thread_time()
        chosen = choose()
        while chosen is not None:
            self._first = None
            torch.set_grad_enabled(True)
            chosen.resume()
            chosen = self._first or choose()
        torch.set_grad_enabled(has_grad)

    def begin(self, runner: GreenletRunner) -> None:
        """Start a runner from the bottom of the stack: its depth counts from where it begins."""
        self._first = runner
        self._hub.switch()


class GreenletRunner:
    """A greenlet: it has its own context variables, and here its own answer to whether operations record gradients.

    Args:
        turns: Turns that it belongs to.
        own: The greenlet.

    Attributes:
        resume: Function that continues it.
        work_s: Processor seconds until it was measured last.
    """

    def __init__(self, turns: GreenletTurns, own: Any) -> None:
        self._turns, self._own = turns, own
        self.resume: Callable[[], object] = own.switch
        self.work_s = 0.0

    def take_over(self, running: GreenletRunner) -> None:
        """Continue this one in place of the running one; return when that one is continued."""
        if self._turns.is_measured:
            running.measure_work()
        has_grad = torch.is_grad_enabled()
        if not self._own:
            self._turns.begin(self)
        else:
            self.resume()
        if torch.is_grad_enabled() is not has_grad:
            torch.set_grad_enabled(has_grad)

    def measure_work(self) -> float:
        """Return the processor seconds so far, for the running one."""
        now = time.thread_time()
        self.work_s += now - self._turns.counted_s
        self._turns.counted_s = now
        return self.work_s

    def find_frame(self) -> FrameType | None:
        """Return the frame at which it is."""
        frame: FrameType | None = self._own.gr_frame
        return frame or sys._getframe()
