"""A save in the background: what its caller sees, and the one that a process may have under way."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from shardckpt.errors import RankError, ShardckptError, UsageError

_LOG = logging.getLogger("shardckpt")


@dataclass(frozen=True)
class SaveTimings:
    """Seconds that each phase of a save in the background took on this rank; 0 for those that have not ended.

    Attributes:
        waiting: For the save before this one.
        capture: Looking at the state and planning with the other ranks.
        staging: Copying the state, and waiting for buffers where it is larger than the budget.
        write: Writing the copy, since staging began.
        publish: Agreeing with the other ranks, and putting the result in place.
    """

    waiting: float = 0.0
    capture: float = 0.0
    staging: float = 0.0
    write: float = 0.0
    publish: float = 0.0

    @property
    def stall(self) -> float:
        """For how long the call kept the training loop."""
        return self.waiting + self.capture + self.staging


class SaveEvent(NamedTuple):
    """Something that happened in a save in the background.

    Attributes:
        path: The target.
        phase: What has ended: `waiting`, `capture`, `staging`, `write`, `publish`; at last `done` or `failed`.
        seconds: How long the phase took; for the last two, all of the save.
        error: Why it failed.
    """

    path: str
    phase: str
    seconds: float
    error: BaseException | None = None


OnEvent = Callable[[SaveEvent], object]


def require_on_event(on_event: object) -> None:
    """Raise UsageError unless this is a function to call with events, or None."""
    if on_event is not None and not callable(on_event):
        raise UsageError("`on_event` must be a function of a SaveEvent", found=repr(on_event))


class AsyncSaveTask:
    """A save in the background: its thread, its phases, and its error.

    Args:
        path: The target.
        on_event: Called with everything that happens, on the thread where it does.
    """

    def __init__(self, path: str, on_event: OnEvent | None) -> None:
        self.path = path
        self._on_event = on_event
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._is_retrieved = False
        self._claimed = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase.

        Args:
            name: A field of `SaveTimings`.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = time.monotonic() - began
        self._notify(SaveEvent(self.path, name, self._seconds[name]))

    @property
    def timings(self) -> SaveTimings:
        """What the phases took that have ended."""
        return SaveTimings(**self._seconds)

    def claim(self) -> bool:
        """Claim the rest of the save, for its thread or for the interrupted call; return True if it was unclaimed."""
        return self._claimed.acquire(blocking=False)

    def start(self, work: Callable[[], None]) -> None:
        """Do the rest of the save on a thread, unless it is claimed; what it raises is the save's failure.

        Args:
            work: The rest.
        """

        def run() -> None:
            if not self.claim():
                return
            try:
                work()
            except BaseException as error:  # noqa: BLE001  (raised by whoever asks)
                self._failure = error
            phase = "failed" if self._failure else "done"
            self._notify(SaveEvent(self.path, phase, time.monotonic() - self._began, self._failure))

        # No daemon: a process that ends waits for it.
        self._thread = threading.Thread(target=run, name="shardckpt-save", daemon=False)
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end; return True if it has come.

        Args:
            timeout: Seconds; None for as long as it takes.
        """
        if self._thread is not None:
            with suppress(RuntimeError):  # a signal came before it was started
                self._thread.join(timeout)
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether nothing is being done any more."""
        return self._thread is None or not self._thread.is_alive()

    def failure(self) -> BaseException | None:
        """Return the error of the save, and mark it as retrieved."""
        if os.getpid() != self._process:
            raise UsageError("the save runs in another process", where=self.path, fix="Ask there.")
        self._is_retrieved = True
        return self._failure

    def unretrieved_error(self) -> BaseException | None:
        """Return the error of the save, unless it was retrieved."""
        return None if self._is_retrieved else self.failure()

    def _notify(self, event: SaveEvent) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001  (a logger that fails must not fail the save)
            _LOG.exception("on_event failed at %s of the save to %s", event.phase, self.path)


class SaveHandle:
    """A save that goes on in the background.

    Attributes:
        path: The target.
    """

    def __init__(self, task: AsyncSaveTask) -> None:
        self.path = task.path
        self._task = task

    def done(self) -> bool:
        """Return True if the save has succeeded or failed."""
        return self._task.is_over

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is in place and safe on all ranks.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Raises:
            TimeoutError: It is not done by then; it goes on.
            RankError: Another rank failed or is gone; the message names it.
            StorageError: The storage failed on this rank. Whatever was written is gone again.
        """
        if not self._task.join(timeout):
            raise TimeoutError(f"the save to {self.path} is not done after {timeout} s")
        failure = self._task.failure()
        if failure is not None:
            raise failure

    @property
    def timings(self) -> SaveTimings:
        """Seconds that each phase took that has ended."""
        return self._task.timings


class PendingSave:
    """The one save in the background that a process may have under way.

    Attributes:
        entry: Held by whoever begins a save, on this thread or in the background.
    """

    def __init__(self) -> None:
        self._is_known_to_exit = False
        self.forget()

    def forget(self) -> None:
        """Begin anew: threads do not come along into a forked process."""
        self.entry = threading.RLock()
        self._task: AsyncSaveTask | None = None
        self._abandon: Callable[[], object] = lambda: None

    def begin(self, task: AsyncSaveTask, abandon: Callable[[], object]) -> None:
        """Remember a save that is about to start.

        Args:
            task: The save.
            abandon: Gives up what the call has not copied yet, where a signal has ended that call; else does nothing.
        """
        self._task, self._abandon = task, abandon
        if not self._is_known_to_exit:
            self._is_known_to_exit = True
            _before_exit(self.end)

    @property
    def busy_with(self) -> str:
        """Target of the save that is under way; empty where none is."""
        return "" if self._task is None or self._task.is_over else self._task.path

    def wait(self) -> None:
        """Wait until no save is under way. Only for whoever holds `entry`: no call copies a state meanwhile."""
        if self._task is not None:
            self._abandon()
            self._task.join()

    def unretrieved_error(self) -> Exception | None:
        """Return, once, the error of the last save, unless it was retrieved."""
        failure = self._task.unretrieved_error() if self._task is not None else None
        return None if failure is None or self._task is None else _again(failure, self._task.path)

    def end(self) -> None:
        """Wait for the last save, and say so if it failed and nobody can ask any more."""
        if self.entry.acquire(blocking=False):
            try:
                self.wait()
            finally:
                self.entry.release()
        elif self._task is not None:  # a call of another thread copies its state
            self._task.join()
        failure = self._task.unretrieved_error() if self._task is not None else None
        if failure is not None and self._task is not None:
            _LOG.error("the save in the background to %s failed: %s", self._task.path, failure)


def _again(failure: BaseException, path: str) -> Exception:
    """Return an error of the same kind that says where it comes from, with the failure as its cause."""
    text = f"the save before this one, in the background to {path}, failed: {failure}"
    if isinstance(failure, RankError):
        again: Exception = RankError(text, rank=failure.rank)
    else:
        again = (type(failure) if isinstance(failure, ShardckptError) else RankError)(text)
    again.__cause__ = failure
    return again


def _before_exit(act: Callable[[], None]) -> None:
    """Have something done when the main thread has ended, before Python shuts executors, which storages use.

    Where Python does not offer that any more, threads are waited for all the same, and a save that then cannot go on
    takes itself back.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with suppress(RuntimeError):  # too late: the main thread has ended
            register(act)


PENDING_SAVE = PendingSave()
os.register_at_fork(after_in_child=PENDING_SAVE.forget)
