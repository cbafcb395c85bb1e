"""Handles and state for background saves, one at a time per process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from shardckpt.checkpoint.background_thread import BackgroundThread, run_before_exit
from shardckpt.devices import wait_for_deferred_copies
from shardckpt.errors import RankError, ShardckptError, UsageError, describe
from shardckpt.events import OnEvent, Recorder, SaveEvent, emit
from shardckpt.events.recorder import enter_call, get_current_call
from shardckpt.storage.linux_syscalls import lower_priority

_LOG = logging.getLogger("shardckpt")


@dataclass(frozen=True)
class SaveTimings:
    """Seconds that each phase of a background save took on this rank.

    A phase that has not ended counts as 0.

    Attributes:
        waiting: Time until the previous save ended.
        capture: Time to flatten the state and plan with the other ranks.
        staging: Time to copy the state, including waits for buffers if the state is larger than the budget.
        write: Time from the start of staging until everything is written.
        publish: Time to agree with the other ranks and publish the result.
    """

    waiting: float = 0.0
    capture: float = 0.0
    staging: float = 0.0
    write: float = 0.0
    publish: float = 0.0

    @property
    def stall(self) -> float:
        """Seconds for which the call blocked the training loop."""
        return self.waiting + self.capture + self.staging


class AsyncSaveTask:
    """A background save, or a publish, whose messages have a title: its thread, phases and error."""

    def __init__(
        self,
        path: str,
        on_event: OnEvent | None,
        *,
        is_tolerated: bool = False,
        recorder: Recorder | None = None,
        title: str = "",
    ) -> None:
        self.title = title or f"the save in the background to {path}"
        self.title_later = title or f"the save before this one, in the background to {path},"
        self.path, self._is_tolerated = path, is_tolerated
        self.recorder = recorder or Recorder(SaveEvent, path, {"is_background": True})
        self._on_event = on_event
        # On some ranks the call itself may run the rest, so its name is that of the call.
        self._call = get_current_call().name or "async_save"
        self._emitting = threading.Lock()
        self._thread: BackgroundThread | None = None
        self._process = os.getpid()
        self._failure: BaseException | None = None
        self._is_retrieved = False
        self._claimed = threading.Lock()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Measure the duration of a phase."""
        return self.recorder.phase(name)

    @property
    def timings(self) -> SaveTimings:
        """Durations of the phases that have ended, in seconds."""
        known = SaveTimings.__dataclass_fields__
        return SaveTimings(**{name: seconds for name, seconds in self.recorder.phases.items() if name in known})

    def emit(self, error: BaseException | None) -> None:
        """Emit the save's event, only once, since the save ends now."""
        if self._emitting.acquire(blocking=False):
            event = self.recorder.build(error)
            self.recorder.context.run(emit, event, self._on_event, is_tolerated=self._is_tolerated)

    def claim(self) -> bool:
        """Claim the rest of the save for its thread or an interrupted call; return True for the first claim."""
        return self._claimed.acquire(blocking=False)

    def start(self, work: Callable[[], None]) -> bool:
        """Run the unclaimed rest of the save on a thread; return False if no thread can start."""

        def run() -> None:
            lower_priority()  # the training needs the cores; threads started here inherit the priority
            self.run(work)

        self._thread = BackgroundThread(run, "shardckpt-save")
        return self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Run the rest of the save, unless it is claimed."""
        if not self.claim():
            return
        try:
            with enter_call(self._call, self.path, self._on_event):
                work()
        except BaseException as error:  # noqa: BLE001  (raised by whoever asks)
            self._failure = error
        self.emit(self._failure)

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until the save ends; return True if it has ended."""
        return self._thread is None or self._thread.join(timeout)

    @property
    def is_over(self) -> bool:
        """Whether the save has ended."""
        return self._thread is None or not self._thread.is_running

    @property
    def has_unretrieved_error(self) -> bool:
        """Whether the save has failed, and nobody retrieved its error."""
        return self._failure is not None and not self._is_retrieved

    @property
    def last_failure(self) -> BaseException | None:
        """The save's error, whether it was retrieved or not."""
        return self._failure

    def failure(self) -> BaseException | None:
        """Return the save's error, and mark it as retrieved."""
        if os.getpid() != self._process:
            raise UsageError("the save runs in another process", where=self.path, fix="Ask there.")
        self._is_retrieved = True
        return self._failure

    def unretrieved_error(self) -> BaseException | None:
        """Return the save's error, unless it was retrieved."""
        return None if self._is_retrieved else self.failure()


