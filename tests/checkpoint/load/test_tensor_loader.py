"""A rank reads local files with as many threads as its share of the machine's cores, and at most two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.checkpoint.load import tensor_loader
from shardckpt.checkpoint.load.tensor_loader import choose_readers, count_neighbors
from shardckpt.storage.thread_pool import ThreadPool
from tests.kit.ranks.harness import run

NUMEL = 60_000


@pytest.mark.parametrize(
    ("cores", "neighbors", "readers"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (2, 4, 1), (8, 4, 2), (64, 8, 2), (7, 4, 1)]
)
def test_ranks_of_one_machine_share_its_cores(
    cores: int, neighbors: int, readers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_loader, "count_cores", lambda: cores)
    assert choose_readers(neighbors) == readers


def test_ranks_are_counted_on_their_own_machine() -> None:
    assert count_neighbors([b"a", b"b", b"a", b"a"]) == [3, 1, 3, 3]


@pytest.mark.parametrize(("cores", "threads"), [(2, 0), (3, 0), (4, 2)])
def test_ranks_that_fill_the_cores_start_no_threads(
    cores: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_loader, "count_cores", lambda: cores)
    monkeypatch.setattr(tensor_loader, "BATCH_BYTES", 1 << 14)
    shardckpt.save({"w": torch.ones(NUMEL)}, tmp_path / "s")

    def body(rank: int, world: int) -> int:
        started = 0

        class Pool(ThreadPool):
            def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
                future = super().submit(fn, *args, **more)
                nonlocal started
                started = max(started, len(self._threads))
                return future

        tensor_loader.ThreadPool = Pool  # type: ignore[misc]  # of this forked rank
        state = {"w": torch.zeros(NUMEL)}
        shardckpt.load(state, tmp_path / "s")
        assert state["w"].eq(1).all()
        return started

    assert run(2, body) == [threads, threads]
