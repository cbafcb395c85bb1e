"""The harness itself: ranks talk, errors and hangs are reported with the last call of each rank."""

from __future__ import annotations

import os
import pathlib
import time

import pytest
import torch
import torch.distributed as dist

from tests.kit.ranks import harness
from tests.kit.ranks.forks import HUGE, huge_regions
from tests.kit.ranks.harness import RanksError, count, outcomes, raised_everywhere, recorded, run, stored_bytes


def test_ranks_talk_and_give_what_they_computed():
    def body(rank, world):
        value = torch.full((3,), float(rank))
        dist.all_reduce(value)
        return value.tolist()

    assert run(3, body) == [[3.0] * 3] * 3


def test_collectives_are_recorded_with_sizes_and_order():
    def body(rank, world):
        with recorded() as calls:
            dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
            dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
            dist.all_reduce(torch.ones(5))
            dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8), async_op=True).wait()
        return [str(call) for call in calls], count(calls, "reduce_scatter")

    expected = [
        "all_gather(4->8 float32 on 2)",
        "reduce_scatter(8->4 float32 on 2)",
        "all_reduce(5->5 float32 on 2)",
        "reduce_scatter(8->4 float32 on 2)",
    ]
    assert run(2, body) == [(expected, 2)] * 2


def test_the_name_of_the_ranks_group_does_not_depend_on_groups_that_failed(monkeypatch):
    def body(rank, world):
        return dist.group.WORLD.group_name

    before = run(2, body)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK"):
        dist.init_process_group("gloo")
    assert run(2, body) == before


def test_an_exception_comes_back_with_its_bases():
    def body(rank, world):
        raise FileNotFoundError(f"rank {rank} misses it")

    first, second = raised_everywhere(2, body)
    assert first.is_a(OSError)
    assert second.message == "rank 1 misses it"


def test_a_hang_names_the_rank_that_waits_and_where(monkeypatch):
    def body(rank, world):
        if rank == 0:
            dist.all_reduce(torch.ones(7))

    found = outcomes(2, body, timeout=5.0, group_timeout=60.0)
    assert "all_reduce" in found[0].waits
    assert found[0].calls == ["all_reduce(7->7 float32 on 2)"]
    assert found[1].waits is None
    monkeypatch.setattr(harness, "outcomes", lambda *_args, **_options: found)
    with pytest.raises(RanksError, match="rank 0 hangs"):
        run(2, body)


def test_held_bytes_are_counted_once_per_storage():
    def body(rank, world):
        before = stored_bytes()
        whole = torch.zeros(1000)
        parts = [whole[:10], whole[10:]]
        held = stored_bytes() - before
        whole.untyped_storage().resize_(0)
        return held, stored_bytes() - before, len(parts)

    assert run(1, body) == [(4000, 0, 2)]


def test_a_crash_in_native_code_is_told_with_its_stack():
    def body(rank, world):
        if rank == 1:
            os.abort()

    with pytest.raises(RanksError, match="rank 1 died") as raised:
        run(2, body)
    assert "test_harness.py" in str(raised.value)


def test_ranks_that_begin_at_different_times_join_however_short_the_timeout_is():
    def body(rank, world):
        dist.barrier()
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    original = harness._join

    def late(rank, *rest):
        time.sleep(2.0 * rank)
        original(rank, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "_join", late)
        assert run(2, body, group_timeout=1.0) == [1.0, 1.0]


@pytest.mark.skipif(not pathlib.Path("/proc/self/maps").exists(), reason="nothing tells what memory there is")
def test_large_memory_of_the_parent_is_put_on_huge_pages_and_holds_what_it_did():
    held = torch.arange(24 * HUGE // 8)  # beyond 32 MiB, malloc takes no memory that others have divided before
    assert any(start < held.data_ptr() + 2 * HUGE < end for start, end in huge_regions())
    assert run(1, lambda rank, world: int(held.sum())) == [held.numel() * (held.numel() - 1) // 2]
