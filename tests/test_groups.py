"""Ranks talk in bytes, and a failure on one is raised on all."""

from __future__ import annotations

import datetime
import multiprocessing
import pathlib
import tempfile

import pytest
import torch.distributed as dist

from shardckpt.errors import RankError
from shardckpt.groups import Group, LocalGroup, TorchGroup, current_group

FORK = multiprocessing.get_context("fork")


def _rank(work, rank: int, world: int, store: str, results, joined) -> None:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=3)
        )
        joined.wait(20)  # a rank that leaves before another one has connected to it breaks that one's start
        results.put((rank, work(TorchGroup())))
    except Exception as error:  # noqa: BLE001
        results.put((rank, error))


def on_ranks(world: int, work) -> list:
    """Run `work(group)` on `world` forked gloo ranks and return what each gave or raised, in rank order."""
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


def test_a_world_of_one_gives_back_what_it_was_given():
    group = LocalGroup()
    assert (group.rank, group.size, group.all_gather(b"x"), group.broadcast(b"y")) == (0, 1, [b"x"], b"y")
    assert isinstance(current_group(), LocalGroup)


def test_bytes_of_different_lengths_are_gathered_in_rank_order():
    assert on_ranks(3, lambda g: g.all_gather(b"ab" * g.rank)) == [[b"", b"ab", b"abab"]] * 3


def test_one_rank_broadcasts_and_the_others_need_give_nothing():
    assert on_ranks(2, lambda g: g.broadcast(b"manifest" if g.rank == 1 else None, source=1)) == [b"manifest"] * 2


def test_a_failure_on_one_rank_is_raised_on_all_and_names_it():
    def work(group: Group) -> None:
        with group.collective("writing shards"):
            if group.rank == 1:
                raise OSError("no space left")

    first, second = on_ranks(2, work)
    assert isinstance(first, RankError)
    assert first.rank == 1
    assert "writing shards failed on rank 1: OSError: no space left" in str(first)
    assert isinstance(second, OSError)


def test_ranks_that_did_not_fail_hear_what_the_others_say():
    def work(group: Group) -> list[bytes]:
        with group.collective("writing shards") as piggyback:
            piggyback.local = b"of %d" % group.rank
        return [each.rstrip(b"\0") for each in piggyback.gathered]

    assert on_ranks(2, work) == [[b"of 0", b"of 1"]] * 2


def test_a_rank_that_is_gone_is_an_error_that_says_who_waited():
    def work(group: Group) -> object:
        return "left" if group.rank == 1 else group.all_gather(b"hello")

    waited, _ = on_ranks(2, work)
    assert isinstance(waited, RankError)
    assert "rank 0 of 2 could not complete" in str(waited)


def test_a_world_of_one_has_nobody_else_to_hear_from():
    with pytest.raises(RankError):
        LocalGroup().broadcast(None)
