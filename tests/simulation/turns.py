"""Turns of simulated threads: each is a greenlet of the thread that runs the history, and one runs at a time.

A switch between greenlets is a call of a function. A switch between threads of the system wakes another thread, which
takes longer than the events between two switches.
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
    """Turns of greenlets of the thread that makes them, and runs them to their end."""

    def __init__(self, *, is_measured: bool = True) -> None:
        self.is_measured = is_measured  # asking for processor seconds takes time
        self._hub = greenlet.getcurrent()
        self._first: Runner | None = None
        self.counted_s = 0.0  # processor seconds of the thread that greenlets counted as theirs

    def start(self, run: Callable[[], None]) -> Runner:
        """Return a new runner, which calls a function when it takes over first."""
        return Runner(self, greenlet.greenlet(run, self._hub))

    def run_all(self, choose: Callable[[], Runner | None]) -> None:
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

    def begin(self, runner: Runner) -> None:
        """Start a runner from the bottom of the stack: its depth counts from where it begins."""
        self._first = runner
        self._hub.switch()


class Runner:
    """A greenlet: it has its own context variables, and here its own answer to whether operations record gradients."""

    def __init__(self, turns: Turns, own: Any) -> None:
        self._turns, self._own = turns, own
        self.resume: Callable[[], object] = own.switch  # continues it
        self.work_s = 0.0  # processor seconds up to the last measurement

    def take_over(self, running: Runner) -> None:
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
