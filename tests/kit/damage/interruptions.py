"""Exceptions that signal handlers raise at any moment, as Ctrl-C and watchdogs do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_by(error: BaseException, after: float = 0.05) -> Iterator[None]:
    """Raise an error from a signal handler after some seconds."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise error

    former = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
