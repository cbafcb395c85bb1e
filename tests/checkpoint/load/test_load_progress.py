"""`on_progress` of a load counts the bytes of this rank, and stops every rank if it raises an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardckpt
from shardckpt.checkpoint.load import tensor_loader
from shardckpt.results import Progress
from tests.kit.ranks.harness import outcomes, run

LARGE, SMALL = 60_000, 24


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "step-1"
    small = {f"w{at}": torch.full((SMALL,), float(at)) for at in range(20)}
    shardckpt.save({"model": {"large": torch.ones(LARGE), **small}, "scale": torch.ones(3)}, path)
    return path


def empty(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    small = {f"w{at}": torch.zeros(SMALL, dtype=dtype) for at in range(20)}
    return {"model": {"large": torch.zeros(LARGE, dtype=dtype), **small}, "scale": torch.zeros(3, dtype=dtype)}


def check(seen: list[Progress], nbytes: int) -> None:
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[-1] == nbytes
    assert {progress.total_bytes for progress in seen} == {nbytes}


NBYTES = 4 * (LARGE + 20 * SMALL + 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_bytes_are_counted_as_they_are_stored(dtype: torch.dtype, step: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tensor_loader, "BATCH_BYTES", 1 << 14)
    seen: list[Progress] = []
    shardckpt.load(empty(dtype), step, cast=True, on_progress=seen.append)
    assert len(seen) > 4
    check(seen, NBYTES)


def test_a_load_without_a_state_counts_too(step: Path) -> None:
    seen: list[Progress] = []
    shardckpt.load(step, on_progress=seen.append)
    check(seen, NBYTES)


def test_a_restore_takes_it_too(step: Path) -> None:
    seen: list[Progress] = []
    assert shardckpt.Checkpointer(step.parent).restore(empty(), on_progress=seen.append) is not None
    check(seen, NBYTES)


def test_each_rank_counts_its_own_shards_also_those_that_it_is_sent(step: Path) -> None:
    def body(rank: int, world: int) -> bool:
        for broadcast_reads in (False, True):
            state, seen = empty(), list[Progress]()
            mesh = init_device_mesh("cpu", (world,))
            state["model"]["large"] = distribute_tensor(state["model"]["large"], mesh, [Shard(0)])
            shardckpt.load(state, step, broadcast_reads=broadcast_reads, on_progress=seen.append)
            check(seen, NBYTES - 4 * LARGE // 2)
            assert state["model"]["large"].to_local().eq(1).all()
        return True

    assert run(2, body) == [True, True]


@pytest.mark.parametrize("broadcast_reads", [False, True])
def test_an_error_of_one_rank_stops_all(broadcast_reads: bool, step: Path) -> None:
    def body(rank: int, world: int) -> None:
        def stop(progress: Progress) -> None:
            if rank == 1:
                raise ValueError("enough")

        shardckpt.load(empty(), step, broadcast_reads=broadcast_reads, on_progress=stop)

    found = outcomes(2, body)
    assert all("enough" in str(each) for each in found), found
