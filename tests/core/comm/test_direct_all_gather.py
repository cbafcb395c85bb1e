"""Large shards on the CPU are received where they are needed; all others by the collective of the backend."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.errors import RankError
from tests.kit.models.under_test import TORCH
from tests.kit.ranks import harness
from tests.kit.ranks.streams import checked

pytestmark = pytest.mark.skipif(TORCH, reason="all-gathers of the engine")
if not TORCH:
    from shardckpt.core.comm.collectives import MIN_SHARD_BYTES, Pending, ShardGroup

LARGE = MIN_SHARD_BYTES // 4  # elements of the smallest shard in fp32 that is sent directly


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(numel) % 100 + rank).to(dtype)


def expected(world: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([values(rank, numel, dtype) for rank in range(world)])


def group(**more: Any) -> Any:
    return ShardGroup(dist.group.WORLD, **more)


def started(rank: int, world: int, numel: int, *, within: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Return the output of an all-gather that was started; `within` says that the shard is a part of it."""
    full, shard = torch.zeros(world * numel, dtype=dtype), values(rank, numel, dtype)
    if within:
        shard = full[rank * numel : (rank + 1) * numel].copy_(shard)
    return full, group().all_gather(full, shard, "gather blocks.1")


def operations(calls: list[harness.Call]) -> set[str]:
    return {call.op for call in calls}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=["fp32", "fp8"])
def test_large_shards_are_sent_directly_in_rank_order(world, dtype):
    def body(rank, world):
        numel = MIN_SHARD_BYTES // dtype.itemsize
        for within in (False, True):
            with harness.recorded() as calls:
                full, pending = started(rank, world, numel, within=within, dtype=dtype)
                pending.wait()
            assert operations(calls) == {"send", "recv"}
            assert torch.equal(full.view(torch.uint8), expected(world, numel, dtype).view(torch.uint8))

    harness.run(world, body)


def test_all_gathers_may_be_waited_for_in_another_order():
    def body(rank, world):
        outputs = [started(rank, world, LARGE + extra) for extra in range(3)]
        for full, pending in reversed(outputs):
            pending.wait()
            assert torch.equal(full, expected(world, len(full) // world))

    harness.run(2, body)


def test_small_shards_are_gathered_by_the_backend():
    def body(rank, world):
        with harness.recorded() as calls:
            full, pending = started(rank, world, LARGE - 1)
            pending.wait()
        assert operations(calls) == {"all_gather"}
        assert torch.equal(full, expected(world, LARGE - 1))

    harness.run(2, body)


def test_a_device_with_streams_uses_the_collective_of_its_backend():
    def body(rank, world):
        with checked(), harness.recorded() as calls:
            started(rank, world, LARGE)[1].wait()
        assert operations(calls) == {"all_gather"}

    harness.run(2, body)


def test_a_group_that_compares_its_collectives_gets_one():
    """With `TORCH_DISTRIBUTED_DEBUG=DETAIL`."""

    def body(rank, world):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        compared = ShardGroup(dist.new_group())
        full = torch.zeros(world * LARGE)
        with harness.recorded() as calls:
            compared.all_gather(full, values(rank, LARGE), "gather blocks.1").wait()
        assert operations(calls) == {"all_gather"}
        assert torch.equal(full, expected(world, LARGE))

    harness.run(2, body)


def memory(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def test_an_all_gather_of_large_shards_needs_no_memory_beside_its_output():
    def body(rank, world):
        full, shard = torch.zeros(32 << 20), torch.ones(16 << 20)
        group().all_gather(full, shard, "gather blocks.1").wait()  # memory of threads and connections
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins now
        before = memory("VmRSS")
        group().all_gather(full, shard, "gather blocks.1").wait()
        assert memory("VmHWM") - before < full.nbytes // 8
        assert full.min() == 1

    harness.run(2, body)


class Interrupted:
    """A message that ends the wait for it, as a signal of the system does."""

    def wait(self, *_: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_of_one_rank_leaves_the_group_usable():
    def body(rank, world):
        full, pending = started(rank, world, LARGE)
        if rank == 0:
            pending.work._works.insert(0, Interrupted())
            with pytest.raises(KeyboardInterrupt):
                pending.wait()
        pending.wait()
        assert torch.equal(full, expected(world, LARGE))
        for _ in range(2):
            full, pending = started(rank, world, LARGE + 1)
            pending.wait()
            assert torch.equal(full, expected(world, LARGE + 1))

    harness.run(2, body, group_timeout=5.0)


def test_the_error_of_a_rank_that_is_gone_names_the_unit():
    def body(rank, world):
        if rank == 1:
            return None
        full, pending = started(rank, world, LARGE)
        with pytest.raises(RankError, match=r"could not gather blocks\.1") as caught:
            pending.wait()
        assert isinstance(pending, Pending)
        full.untyped_storage().resize_(0)  # no message is received into it any more
        pending.wait()
        return caught.value.rank

    assert harness.run(2, body, timeout=harness.JOIN_TIMEOUT / 2, group_timeout=1.0) == [0, None]


def test_a_shard_that_only_one_rank_sends_directly_is_an_error_of_both():
    """Of unequal sizes; gloo itself ends the process where both sizes are sent in the same way."""

    def body(rank, world):
        _, pending = started(rank, world, LARGE - 8 if rank else LARGE + 8)
        with pytest.raises(RankError, match=r"gather blocks\.1"):
            pending.wait()

    harness.run(2, body, group_timeout=1.0)


def test_all_gathers_of_very_many_units_at_once_arrive_and_are_let_go_of():
    def body(rank, world):
        outputs = [started(rank, world, LARGE + extra) for extra in range(200)]
        watched = [weakref.ref(full.untyped_storage()) for full, _ in outputs]
        for number in range(0, 200, 2):
            outputs[number][1].wait()
        for number in range(199, 0, -2):
            outputs[number][1].wait()
        fulls = [full for full, _ in outputs]
        wrong = [extra for extra, full in enumerate(fulls) if not torch.equal(full, expected(world, LARGE + extra))]
        held = sum(storage() is not None for storage in watched)
        fulls.clear()
        del outputs[:]
        return wrong, held, sum(storage() is not None for storage in watched)

    assert harness.run(2, body) == [([], 200, 0)] * 2
