"""Run work on ranks of each transport, and return what each rank gave or raised."""

from __future__ import annotations

import datetime
import multiprocessing
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardckpt.ranks.bounded_store import BoundedStore
from shardckpt.ranks.group import Group
from shardckpt.ranks.process_group import link_group
from shardckpt.ranks.store_group import StoreGroup
from shardckpt.ranks.torch_group import TorchGroup

FORK = multiprocessing.get_context("fork")


def _rank(work: Callable[[Group], Any], rank: int, world: int, store: str, results: Any, joined: Any) -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=3)
        )
        joined.wait(20)  # a rank that leaves before another one has connected to it breaks that one's start
        results.put((rank, work(TorchGroup())))
    except Exception as error:  # noqa: BLE001
        results.put((rank, error))


def on_torch_ranks(world: int, work: Callable[[Group], Any]) -> list[Any]:
    """Run `work(group)` on forked gloo ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results, joined = FORK.Queue(), FORK.Barrier(world)
        store = str(pathlib.Path(folder) / "store")
        ranks = [FORK.Process(target=_rank, args=(work, r, world, store, results, joined)) for r in range(world)]
        for process in ranks:
            process.start()
        got = dict(results.get(timeout=30) for _ in ranks)
        for process in ranks:
            process.join(10)
    return [got[r] for r in range(world)]


def on_linked_ranks(world: int, work: Callable[[Group], Any]) -> list[Any]:
    """Run `work(group)` on forked ranks with links between them."""
    return on_torch_ranks(world, lambda _: work(link_group()))


def on_store_ranks(
    world: int, work: Callable[[StoreGroup], Any], store: Any = None, silence_s: float = 20.0
) -> list[Any]:
    """Run `work(group)` on threads that share a store."""
    found: dict[int, Any] = {}
    shared = store if store is not None else dist.HashStore()

    def run(rank: int) -> None:
        group = StoreGroup(BoundedStore(shared, 20.0), rank, world, silence_s)
        try:
            with group.live():
                found[rank] = work(group)
        except BaseException as error:  # noqa: BLE001
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return [found[rank] for rank in range(world)]
