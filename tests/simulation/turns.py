"""Turns of simulated threads: each is a greenlet in the thread that runs the history, and one runs at a time.

A switch between greenlets is a function call. A switch between system threads wakes another thread, which takes longer
than the events between two switches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import greenlet
import torch


class Turns:
    """Takes turns between greenlets in the current thread, and runs them to their end."""

    def __init__(self, *, is_measured: bool = True) -> None:
        self.is_measured = is_measured  # asking for processor seconds takes time
        self._hub = greenlet.getcurrent()
        self._first: Runner | None = None
        self.counted_s = 0.0  # processor seconds of the thread that greenlets counted as theirs

    def start(self, run: Callable[[], None]) -> Runner:
        """Return a new runner, which calls a function at its first turn."""
        return Runner(self, greenlet.greenlet(run, self._hub))

    def run_all(self, choose: Callable[[], Runner | None]) -> None:
        """Run all to their end: an ended one continues here."""
        has_grad = torch.is_grad_enabled()
        self.counted_s = time.thread_time()
        chosen = choose()
        while chosen is not None:
            self._first = None
            torch.set_grad_enabled(True)
            chosen.resume()
            chosen = self._first or choose()
        torch.set_grad_enabled(has_grad)

    def enter(self, runner: Runner) -> None:
        """Start a runner from the bottom of the stack: its depth counts from here."""
        self._first = runner
        self._hub.switch()


class Runner:
    """A greenlet with its own context variables and its own gradient mode."""

    def __init__(self, turns: Turns, own: Any) -> None:
        self._turns, self._own = turns, own
        self.resume: Callable[[], object] = own.switch  # continues it
        self.work_s = 0.0  # processor seconds up to the last measurement

    def take_over(self, running: Runner) -> None:
        """Continue this one instead of the running one; return when the latter continues."""
        if self._turns.is_measured:
            running.measure_work()
        has_grad = torch.is_grad_enabled()
        if not self._own:
            self._turns.enter(self)
        else:
            self.resume()
        if torch.is_grad_enabled() is not has_grad:
            torch.set_grad_enabled(has_grad)

    def measure_work(self) -> float:
        """Measure the running one's processor seconds so far."""
        now = time.thread_time()
        self.work_s += now - self._turns.counted_s
        self._turns.counted_s = now
        return self.work_s

    def find_frame(self) -> FrameType | None:
        """Return its current frame."""
        frame: FrameType | None = self._own.gr_frame
        return frame or sys._getframe()
