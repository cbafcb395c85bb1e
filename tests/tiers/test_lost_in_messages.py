"""A rank that is lost in the middle of a copy between nodes: the others name it, end, and lose no step before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shardckpt import Checkpointer, PeerMemory
from tests.kit.ranks.harness import run
from tests.kit.ranks.message_ends import ENDS, SIDES, VICTIMS, WORLD, end_in_message, find_named_ranks, survive
from tests.kit.runs.tier_runs import enter

ROWS = torch.arange(7_500_000.0).reshape(30, 250_000)
"""Of which each rank has 10 MB: a copy is more than one piece."""
LARGE = 2 << 20
"""Bytes of a piece, more than a small message."""


def make_state(world: int, step: int) -> dict:
    mesh = init_device_mesh("cpu", (world,))
    return {"w": distribute_tensor(ROWS * step, mesh, [Shard(0)]), "step": step}


def begin(rank: int, root: Path, nodes: str, copies: int) -> Checkpointer:
    enter(nodes[rank])
    return Checkpointer(root / "run", save_every=2, tiers=[PeerMemory(copies=copies)])


def restore(rank: int, world: int, root: Path) -> tuple[int | None, bool]:
    """Restore on new ranks; return the step, and whether all values are its own."""
    into = make_state(world, 0)
    step = begin(rank, root, "abc", copies=0).restore(into)
    return step, torch.equal(into["w"].full_tensor(), ROWS * (step or 0)) and into["step"] == step


@ENDS
@SIDES
@VICTIMS
@pytest.mark.parametrize("least", [1, LARGE], ids=["marks", "pieces"])
def test_a_rank_lost_in_a_capture_is_named_and_the_step_before_stays(tmp_path, monkeypatch, how, side, victim, least):
    def body(rank: int, world: int) -> set[int]:
        ck, last = begin(rank, tmp_path, "abc", copies=1), make_state(world, 4)
        ck.save(2, make_state(world, 2))
        ck.wait()
        torch.distributed.barrier()
        if rank == victim:
            end_in_message(tmp_path, side, how, least)
        ck.save(3, make_state(world, 3))
        return find_named_ranks(ck.wait, lambda: ck.save(4, last))

    for named in survive(body, tmp_path, victim, monkeypatch):
        assert victim in named
    (first, *others) = run(WORLD, restore, tmp_path)
    assert first in {(2, True), (3, True)} and others == [first] * 2


@ENDS
@SIDES
@VICTIMS
def test_a_rank_lost_in_a_restore_from_others_memory_is_named_and_new_ranks_restore(
    tmp_path, monkeypatch, how, side, victim
):
    def capture(rank: int, world: int) -> None:
        ck = begin(rank, tmp_path, "abc", copies=0)
        for step in (2, 3):
            ck.save(step, make_state(world, step))
        ck.wait()

    def body(rank: int, world: int) -> set[int]:
        ck = begin(rank, tmp_path, "bca", copies=0)
        into, last = make_state(world, 0), make_state(world, 4)
        if rank == victim:
            end_in_message(tmp_path, side, how, LARGE)
        return find_named_ranks(lambda: ck.restore(into), lambda: ck.save(4, last))

    run(WORLD, capture)
    for named in survive(body, tmp_path, victim, monkeypatch):
        assert victim in named
    assert run(WORLD, restore, tmp_path) == [(3, True)] * WORLD
