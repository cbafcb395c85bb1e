"""An operation's progress in bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress while data is copied, checked, compared or loaded.

    Attributes:
        done_bytes: Bytes that were written, checked, compared or loaded so far.
        total_bytes: Bytes to write, check, compare or load.
        seconds: Seconds since the first byte.
    """

    done_bytes: int
    total_bytes: int
    seconds: float


OnProgress = Callable[[Progress], None]


@contextmanager
def show_progress() -> Iterator[OnProgress]:
    """Show bytes, rate and remaining time while a block runs, in a terminal or a notebook.

    Examples:
        >>> with shardckpt.events.show_progress() as on_progress:  # doctest: +SKIP
        ...     shardckpt.verify("run/step-100", on_progress=on_progress)
    """
    from rich import progress as rich  # noqa: PLC0415  most callers show none
    from rich.console import Console  # noqa: PLC0415

    columns = (rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    bars = rich.Progress(*columns, console=Console(stderr=True), transient=True)
    bar = bars.add_task("")

    def show(progress: Progress) -> None:
        bars.update(bar, completed=progress.done_bytes, total=progress.total_bytes)
        bars.start()  # the first time

    try:
        yield show
    finally:
        bars.stop()


class Stopped(BaseException):
    """Ends a thread after another one failed. Not an Exception, so that targets do not handle it."""


class Meter:
    """Counts bytes from several threads, and reports them to the caller."""

    def __init__(self, total_bytes: int, on_progress: OnProgress | None) -> None:
        if not (on_progress is None or callable(on_progress)):
            raise UsageError(
                "`on_progress` must be a function", found=repr(on_progress), expected="a function that takes a Progress"
            )
        # Called after every step, under a lock; it may raise an exception to stop the work.
        self._total, self._on_progress = total_bytes, on_progress
        self._done, self._start, self._lock = 0, time.perf_counter(), threading.Lock()
        self._stopped = False
        self._raised: list[BaseException] = []

    def has_raised(self, error: BaseException) -> bool:
        """Return True if `on_progress` raised this error."""
        return any(each is error for each in self._raised)

    def stop(self) -> None:
        """Make every thread raise `Stopped` at its next `add`."""
        self._stopped = True

    def add(self, nbytes: int) -> None:
        """Add bytes to the count; raise `Stopped` after `stop`."""
        if self._stopped:
            raise Stopped
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                try:
                    self._on_progress(Progress(self._done, self._total, time.perf_counter() - self._start))
                except BaseException as error:
                    self._raised.append(error)
                    raise
