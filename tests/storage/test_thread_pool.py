"""Saves, restores and conversions from `atexit` and from a thread that outlives the main thread end as any others."""

from __future__ import annotations

import concurrent.futures.thread
import subprocess
import sys
from concurrent.futures import as_completed
from pathlib import Path

import pytest

from shardckpt.offline.write.worker_pool import PoolTask, WorkerPool
from shardckpt.storage.thread_pool import ThreadPool

LAST = """
import atexit, pathlib, sys, threading, time
import torch
import shardckpt

root = pathlib.Path(sys.argv[1])
state = {"w": torch.ones(1 << 22), "v": torch.zeros(1 << 22)}
for name in ("run", "kept"):
    shardckpt.Checkpointer(root / name, keep_last=1).save(1, state)
shardckpt.save(state, "memory://bucket/run/step-1")

def act(number):
    shardckpt.Checkpointer(root / "run").save(number, state)
    kept = shardckpt.Checkpointer(root / "kept", keep_last=1, dedup=True)
    assert kept.restore(state) is not None
    kept.save(number, state)
    assert kept.steps()[-1] == number
    shardckpt.load(state, root / "run" / "step-00000001")
    shardckpt.consolidate(root / "run" / "step-00000001", root / f"out-{number}.safetensors", jobs=4)
    shardckpt.consolidate(root / "run" / "step-00000001", root / f"out-{number}", max_shard_size=1 << 24, jobs=4)
    shardckpt.copy(root / "run" / "step-00000001", root / f"copy-{number}")
    shardckpt.load(state, "memory://bucket/run/step-1")
    assert len(shardckpt.ls(root / "run", metrics=True, proof=True).complete) == number
    shardckpt.prove(root / "run")
    (root / f"done-{number}").touch()

def outlive():
    threading.main_thread().join()
    time.sleep(0.2)  # Python refuses new tasks just after that
    act(2)

threading.Thread(target=outlive).start()
atexit.register(act, 3)
"""


def test_what_begins_after_the_main_thread_has_ended_ends_as_any_other(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", LAST, tmp_path], check=True, timeout=200)
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-2", "done-3"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses threads, as it does while the process ends."""
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)


def fail() -> None:
    raise ValueError("failed")


@pytest.mark.usefixtures("refused")
class TestRefused:
    def test_the_caller_runs_its_tasks_in_order(self) -> None:
        done: list[int] = []
        with ThreadPool(4) as pool:
            assert list(pool.map(lambda each: done.append(each) or -each, [1, 2, 3])) == [-1, -2, -3]
        assert done == [1, 2, 3]

    def test_an_error_is_raised_where_the_result_is_taken(self) -> None:
        with ThreadPool(4) as pool:
            (failed,) = as_completed([pool.submit(fail)])
            with pytest.raises(ValueError, match="failed"):
                failed.result()

    @pytest.mark.parametrize("files", [1, 2])
    def test_tasks_of_files_run_in_order_also_more_than_may_wait(self, files: int) -> None:
        pool = WorkerPool(4, files)
        with pool.run((PoolTask(lambda at=at: at, is_chained=at % 2 == 0) for at in range(20)), ahead=2) as results:
            assert list(results) == list(range(20))
        pool.close()


def test_a_pool_that_was_shut_down_still_refuses_tasks() -> None:
    pool = ThreadPool(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int)
