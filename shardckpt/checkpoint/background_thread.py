"""Thread that callers can wait for again after a signal interrupted a wait, and when the process exits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from shardckpt.storage.thread_pool import is_refused_at_exit


class BackgroundThread:
    """Thread that knows itself whether it has ended; its function must not raise."""

    # If a signal handler raises an exception while a thread waits in `threading.Thread.join`, Python 3.12 and earlier
    # mark the other thread as ended while it runs (the `except` clause of `Thread._wait_for_tstate_lock`). Nobody
    # would wait for it any more, not even Python at its exit.

    def __init__(self, work: Callable[[], object], name: str, *, is_daemon: bool = False) -> None:
        self._work = work
        self._process = os.getpid()
        self._is_started = False
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=is_daemon)

    def start(self) -> bool:
        """Start the thread; return False if the process ends and Python starts no more, as in `atexit` since 3.12."""
        # If a signal interrupts the call, `is_running` says whether it was started.
        try:
            self._thread.start()
        except RuntimeError as error:
            if not is_refused_at_exit(error):
                raise
            return False
        self._is_started = True
        return True

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended, and return True; return False after `timeout` seconds."""
        # On the thread itself, as in a callback, it does not wait.
        is_own = threading.current_thread() is self._thread
        if self.is_running and not is_own and self._is_ended.wait(timeout):
            self._thread.join()
        return not self.is_running

    @property
    def is_running(self) -> bool:
        """Whether the thread was started in this process and has not ended."""
        return self._is_started and not self._is_ended.is_set() and os.getpid() == self._process

    def _run(self) -> None:
        self._is_started = True
        try:
            self._work()
        finally:
            self._is_ended.set()


def run_before_exit(act: Callable[[], None]) -> None:
    """Run a function after the main thread ends, before Python shuts down executors."""
    # Storage uses executors. Functions run in the reverse order of these calls. If a Python version does not support
    # this, Python still waits for threads, and a save that cannot continue rolls itself back.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with suppress(RuntimeError):  # the main thread has already ended
            register(act)
