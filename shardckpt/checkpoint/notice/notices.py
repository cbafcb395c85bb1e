"""`Notices`: what this process knows of its end, and how much time is left."""

from __future__ import annotations

import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import NamedTuple, TypeAlias

from shardckpt.checkpoint.background_thread import BackgroundThread
from shardckpt.checkpoint.notice.watch_signals import wake_on_signals, watch_signals
from shardckpt.errors import UsageError, describe
from shardckpt.events.warn_user import warn_user
from shardckpt.storage.orphans import find_machine_id

Deadline: TypeAlias = float | Callable[[], float | None]
"""A grace in seconds, or a function: it returns the time of the end in seconds since the epoch, `math.inf` if a notice
does not say it, or None without a notice."""

MAX_ASK_S = 1.0  # maximum seconds for which a save waits for the answer to a signal
_EVERY_S = 1.0  # seconds between two questions
_MAX_TIME = 1e11  # later times are in milliseconds


class Clocks(NamedTuple):
    """Functions that return the time."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


class RankNotice(NamedTuple):
    """A rank's notice, as the rank sends it to rank 0."""

    has_notice: bool
    left_s: float | None  # None if it is unknown
    notices: int
    machine: str = ""  # with a deadline, the id of the rank's machine

    @classmethod
    def merge(cls, notices: list[RankNotice]) -> RankNotice:
        """Return what the ranks know together: the earliest deadline, the most notices."""
        known = [notice.left_s for notice in notices if notice.left_s is not None]
        is_given, count = any(notice.has_notice for notice in notices), max(notice.notices for notice in notices)
        return cls(is_given, min(known, default=None), count)


def find_staying(notices: Sequence[RankNotice]) -> tuple[int, ...]:
    """Return the ranks on machines without a notice; empty if all or none of them stay."""
    leaving = {notice.machine for notice in notices if notice.has_notice}
    staying = tuple(rank for rank, notice in enumerate(notices) if notice.machine not in leaving)
    return staying if len(staying) < len(notices) else ()


def require_deadline(deadline: object) -> None:
    """Require a deadline to be a grace or a function. Raises UsageError."""
    if deadline is None or callable(deadline):
        return
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 < deadline < math.inf:
        raise UsageError(
            "`deadline` must be a positive number of seconds, or a function that returns the time of the end",
            found=repr(deadline),
            fix="Pass deadline=30 for a scheduler that kills 30 s after its signal.",
        )


def require_time(value: object) -> float | None:
    """Return the time that a function gave, in seconds since the epoch; None without a notice. Raises UsageError."""
    if value is None or value == math.inf:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(
            "the function `deadline` must return seconds since the epoch, or None without a notice", found=repr(value)
        )
    if value > _MAX_TIME:
        raise UsageError(
            "the function `deadline` must return seconds, not milliseconds",
            found=repr(value),
            fix="Divide them by 1000.",
        )
    return float(value)