class SaveHandle:
    """Handle for a background save.

    Attributes:
        path: Target path or URL.
    """

    def __init__(self, task: AsyncSaveTask) -> None:
        self.path = task.path
        self._task = task

    def done(self) -> bool:
        """Return True if the save has succeeded or failed."""
        return self._task.is_over

    def result(self, timeout: float | None = None) -> None:
        """Wait until all ranks have committed and published the checkpoint.

        Args:
            timeout: Maximum time in seconds; by default no limit.

        Raises:
            TimeoutError: The save has not ended in time; it continues.
            RankError: Another rank failed or is lost; the message names it.
            StorageError: The storage failed on this rank. The written files were removed.
        """
        if not self._task.join(timeout):
            raise TimeoutError(f"the save to {self.path} is not done after {timeout} s")
        failure = self._task.failure()
        if failure is not None:
            raise failure

    def wait_for_staging(self) -> None:
        """Make the current streams wait until the state is copied; the host does not wait.

        Needed with `overlap_staging` alone, before parameters or optimizer states are written in place by other code
        than an optimizer step or a load.
        """
        wait_for_deferred_copies()

    @property
    def timings(self) -> SaveTimings:
        """Durations of the phases that have ended, in seconds."""
        return self._task.timings


class StepTask(NamedTuple):
    """A step that is saved in the background."""

    number: int
    handle: SaveHandle

    def await_fault(self) -> str:
        """Wait until the save ends; return why it failed, empty if it succeeded or its error was retrieved."""
        task = self.handle._task
        task.join()
        failure = task.last_failure if task.has_unretrieved_error else None  # stays for `result()` and the next save
        return "" if failure is None else f"its save in the background to {task.path} failed: {describe(failure)}"


class PendingSave:
    """The only background save that runs in this process."""

    def __init__(self) -> None:
        self._is_known_to_exit = False
        self.forget()

    def forget(self) -> None:
        """Reset to no save: a forked process does not have its parent's threads."""
        self.entry = threading.RLock()  # held by a thread while it starts a save of either kind
        self._task: AsyncSaveTask | None = None
        self._abandon: Callable[[], object] = lambda: None

    def start(self, task: AsyncSaveTask, abandon: Callable[[], object]) -> None:
        """Register a save that is about to start; `abandon` ends its copy if a signal ended the call."""
        self._task, self._abandon = task, abandon
        if not self._is_known_to_exit:
            self._is_known_to_exit = True
            run_before_exit(self.end)

    @property
    def busy_with(self) -> str:
        """Target of the running save; empty without one."""
        return "" if self._task is None or self._task.is_over else self._task.path

    def wait(self) -> None:
        """Wait until no save is running; the caller holds `entry`."""
        if self._task is not None:
            self._abandon()
            self._task.join()

    def unretrieved_error(self) -> Exception | None:
        """Return the last save's error once, unless it was retrieved."""
        failure = self._task.unretrieved_error() if self._task is not None else None
        return None if failure is None or self._task is None else _again(failure, self._task.title_later)

    def end(self) -> None:
        """Wait for the last save; report an error that was not retrieved. At process exit."""
        if self.entry.acquire(blocking=False):
            try:
                self.wait()
            finally:
                self.entry.release()
        elif self._task is not None:  # a call on another thread is copying its state
            self._task.join()
        failure = self._task.unretrieved_error() if self._task is not None else None
        if failure is not None and self._task is not None:
            _LOG.error("%s failed: %s", self._task.title, describe(failure))


def _again(failure: BaseException, title: str) -> Exception:
    """Return an error with the same class about an earlier save, caused by the failure."""
    text = f"{title} failed: {describe(failure)}"
    if isinstance(failure, RankError):
        again: Exception = RankError(text, rank=failure.rank)
    else:
        again = (type(failure) if isinstance(failure, ShardckptError) else RankError)(text)
    again.__cause__ = failure
    return again


PENDING_SAVE = PendingSave()

os.register_at_fork(after_in_child=PENDING_SAVE.forget)
