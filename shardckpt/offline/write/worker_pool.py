"""Threads that read, cast and write output files, and their number."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from queue import SimpleQueue
from typing import Generic, TypeVar

from shardckpt.errors import UsageError
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.torchrun import count_cores, local_world_size

_T = TypeVar("_T")

_MAX_THREADS = 4  # by default: with more, memory or the disk is the limit
_MIN_BYTES = 16 << 20  # to write, for a thread that is worth starting

# Per default thread: its buffers, and blocks of a step that are kept to verify them.
_MEMORY_BYTES = 24 << 20

# Per requested thread: small buffers, and staged ranges of strided views.
_MIN_MEMORY_BYTES = 5 << 20


def count_threads(nbytes: int, max_memory: int, *, is_local: bool) -> int:
    """Return how many threads make a conversion faster, at least 1."""
    useful = min(_MAX_THREADS, nbytes // _MIN_BYTES, max_memory // _MEMORY_BYTES) if is_local else 1
    if useful <= 1:
        return 1
    return max(min(useful, count_cores() // (local_world_size() or 1)), 1)


def limit_threads(jobs: int, max_memory: int) -> int:
    """Return how many of the requested threads fit into memory, at least 1."""
    return max(min(jobs, max_memory // _MIN_MEMORY_BYTES), 1)


@contextmanager
def report_missing_threads() -> Iterator[None]:
    """Convert Python's error for a thread that cannot start."""
    try:
        yield
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise UsageError(
            "the system allows this process no more threads",
            fix="Lower --jobs (jobs=), or raise the limit on processes (ulimit -u, or the container's limit).",
        ) from error


@dataclass(frozen=True, slots=True)
class PoolTask(Generic[_T]):
    """One step in writing a file."""

    run: Callable[[], _T]
    is_chained: bool = False  # waits for the previous chained task: both use the same decoders
    is_trivial: bool = False  # faster than waking a thread: the submitting thread runs it


class WorkerPool:
    """Threads that run tasks, shared by the files that are written concurrently."""

    def __init__(self, threads: int, files: int) -> None:
        self.threads = threads
        self.ahead = max(threads // files, 1)
        # The writing thread is the slowest on storage as fast as memory: for a single file, others plan its tasks.
        self._plans_tasks = threads > files == 1
        self._pool = ThreadPool(threads)

    def close(self) -> None:
        """Wait for the threads to end."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def run(self, tasks: Iterable[PoolTask[_T]], ahead: int) -> Iterator[Iterator[_T]]:
        """Yield an iterator over the tasks' results, in order."""
        # Leaving the block waits for running tasks, also after an error: their file must not be closed before they end.
        # Tasks that have not started are canceled.
        if not self._plans_tasks:
            with self._submit(tasks, ahead) as results:
                yield results
            return
        rest = iter(tasks)
        first = list(islice(rest, 2))
        if len(first) < 2:  # not worth waking a thread: some formats write each tensor by itself
            yield (task.run() for task in first)
            return
        with self._share(_TaskLine(chain(first, rest), ahead)) as results:
            yield results

    @contextmanager
    def _share(self, line: _TaskLine[_T]) -> Iterator[Iterator[_T]]:
        """Run a line's tasks on all threads."""
        working: list[Future[None]] = []
        try:
            working += filter(None, (self._pool.start(line.work) for _ in range(self.threads)))
            yield line.results() if working else line.run_all()
        finally:
            line.stop()
            wait(working)

    @contextmanager
    def _submit(self, tasks: Iterable[PoolTask[_T]], ahead: int) -> Iterator[Iterator[_T]]:
        """Submit tasks from the thread that takes their results."""
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
                done: Future[_T] = Future()
                done.set_result(task.run())  # a signal may end it: nobody would end a future that is pending by then
                pending.append(done)
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


class _TaskLine(Generic[_T]):
    """Tasks that threads take in order, and whose results another thread takes in the same order."""

    def __init__(self, tasks: Iterator[PoolTask[_T]], ahead: int) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self._taken: SimpleQueue[Future[_T] | None] = SimpleQueue()
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(ahead + 1):
            self._permits.put(None)
        self._is_over = False
        self._chained: Future[_T] | None = None

    def work(self) -> None:
        """Take and run tasks until the last, or until `stop` is called."""
        while True:
            self._permits.get()
            with self._lock:
                taken = None if self._is_over else self._take()
            if taken is None:
                self._permits.put(None)  # for the next thread, which ends too
                return
            run, future = taken
            try:
                future.set_result(run())
            except BaseException as error:  # noqa: BLE001  (raised where the result is taken)
                future.set_exception(error)

    def _take(self) -> tuple[Callable[[], _T], Future[_T]] | None:
        future: Future[_T] = Future()
        try:
            task = next(self._tasks, None)
        except BaseException as error:  # noqa: BLE001  (as in `work`)
            future.set_exception(error)
            self._taken.put(future)
            task = None
        if task is None:
            self._is_over = True
            self._taken.put(None)
            return None
        run, chained = task.run, self._chained
        if task.is_chained:
            run = run if chained is None else partial(_run_after, chained, run)
            self._chained = future
        self._taken.put(future)
        return run, future

    def results(self) -> Iterator[_T]:
        """Yield the results in task order; the first error in this order is raised."""
        while (future := self._taken.get()) is not None:
            yield future.result()
            self._permits.put(None)

    def run_all(self) -> Iterator[_T]:
        """Run the tasks in order without threads, and yield the results."""
        return (task.run() for task in self._tasks)

    def stop(self) -> None:
        """Make the threads end after the tasks that they run."""
        with self._lock:
            self._is_over = True
        self._permits.put(None)


def _run_after(before: Future[_T], run: Callable[[], _T]) -> _T:
    """Run after another task. The wait ends, since the pool starts tasks in order."""
    before.result()
    return run()