class Notices:
    """Notices of this process.

    Attributes:
        has_notice: Whether a signal came, or the function gave a deadline.
        has_deadline: Whether a `deadline` was given.
        count: How many signals and deadlines came.
        on_tick: Called about once a second while a block runs, and after the block until it returns None; returns after
            how many seconds it has to be called again.
    """

    def __init__(self, deadline: Deadline | None = None, clocks: Clocks | None = None) -> None:
        require_deadline(deadline)
        self._ask = deadline if callable(deadline) else None
        self._grace = None if deadline is None or callable(deadline) else float(deadline)
        self._clocks = clocks or Clocks()
        self.has_deadline, self.has_notice, self.count = deadline is not None, False, 0
        self._arrived_at: float | None = None  # of the first signal
        self._answer_at: float | None = None  # the earliest deadline that the function gave; infinite if unknown
        self._answered, self._is_answering = threading.Event(), False
        self._has_warned = False
        self.on_tick: Callable[[], float | None] = lambda: None

    def note_signal(self) -> None:
        """Record a signal."""
        self.note_arrival()
        self.has_notice, self.count = True, self.count + 1

    def note_arrival(self) -> None:
        """Record when the first signal came: its handler may run much later."""
        if self._arrived_at is None:
            self._arrived_at = self._clocks.monotonic()

    def ask(self) -> None:
        """Ask the function for the deadline; a failure is one warning."""
        if self._ask is None:
            return
        was_signalled = self._arrived_at is not None
        try:
            found = require_time(self._ask())
            if found is not None:
                self._note_deadline(found - self._clocks.wall())
        except Exception as error:  # noqa: BLE001  (training must not fail)
            self._warn(f"`deadline` failed, so that the time left is unknown: {describe(error)}")
        if was_signalled:
            self._answered.set()

    def _note_deadline(self, left_s: float) -> None:
        at = self._clocks.monotonic() + left_s
        if self._answer_at is None:
            self.count += 1
            if left_s <= 0:
                self._warn(f"`deadline` gave a time that passed {-left_s:.0f} s ago; a step is saved all the same")
        self._answer_at = at if self._answer_at is None else min(at, self._answer_at)
        self.has_notice = True

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(text)

    def find_left_s(self) -> float | None:
        """Return the seconds that are left, negative after the deadline; None if they are unknown."""
        if not (self.has_notice or self._arrived_at is not None):
            return None
        at = self._answer_at
        if self._grace is not None and self._arrived_at is not None:
            at = self._arrived_at + self._grace
        return None if at in (None, math.inf) else at - self._clocks.monotonic()

    def describe(self) -> RankNotice:
        """Return this rank's notice; wait shortly for the function's answer to a signal."""
        if self._is_answering and self._answer_at is None and self._arrived_at is not None:
            self._answered.wait(MAX_ASK_S)
        is_needed = self.has_notice and self.has_deadline
        machine = find_machine_id() if self.has_deadline else ""
        return RankNotice(self.has_notice, self.find_left_s() if is_needed else None, self.count, machine)

    @contextmanager
    def watch(self, numbers: tuple[int, ...]) -> Iterator[None]:
        """Record signals inside the context, and with a `deadline` also while the main thread is in C code.

        Outside the main thread no signal can be handled, so only the function counts.
        """
        with ExitStack() as stack:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main or self._ask is None:
                stack.enter_context(watch_signals(numbers, self.note_signal))
            if self.has_deadline:
                stack.enter_context(self._watch_in_thread(numbers if is_main else ()))
            yield

    @contextmanager
    def _watch_in_thread(self, numbers: tuple[int, ...]) -> Iterator[None]:
        own, others = socket.socketpair()
        for each in (own, others):
            each.setblocking(False)
        watcher = _Watcher(self, own, others, numbers)
        thread = BackgroundThread(watcher.run, "shardckpt-notice", is_daemon=True)
        try:
            with wake_on_signals(others.fileno()) if numbers else nullcontext(-1) as before:
                watcher.before = before
                self._is_answering = thread.start() and self._ask is not None
                yield
        finally:
            self._is_answering = False
            watcher.stop()
            if not thread.is_running:
                watcher.close()


class _Watcher:
    """Sees signals and asks for the deadline, on its own thread."""

    def __init__(self, notices: Notices, own: socket.socket, others: socket.socket, numbers: tuple[int, ...]) -> None:
        self._notices, self._own, self._others, self._numbers = notices, own, others, numbers
        self._is_stopped = False
        self.before = -1  # file descriptor that got the signals before

    def run(self) -> None:
        """Watch until `stop`, and then until the last result is reported."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._own, selectors.EVENT_READ)
            while True:
                self._notices.ask()
                due_s = self._notices.on_tick()
                if due_s is None and self._is_stopped:
                    break
                if selector.select(_EVERY_S if due_s is None else min(due_s, _EVERY_S)):
                    self._read()
        self.close()

    def _read(self) -> None:
        data = self._own.recv(4096)
        if any(number in self._numbers for number in data):
            self._notices.note_arrival()
        if self.before >= 0 and (passed := data.replace(b"\0", b"")):
            with suppress(OSError):
                os.write(self.before, passed)

    def stop(self) -> None:
        """Let the thread end."""
        self._is_stopped = True
        with suppress(OSError):
            self._others.send(b"\0")  # no signal has this number

    def close(self) -> None:
        """Close the sockets."""
        self._own.close()
        self._others.close()
