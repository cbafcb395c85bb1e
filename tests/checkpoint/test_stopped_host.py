"""The first rank hosts the store of the group, as under `env://` and SLURM, and is stopped: the others hear of it."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardckpt
import shardckpt.checkpointer
from tests.kit.stores.servers import free_port

FORK = multiprocessing.get_context("fork")
TIMEOUT = 4.0  # a busy machine needs a second and more for what comes before the stop


def rank_body(rank: int, port: int, path: Path, how: str, told) -> None:
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=20)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=patience, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=TIMEOUT))
    state = {"t": torch.arange(2000.0)}
    if how != "first save":
        shardckpt.save(state, path / "a")
        shardckpt.async_save(state, path / "b").result()
    dist.barrier()
    told.send("ready")
    if rank == 0:
        time.sleep(60)
    time.sleep(0.3)
    began = time.monotonic()
    try:
        if how == "load":
            shardckpt.load(state, path / "a")
        elif how == "async_save":
            shardckpt.async_save(state, path / "c").result()
        else:
            shardckpt.save(state, path / "c")
        told.send(("returned", 0.0))
    except shardckpt.errors.RankError as error:
        told.send((str(error), time.monotonic() - began))
    os._exit(0)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["first save", "save", "async_save", "load"])
def test_a_stopped_first_rank_that_hosts_the_store_is_named_within_the_timeout(tmp_path: Path, how: str) -> None:
    port, pipes, ranks = free_port(), [FORK.Pipe() for _ in range(2)], []
    for rank in range(2):
        ranks.append(FORK.Process(target=rank_body, args=(rank, port, tmp_path, how, pipes[rank][1]), daemon=True))
        ranks[rank].start()
    try:
        for ours, _ in pipes:
            assert ours.poll(30), "the ranks joined"
            assert ours.recv() == "ready"
        os.kill(ranks[0].pid, signal.SIGSTOP)
        assert pipes[1][0].poll(TIMEOUT + 15), "rank 1 waits for ever"
        message, seconds = pipes[1][0].recv()
    finally:
        for process in ranks:
            process.kill()
            process.join(10)
    assert message.startswith("rank 0 of 2 is gone or did not answer in ")
    assert seconds < TIMEOUT + 2.5 + 2.0
