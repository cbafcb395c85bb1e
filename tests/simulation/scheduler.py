"""Scheduler of a simulated history: one thread runs at a time, in an order that a seed gives."""

from __future__ import annotations

import os
import traceback
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

from tests.simulation.turns import Runner, Turns

EVENT_SECONDS = 0.001  # virtual seconds between events
START_S = 1_700_000_000.0  # wall clock at the start of a history, in seconds since the epoch

_MAX_EVENTS = 60_000
_SHOWN_FRAMES = 6


class KilledError(BaseException):
    """A simulated process was killed; its code must not catch this and continue."""


class HistoryError(AssertionError):
    """A history violates an invariant."""


class HistoryEvent(NamedTuple):
    """One event in a history."""

    number: int
    seconds: float  # virtual time
    who: str  # "process.thread"
    verb: str
    subject: str
    note: str = ""  # fault or result

    def __str__(self) -> str:
        note = f"  [{self.note}]" if self.note else ""
        return f"{self.number:5} {self.seconds:10.3f}  {self.who:<16} {self.verb:<9} {self.subject}{note}"


class Process:
    """A simulated process."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.node = ""
        # Killed or ended; silent if its node lost power, so that peers cannot see that it is dead.
        self.is_dead = self.is_silent = False
        # Wall clock minus virtual time; real processor seconds of its ended threads, if the scheduler counts them.
        self.clock_shift = self.work_s = 0.0
        self.own: dict[object, Any] = {}  # replaces globals of modules
        self.at_death: list[Callable[[], None]] = []  # release what the operating system would

    def die(self, *, silently: bool = False) -> None:
        """End the process: from now on, its code has no effect."""
        if not self.is_dead:
            self.is_dead, self.is_silent = True, silently
            for release in self.at_death:
                release()


class Task:
    """A simulated thread."""

    def __init__(self, name: str, process: Process, number: int) -> None:
        self.name, self.process, self.number = name, process, number
        self.is_over = False
        self.waits_for = ""  # condition in words; empty if it can run
        self.condition: Callable[[], bool] | None = None
        self.deadline: float | None = None
        # What the condition depends on; None for anything.
        self.things: Sequence[Hashable] | None = ()
        self.watched: Sequence[Hashable] = ()
        self.runner: Runner | None = None
        self.own: dict[object, Any] = {}  # replaces globals of modules

    def can_run(self, now: float) -> bool:
        """Return True if the task does not wait, or no longer has to."""
        if self.condition is None or self.process.is_dead:
            return True
        return (self.deadline is not None and self.deadline <= now) or self.condition()

    def describe_place(self) -> str:
        """Return where the task is, for a report."""
        frame = self.runner.find_frame() if self.runner is not None else None
        stack = traceback.extract_stack(frame) if frame is not None else []
        shown = [each for each in stack if not _is_of_simulator(each.filename)]
        lines = " < ".join(f"{each.name}:{each.lineno}" for each in shown[: -_SHOWN_FRAMES - 1 : -1])
        return f"{self.name} waits for {self.waits_for or 'its turn'} at {lines}"


def _is_of_simulator(file: str) -> bool:
    """Return True if a file belongs to the simulator, and is none of its tests."""
    folder, name = os.path.split(file)
    return folder == os.path.dirname(__file__) and not name.startswith("test_")


class WaitingTasks:
    """The tasks in a history, and which can run: only those affected by a change are looked at."""

    def __init__(self) -> None:
        self.by_number: dict[int, Task] = {}  # tasks that have not ended, in start order
        self._ready: list[int] = []
        self._doubtful: dict[int, Task] = {}
        self._polled: dict[int, Task] = {}
        self._by_thing: dict[Hashable, dict[int, Task]] = {}
        self._deadlines: list[tuple[float, int]] = []

    @property
    def tasks(self) -> list[Task]:
        """Tasks that have not ended, in start order."""
        return [*self.by_number.values()]

    def add(self, task: Task) -> None:
        """Add a task that can run; its number must be the greatest."""
        self.by_number[task.number] = task
        self._ready.append(task.number)

    def remove(self, task: Task) -> None:
        """Remove an ended task."""
        del self.by_number[task.number]
        self._doubtful.pop(task.number, None)
        self._set_ready(task.number, is_ready=False)

    def start(self, task: Task) -> None:
        """Record that a task waits."""
        number = task.number
        self._doubtful[number] = task
        task.watched = (*(task.things or ()), task.process)
        for thing in task.watched:
            self._by_thing.setdefault(thing, {})[number] = task
        if task.things is None:
            self._polled[number] = task
        if task.deadline is not None:
            heappush(self._deadlines, (task.deadline, number))

    def end(self, task: Task) -> None:
        """Record that a task no longer waits."""
        number = task.number
        self._doubtful[number] = task
        self._polled.pop(number, None)
        for thing in task.watched:
            waiting = self._by_thing.get(thing)
            if waiting is not None and waiting.pop(number, None) is not None and not waiting:
                del self._by_thing[thing]

    def notify(self, thing: Hashable) -> None:
        """Record that a thing has changed."""
        waiting = self._by_thing.get(thing)
        if waiting:
            self._doubtful.update(waiting)

    def find_ready(self, now: float) -> Sequence[int]:
        """Return the numbers of tasks that can run, in ascending order."""
        while self._deadlines and self._deadlines[0][0] <= now:
            number = heappop(self._deadlines)[1]
            if number in self.by_number:
                self._doubtful[number] = self.by_number[number]
        if self._doubtful or self._polled:
            for number, task in (*self._doubtful.items(), *self._polled.items()):
                self._set_ready(number, is_ready=task.condition is None or task.can_run(now))
            self._doubtful.clear()
        return self._ready

    def _set_ready(self, number: int, *, is_ready: bool) -> None:
        at = bisect_left(self._ready, number)
        was_ready = at < len(self._ready) and self._ready[at] == number
        if is_ready and not was_ready:
            insort(self._ready, number)
        elif was_ready and not is_ready:
            del self._ready[at]

    def next_deadline(self) -> Sequence[float]:
        """Return the first deadline; empty if no task has one."""
        while self._deadlines:
            deadline, number = self._deadlines[0]
            if number in self.by_number and self.by_number[number].deadline == deadline:
                return (deadline,)
            heappop(self._deadlines)
        return ()


class Scheduler:
    """Schedules simulated threads with a virtual clock."""

    def __init__(
        self,
        seed: int,
        stay: float = 0.7,
        *,
        event_s: float = EVENT_SECONDS,
        most_events: int = _MAX_EVENTS,
        is_measured: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.events: list[HistoryEvent] = []
        # Takes verb and subject; returns a fault or empty text.
        self.before_event: Callable[[str, str], str] = lambda _verb, _subject: ""
        self.after_event: Callable[[], None] = lambda: None
        self.current: Task | None = None  # None outside the simulation
        self.failure: BaseException | None = None  # first violated invariant or actor's error
        self._stay, self._event_s, self._most_events = stay, event_s, most_events
        self._waits = WaitingTasks()
        # Takes a changed thing: conditions that depend on it are evaluated again.
        self.notify: Callable[[Hashable], None] = self._waits.notify
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._is_observed = False
        self._is_measured = is_measured
        self._turns = Turns(is_measured=is_measured)
        self.processes: list[Process] = []  # in start order
        self._spawned = 0

    # Processes and tasks

    def new_process(self, name: str) -> Process:
        """Return a new process without threads."""
        process = Process(name, 1001 + len(self.processes))
        self.processes.append(process)
        process.at_death.append(lambda: self.notify(process))
        return process

    def spawn(self, process: Process, name: str, target: Callable[[], object]) -> Task:
        """Start a thread in a process; it runs when it is chosen."""
        self._spawned += 1
        task = Task(name, process, self._spawned)

        def run() -> None:
            try:
                if not process.is_dead:
                    target()
            except KilledError:
                pass
            except BaseException as error:  # noqa: BLE001  (reported by `run`)
                if isinstance(error, HistoryError | KeyboardInterrupt) or not process.is_dead:
                    self.fail(error)
            finally:
                task.is_over = True
                process.work_s += runner.measure_work() if self._is_measured else 0.0
                self._waits.remove(task)
                self.notify(task)

        self._waits.add(task)
        runner = task.runner = self._turns.start(run)
        return task

    def run(self) -> None:
        """Run all tasks to their end."""
        self._turns.run_all(self._choose_next)
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """End the history with an error; the first error counts."""
        self.failure = self.failure or error
        for task in self._waits.tasks:
            task.process.die()

    # Scheduling points

    def step(self, verb: str, subject: str = "") -> str:
        """Give other threads a turn, then record an event of the running thread."""
        task = self.current
        if self._is_observed or task is None:
            return ""
        try:
            self.after_event()
        except HistoryError as error:
            self._raise_here(error)
        chosen = self._choose(task)
        if chosen is not task:
            self._switch(task, chosen)
        if task.process.is_dead:
            raise KilledError
        fault = self.before_event(verb, subject)
        self.record(verb, subject, fault)
        if task.process.is_dead:
            raise KilledError
        return fault

    def record(self, verb: str, subject: str, note: str = "") -> None:
        """Record an event without letting other threads run."""
        who = self.current.name if self.current is not None else "-"
        events = self.events
        events.append(tuple.__new__(HistoryEvent, (len(events), self.now, who, verb, subject, note)))
        self.now += self._event_s
        if len(events) > self._most_events:
            self._raise_here(HistoryError(f"no end after {self._most_events} events"))

    def wait(
        self,
        condition: Callable[[], bool],
        what: str,
        seconds: float | None = None,
        things: Sequence[Hashable] | None = None,
    ) -> bool:
        """Wait until a condition holds. Return False after a timeout."""
        task = self.current
        if self._is_observed or task is None:
            return condition()
        try:
            self.after_event()
        except HistoryError as error:
            self._raise_here(error)
        task.condition, task.waits_for, task.things = condition, what, things
        task.deadline = None if seconds is None else self.now + max(seconds, 0.0)
        self._waits.start(task)
        try:
            chosen = self._choose(task)
            if chosen is not task:
                self._switch(task, chosen)
        finally:
            self._waits.end(task)
            task.condition, task.waits_for, task.deadline = None, "", None
        if task.process.is_dead:
            raise KilledError
        return condition()

    def sleep(self, seconds: float) -> None:
        """Wait for virtual seconds."""
        self.wait(lambda: False, f"{seconds:g} s", seconds, ())

    def call_at(self, seconds: float, act: Callable[[], None]) -> None:
        """Call a function at a virtual time."""
        self._count += 1
        heappush(self._timers, (seconds, self._count, act))

    def observe(self, look: Callable[[], Any]) -> Any:
        """Run a harness function without scheduling points, faults and events."""
        before, self._is_observed = self._is_observed, True
        try:
            return look()
        finally:
            self._is_observed = before

    @property
    def clock(self) -> float:
        """Correct wall clock, in seconds since the epoch."""
        return START_S + self.now

    @property
    def is_observed(self) -> bool:
        """Whether the harness runs, not an actor."""
        return self._is_observed or self.current is None

    def _raise_here(self, error: BaseException) -> None:
        self.fail(error)
        raise KilledError from error

    def _switch(self, task: Task, chosen: Task | None) -> None:
        """Hand the turn to a chosen task; return when this one has it again."""
        if chosen is None:
            return
        self.current = chosen
        runner, running = chosen.runner, task.runner
        assert runner is not None and running is not None
        runner.take_over(running)

    def _choose_next(self) -> Runner | None:
        """Return the next task's runner after the running task has ended; None at the end."""
        self.current = chosen = self._choose(None)
        return chosen.runner if chosen is not None else None

    def _choose(self, task: Task | None) -> Task | None:
        waits, timers, chance = self._waits, self._timers, self.random.random
        while waits.by_number:
            while timers and timers[0][0] <= self.now:
                heappop(timers)[2]()
            if task is not None and chance() < self._stay and (task.condition is None or task.can_run(self.now)):
                return task
            ready = waits.find_ready(self.now)
            if ready:
                return waits.by_number[ready[int(chance() * len(ready))]]
            times = [*waits.next_deadline(), *(each[0] for each in timers[:1])]
            if times:
                self.now = max(self.now, min(times))
                continue
            self.fail(HistoryError(f"deadlock: {describe_tasks(waits.tasks)}"))
        return None


def describe_tasks(tasks: Iterable[Task]) -> str:
    """Return where each task is, one per line."""
    return "".join(f"\n    {task.describe_place()}" for task in tasks)
