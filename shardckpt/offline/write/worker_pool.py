"""Threads that read, cast and write output files, and their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from shardckpt.errors import UsageError
from shardckpt.torchrun import count_cores, local_world_size

_T = TypeVar("_T")

_MOST_THREADS = 4
"""Maximum threads by default: with more, memory or the disk is the limit."""

_LEAST_BYTES = 16 << 20
"""Minimum bytes to write for each thread that is worth starting."""

_MEMORY_BYTES = 24 << 20
"""Memory of each default thread, in bytes: its buffers, and blocks of a step that are kept to verify them."""

_LEAST_MEMORY_BYTES = 5 << 20
"""Memory of each requested thread, in bytes: small buffers, and staged ranges of strided views."""


def count_threads(nbytes: int, max_memory: int, *, is_local: bool) -> int:
    """Return the number of threads that make a conversion faster, at least 1.

    Args:
        nbytes: Bytes to write.
        max_memory: Maximum bytes of memory for all threads.
        is_local: Whether source and target are on this machine; remote stores send concurrent requests themselves.
    """
    useful = min(_MOST_THREADS, nbytes // _LEAST_BYTES, max_memory // _MEMORY_BYTES) if is_local else 1
    if useful <= 1:
        return 1
    return max(min(useful, count_cores() // (local_world_size() or 1)), 1)


def limit_threads(jobs: int, max_memory: int) -> int:
    """Return the number of requested threads that fit into memory, at least 1.

    Args:
        jobs: Requested number of threads.
        max_memory: Maximum bytes of memory for all threads, in addition to that of the modules.
    """
    return max(min(jobs, max_memory // _LEAST_MEMORY_BYTES), 1)


@contextmanager
def report_missing_threads() -> Iterator[None]:
    """Convert Python's error for a thread that cannot start.

    Raises:
        UsageError: The system allows this process no more threads.
    """
    try:
        yield
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise UsageError(
            "the system allows this process no more threads",
            fix="Lower --jobs (jobs=), or raise the limit on processes (ulimit -u, or that of the container).",
        ) from error


@dataclass(frozen=True, slots=True)
class PoolTask(Generic[_T]):
    """A task of writing a file.

    Attributes:
        run: Function that performs the task.
        is_chained: Whether the task must wait for the previous chained task, since both use the same decoders.
        is_trivial: Whether waking a thread takes longer than the task; the thread that submits it then runs it.
    """

    run: Callable[[], _T]
    is_chained: bool = False
    is_trivial: bool = False


class WorkerPool:
    """Threads that run tasks, shared by the files that are written concurrently.

    Args:
        threads: Number of threads.
        files: Number of files that are written concurrently.
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
        """Yield an iterator of the tasks' results, in order.

        Leaving the block waits for the running tasks, also after an error, so that their file is not closed before they
        end. Tasks that have not started are canceled.

        Args:
            tasks: Tasks, generated when they are submitted.
            ahead: Maximum number of submitted tasks before the result of an earlier one is taken.

        Raises:
            ShardckptError: The first failed task, in order, raised this error.
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
            if task.is_trivial:
                pending.append(Future())
                pending[-1].set_result(task.run())
            elif task.is_chained and chained is not None:
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
    """Run after another task. The wait ends, since the pool starts tasks in order."""
    before.result()
    return run()
