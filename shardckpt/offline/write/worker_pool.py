"""The threads that read, cast and write output files, and how many of them help."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

_T = TypeVar("_T")

_MOST_THREADS = 4
"""More do not help: by then memory or the disk is the limit."""

_LEAST_BYTES = 16 << 20
"""Bytes to write for which one more thread is worth its start."""

_MEMORY_BYTES = 24 << 20
"""Memory of one more thread, by default: its buffers, and the blocks that reads of a step keep to check them."""

_LEAST_MEMORY_BYTES = 5 << 20
"""Memory of one more thread that was asked for: small buffers, and what reads of strided views stage."""


def count_threads(nbytes: int, max_memory: int, *, is_local: bool) -> int:
    """Return how many threads help, at least 1.

    Args:
        nbytes: Bytes to write.
        max_memory: Bytes that all threads may use.
        is_local: Whether source and target are on this machine; remote stores send several requests by themselves.
    """
    if not is_local:
        return 1
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(min(_count_cores() // processes, _MOST_THREADS, nbytes // _LEAST_BYTES, max_memory // _MEMORY_BYTES), 1)


def limit_threads(jobs: int, max_memory: int) -> int:
    """Return how many of the threads that were asked for have room, at least 1.

    Args:
        jobs: The threads.
        max_memory: Bytes that all threads may use, besides what the modules need.
    """
    return max(min(jobs, max_memory // _LEAST_MEMORY_BYTES), 1)


def _count_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class PoolTask(Generic[_T]):
    """A part of the work on a file.

    Attributes:
        run: Carries it out.
        is_chained: Whether it waits for the chained task before it, since both use the same decoders.
    """

    run: Callable[[], _T]
    is_chained: bool = False


class WorkerPool:
    """Threads that carry out tasks, shared by the files that are written at the same time.

    Args:
        threads: How many.
        files: How many files are written side by side.
    """

    def __init__(self, threads: int, files: int) -> None:
        self.threads = threads
        self.ahead = max(threads // files, 1)
        self._pool = ThreadPoolExecutor(threads)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def run(self, tasks: Iterable[PoolTask[_T]], ahead: int) -> Iterator[Iterator[_T]]:
        """Yield an iterator of what tasks return, in order.

        Leaving the block waits for the tasks that are running, after an error too, so that their file is not closed
        before they end. Tasks that have not begun are dropped.

        Args:
            tasks: The work, planned as it is submitted.
            ahead: Tasks that are submitted before the result of an earlier one is taken.

        Raises:
            ShardckptError: The error of the first task, in their order, that fails.
        """
        pending: deque[Future[_T]] = deque()
        try:
            yield self._results(tasks, ahead, pending)
        finally:
            for future in pending:
                future.cancel()
            wait(pending)

    def _results(self, tasks: Iterable[PoolTask[_T]], ahead: int, pending: deque[Future[_T]]) -> Iterator[_T]:
        chained: Future[_T] | None = None
        for task in tasks:
            if task.is_chained and chained is not None:
                pending.append(self._pool.submit(_run_after, chained, task.run))
            else:
                pending.append(self._pool.submit(task.run))
            if task.is_chained:
                chained = pending[-1]
            if len(pending) > ahead:
                yield pending[0].result()
                pending.popleft()
        while pending:
            yield pending[0].result()
            pending.popleft()


def _run_after(before: Future[_T], run: Callable[[], _T]) -> _T:
    """Run after another task. The pool begins tasks in order, so that the wait ends."""
    before.result()
    return run()
