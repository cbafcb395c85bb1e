"""Scheduler of a simulated history: threads of which one runs at a time, in an order that a seed gives."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

EVENT_SECONDS = 0.001
"""Virtual seconds between two events."""

START_S = 1_700_000_000.0
"""Clock of the day at the start of a history, in seconds since the epoch."""

_MOST_EVENTS = 60_000
_SHOWN_FRAMES = 6


class KilledError(BaseException):
    """A simulated process was killed; no code of it may catch this and continue."""


class HistoryError(AssertionError):
    """A history violates an invariant."""


class HistoryEvent(NamedTuple):
    """One event of a history.

    Attributes:
        number: Position in the history, from 0.
        seconds: Virtual time.
        who: Process and thread.
        verb: Kind of operation.
        subject: File, object, message or step.
        note: Fault or result; empty without one.
    """

    number: int
    seconds: float
    who: str
    verb: str
    subject: str
    note: str = ""

    def __str__(self) -> str:
        note = f"  [{self.note}]" if self.note else ""
        return f"{self.number:5} {self.seconds:10.3f}  {self.who:<16} {self.verb:<9} {self.subject}{note}"


class Process:
    """A simulated process.

    Args:
        name: Name in events.
        number: Process id.

    Attributes:
        is_dead: Whether it was killed or has ended.
        is_silent: Whether peers cannot see that it is dead: its node has lost power.
        clock_shift: Seconds that its clock of the day differs from the virtual time.
        own: Values of the process in place of globals of modules, by key.
        at_death: Functions that release what the operating system releases.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.is_dead = self.is_silent = False
        self.clock_shift = 0.0
        self.own: dict[object, Any] = {}
        self.at_death: list[Callable[[], None]] = []

    def die(self, *, silently: bool = False) -> None:
        """End the process: from now on, no code of it has an effect."""
        if not self.is_dead:
            self.is_dead, self.is_silent = True, silently
            for release in self.at_death:
                release()


class Task:
    """A simulated thread.

    Args:
        name: Name in events.
        process: Its process.

    Attributes:
        is_over: Whether it has ended.
        waits_for: Condition that it waits for, in words; empty if it can run.
    """

    def __init__(self, name: str, process: Process) -> None:
        self.name, self.process = name, process
        self.is_over = False
        self.waits_for = ""
        self.condition: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None

    def can_run(self, now: float) -> bool:
        """Return True if the task does not wait, or no longer has to."""
        if self.condition is None or self.process.is_dead:
            return True
        return (self.deadline is not None and self.deadline <= now) or self.condition()

    def describe_place(self) -> str:
        """Return where the task is, for a report."""
        frame = sys._current_frames().get(self.thread.ident or 0) if self.thread is not None else None
        stack = traceback.extract_stack(frame) if frame is not None else []
        shown = [
            each for each in stack if "/testing/simulation/" not in each.filename and "threading" not in each.filename
        ]
        lines = " < ".join(f"{each.name}:{each.lineno}" for each in shown[: -_SHOWN_FRAMES - 1 : -1])
        return f"{self.name} waits for {self.waits_for or 'its turn'} at {lines}"


