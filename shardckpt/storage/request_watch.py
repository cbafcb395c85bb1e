"""Log requests to a store that wait long for an answer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_NOTICE_S = 10.0  # seconds without an answer before the first warning
NEXT_NOTICE_S = 60.0  # seconds between further lines

_TICK_S = 1.0

_LOG = logging.getLogger("shardckpt")


class RequestWatch:
    """Requests that wait for an answer, with a thread that logs a warning if none comes; it ends when none waits."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all requests, as in a forked process, which does not have the thread."""
        self._started: dict[object, tuple[str, float]] = {}
        self._answered_at = 0.0
        self._lock = threading.Lock()
        self._is_running = False

    @contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Watch one request within the context."""
        key = object()
        with self._lock:
            self._started[key] = where, time.monotonic()
            starts, self._is_running = not self._is_running, True
        try:
            if starts:
                self._start_thread()
            yield
        finally:
            with self._lock:
                del self._started[key]
                self._answered_at = time.monotonic()

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._run, name="request watch", daemon=True).start()
        except RuntimeError:  # as while the process ends; the request does not need the thread
            self._is_running = False

    def _run(self) -> None:
        due = FIRST_NOTICE_S
        while True:
            time.sleep(min(_TICK_S, FIRST_NOTICE_S))
            with self._lock:
                if not self._started:
                    self._is_running = False
                    return
                where, started = min(self._started.values(), key=lambda entry: entry[1])
                silent = time.monotonic() - max(started, self._answered_at)
            if silent < FIRST_NOTICE_S:
                due = FIRST_NOTICE_S
            elif silent >= due:
                due += NEXT_NOTICE_S
                _LOG.warning("%s: no answer for %d s, still waiting", where, silent)


WATCH = RequestWatch()

os.register_at_fork(after_in_child=WATCH.forget)
