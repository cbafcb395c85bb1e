"""A pool of threads that works until the process is gone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(ThreadPoolExecutor):
    """Threads that run tasks; if Python refuses new threads because the process ends, the caller runs them."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a task, or run it."""
        future = self.start(fn, *args, **kwargs)
        if future is None:
            future = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  (raised where the result is taken)
                future.set_exception(error)
        return future

    def start(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T] | None:
        """Start a task on a thread; return None if the process ends and cannot start threads."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if not is_refused_at_exit(error):  # as for a last save in `atexit`, or after the main thread has ended
                raise
            return None


def is_refused_at_exit(error: RuntimeError) -> bool:
    """Return True if Python refused a thread because the process ends."""
    return "interpreter shutdown" in str(error)