class Scheduler:
    """Scheduler of simulated threads with a virtual clock.

    Args:
        seed: Seed of all choices.
        stay: Probability that the running thread continues at a scheduling point.

    Attributes:
        random: Source of all randomness of the history.
        now: Virtual time in seconds.
        events: Events so far.
        before_event: Called with the verb and the subject of each event before it takes effect; returns a fault, or
            empty text.
        after_event: Called after each event took effect.
        current: Running task; None outside the simulation.
        failure: First violation of an invariant, or error of an actor.
    """

    def __init__(self, seed: int, stay: float = 0.7) -> None:
        self.random = Random(seed)  # noqa: S311  (no secret)
        self.now = 0.0
        self.events: list[HistoryEvent] = []
        self.before_event: Callable[[str, str], str] = lambda _verb, _subject: ""
        self.after_event: Callable[[], None] = lambda: None
        self.current: Task | None = None
        self.failure: BaseException | None = None
        self._stay = stay
        self._tasks: list[Task] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._is_observed = False
        self._end = threading.Lock()
        self._processes = 0

    # Processes and tasks

    def new_process(self, name: str) -> Process:
        """Return a new process without threads."""
        self._processes += 1
        return Process(name, 1000 + self._processes)

    def spawn(self, process: Process, name: str, target: Callable[[], object]) -> Task:
        """Start a thread of a process; it runs when it is chosen.

        Args:
            process: Process of the thread.
            name: Name in events.
            target: Function to run; its exceptions fail the history, except that of a kill.
        """
        task = Task(name, process)

        def run() -> None:
            task.baton.acquire()
            try:
                if not process.is_dead:
                    target()
            except KilledError:
                pass
            except BaseException as error:  # noqa: BLE001  (reported by `run`)
                if isinstance(error, HistoryError) or not process.is_dead:
                    self.fail(error)
            finally:
                task.is_over = True
                self._tasks.remove(task)
                self._hand_over()

        task.thread = threading.Thread(target=run, name=name, daemon=True)
        self._tasks.append(task)
        task.thread.start()
        return task

    def run(self) -> None:
        """Run all tasks to their end.

        Raises:
            HistoryError: An invariant is violated.
            BaseException: An actor failed.
        """
        self._end.acquire()
        self._hand_over()
        self._end.acquire()
        self.current = None
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """End the history with an error; the first one counts."""
        self.failure = self.failure or error
        for task in self._tasks:
            task.process.die()

    # Scheduling points

    def step(self, verb: str, subject: str = "") -> str:
        """Give other threads a turn, then record an event of the running thread.

        Args:
            verb: Kind of operation.
            subject: File, object or message that it operates on.

        Returns:
            The fault that the operation has to show; empty without one.

        Raises:
            KilledError: The process is dead.
        """
        task = self.current
        if self._is_observed or task is None:
            return ""
        self._finish_event()
        self._switch(task)
        fault = self.before_event(verb, subject)
        self.record(verb, subject, fault)
        if task.process.is_dead:
            raise KilledError
        return fault

    def record(self, verb: str, subject: str, note: str = "") -> None:
        """Record an event without letting other threads run."""
        who = self.current.name if self.current is not None else "-"
        self.events.append(HistoryEvent(len(self.events), self.now, who, verb, subject, note))
        self.now += EVENT_SECONDS
        if len(self.events) > _MOST_EVENTS:
            self._raise_here(HistoryError(f"no end after {_MOST_EVENTS} events"))

    def wait(self, condition: Callable[[], bool], what: str, seconds: float | None = None) -> bool:
        """Wait until a condition holds.

        Args:
            condition: Function without side effects.
            what: The condition in words.
            seconds: Maximum virtual time; None for no limit.

        Returns:
            Whether the condition holds.

        Raises:
            KilledError: The process is dead.
        """
        task = self.current
        if self._is_observed or task is None:
            return condition()
        self._finish_event()
        task.condition, task.waits_for = condition, what
        task.deadline = None if seconds is None else self.now + max(seconds, 0.0)
        try:
            self._switch(task)
        finally:
            task.condition, task.waits_for, task.deadline = None, "", None
        if task.process.is_dead:
            raise KilledError
        return condition()

    def sleep(self, seconds: float) -> None:
        """Wait for virtual seconds."""
        self.wait(lambda: False, f"{seconds:g} s", seconds)

    def call_at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call a function at a virtual time."""
        self._count += 1
        heappush(self._timers, (seconds, self._count, act))

    def observe(self, look: Callable[[], Any]) -> Any:
        """Run a function of the harness without scheduling points, faults and events."""
        before, self._is_observed = self._is_observed, True
        try:
            return look()
        finally:
            self._is_observed = before

    @property
    def clock(self) -> float:
        """Correct time of the day, in seconds since the epoch."""
        return START_S + self.now

    @property
    def is_observed(self) -> bool:
        """Whether the harness looks, not an actor."""
        return self._is_observed or self.current is None

    def _finish_event(self) -> None:
        try:
            self.after_event()
        except HistoryError as error:
            self._raise_here(error)

    def _raise_here(self, error: BaseException) -> None:
        self.fail(error)
        raise KilledError from error

    def _switch(self, task: Task) -> None:
        """Give the turn to a task that can run, possibly to this one."""
        chosen = self._choose(task)
        if chosen is None:
            return
        if chosen is not task:
            self.current = chosen
            chosen.baton.release()
            task.baton.acquire()
        if task.process.is_dead:
            raise KilledError

    def _hand_over(self) -> None:
        """Give the turn to another task, when the running one has ended."""
        chosen = self._choose(None)
        if chosen is None:
            self.current = None
            self._end.release()
            return
        self.current = chosen
        chosen.baton.release()

    def _choose(self, task: Task | None) -> Task | None:
        while self._tasks:
            while self._timers and self._timers[0][0] <= self.now:
                heappop(self._timers)[2]()
            if task is not None and self.random.random() < self._stay and task.can_run(self.now):
                return task
            ready = [each for each in self._tasks if each.can_run(self.now)]
            if ready:
                return ready[int(self.random.random() * len(ready))]
            times = [each.deadline for each in self._tasks if each.deadline is not None]
            if self._timers:
                times.append(self._timers[0][0])
            if times:
                self.now = max(self.now, min(times))
                continue
            self.fail(HistoryError(f"deadlock: {describe_tasks(self._tasks)}"))
        return None


def describe_tasks(tasks: Sequence[Task]) -> str:
    """Return where each task is, one line each."""
    return "".join(f"\n    {task.describe_place()}" for task in tasks)
