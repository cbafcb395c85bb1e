"""Threads carry out tasks in any order; results, errors and files are those of one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from shardckpt.offline.write import worker_pool
from shardckpt.offline.write.worker_pool import PoolTask, WorkerPool, count_threads, limit_threads

MIB = 1 << 20


@pytest.fixture(params=[1, 2], ids=["one file", "two files"])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    pool = WorkerPool(3, request.param)
    yield pool
    pool.close()


def test_results_come_in_order_whichever_task_is_done_first(pool: WorkerPool) -> None:
    def late_if_early(number: int) -> int:
        time.sleep(0.02 * (number % 3 == 0))
        return number

    tasks = (PoolTask(lambda n=n: late_if_early(n)) for n in range(20))
    with pool.run(tasks, 4) as results:
        assert list(results) == list(range(20))


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_so_many_tasks_are_begun_behind_the_one_that_was_taken(pool: WorkerPool, ahead: int) -> None:
    planned: list[int] = []

    def plan() -> Iterator[PoolTask[int]]:
        for number in range(12):
            planned.append(number)
            yield PoolTask(lambda n=number: n)

    with pool.run(plan(), ahead) as results:
        for number in results:
            wait_until(lambda n=number: len(planned) >= min(n + 1 + ahead, 12))  # threads may plan beside this one
            time.sleep(0.002)
            assert len(planned) == min(number + 1 + ahead, 12)


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not is_true() and time.monotonic() < until:
        time.sleep(0.0005)


def test_threads_plan_the_tasks_of_one_file_and_writers_plan_those_of_several() -> None:
    def plan(planners: set[int]) -> Iterator[PoolTask[int]]:
        for _ in range(40):
            planners.add(threading.get_ident())
            yield PoolTask(threading.get_ident)

    own, found = threading.get_ident(), {}
    for files in (1, 2):
        planners: set[int] = set()
        with closing(WorkerPool(3, files)) as pool, pool.run(plan(planners), 3) as results:
            next(results)
            planners.clear()  # the first ones show whether there is more than one
            assert own not in set(results)
        found[files] = planners
    assert own not in found[1] and len(found[1]) <= 3
    assert found[2] == {own}


def test_the_only_task_of_a_file_wakes_no_thread() -> None:
    with closing(WorkerPool(3, 1)) as pool:
        for tasks in ([], [PoolTask(threading.get_ident)]):
            with pool.run(tasks, 3) as results:
                assert list(results) == [threading.get_ident()] * len(tasks)
        assert not pool._pool._threads


def test_an_error_of_the_plan_is_raised_behind_the_results_before_it(pool: WorkerPool) -> None:
    def plan() -> Iterator[PoolTask[int]]:
        for number in range(5):
            yield PoolTask(lambda n=number: n)
        raise ValueError("no plan")

    seen = []
    with pytest.raises(ValueError, match="no plan"), pool.run(plan(), 8) as results:
        seen += results
    assert seen == ([*range(5)] if pool._plans_tasks else [])


def test_the_first_error_in_order_is_raised_once_nothing_runs_any_more(pool: WorkerPool) -> None:
    running, begun, lock = [0], [], threading.Lock()

    def work(number: int) -> int:
        with lock:
            running[0] += 1
            begun.append(number)
        time.sleep(0.05 if number == 3 else 0.01)
        with lock:
            running[0] -= 1
        if number in (3, 4):
            raise ValueError(f"task {number}")
        return number

    seen = []
    with (
        pytest.raises(ValueError, match="task 3"),
        pool.run((PoolTask(lambda n=n: work(n)) for n in range(50)), 6) as done,
    ):
        seen += done  # `extend` keeps what came before the error
    assert running == [0]
    assert max(begun) < 12


def test_leaving_early_waits_for_what_is_under_way_and_drops_the_rest(pool: WorkerPool) -> None:
    ended = []

    def work(number: int) -> int:
        time.sleep(0.05)
        ended.append(number)
        return number

    with pytest.raises(KeyboardInterrupt), pool.run((PoolTask(lambda n=n: work(n)) for n in range(50)), 40) as results:
        next(results)
        raise KeyboardInterrupt
    after = len(ended)
    time.sleep(0.1)
    assert len(ended) == after < 35


def test_a_trivial_task_of_several_files_runs_in_the_thread_that_takes_its_result() -> None:
    tasks = [PoolTask(threading.get_ident, is_trivial=number % 2 == 0) for number in range(6)]
    with closing(WorkerPool(3, 2)) as pool, pool.run(tasks, 2) as done:
        assert [ident == threading.get_ident() for ident in done] == [True, False] * 3


@pytest.mark.timeout(20)
def test_a_signal_in_a_trivial_task_ends_the_block_at_once() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with (
        closing(WorkerPool(2, 2)) as pool,
        pytest.raises(KeyboardInterrupt),
        pool.run([PoolTask(interrupt, is_trivial=True)], 1) as results,
    ):
        next(results)


def test_chained_tasks_run_one_after_the_other_among_others(pool: WorkerPool) -> None:
    order: list[int] = []

    def work(number: int) -> int:
        time.sleep(0.001 * (7 - number % 7))
        if number % 2:
            order.append(number)
        return number

    with pool.run((PoolTask(lambda n=n: work(n), is_chained=bool(n % 2)) for n in range(30)), 6) as results:
        assert list(results) == list(range(30))
    assert order == sorted(order)


def test_what_waits_for_a_chained_task_that_failed_is_not_run(pool: WorkerPool) -> None:
    ran = []

    def work(number: int) -> int:
        ran.append(number)
        if number == 1:
            raise ValueError("damaged")
        return number

    with (
        pytest.raises(ValueError, match="damaged"),
        pool.run((PoolTask(lambda n=n: work(n), is_chained=True) for n in range(9)), 4) as done,
    ):
        list(done)
    assert ran == [0, 1]


@pytest.mark.parametrize(
    ("nbytes", "max_memory", "cores", "expected"),
    [
        (4 << 30, 256 * MIB, 64, 4),
        (4 << 30, 256 * MIB, 2, 2),
        (4 << 30, 24 * MIB, 64, 1),
        (4 << 30, 72 * MIB, 64, 3),
        (40 * MIB, 256 * MIB, 64, 2),
        (0, 256 * MIB, 64, 1),
    ],
)
def test_threads_are_as_many_as_help(
    nbytes: int, max_memory: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(worker_pool, "count_cores", lambda: cores)
    assert count_threads(nbytes, max_memory, is_local=True) == expected
    assert count_threads(nbytes, max_memory, is_local=False) == 1


def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "count_cores", lambda: 8)
    for processes, threads in (("1", 4), ("4", 2), ("8", 1), ("64", 1), ("", 4), ("0", 4), ("-2", 4), ("two", 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert count_threads(4 << 30, 256 * MIB, is_local=True) == threads


def test_threads_that_were_asked_for_have_room() -> None:
    assert limit_threads(8, 1 << 30) == 8
    assert limit_threads(8, 4 * MIB) == 1
    assert limit_threads(8, 21 * MIB) == 4
    assert limit_threads(1, 0) == 1
