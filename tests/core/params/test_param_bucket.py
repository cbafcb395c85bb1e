"""One bucket: places and strides of full parameters, storage given and taken, flags of who used what."""

from __future__ import annotations

import torch
from torch import nn

from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.comm.streams import FULL_BYTES
from shardckpt.core.config import Offload, Precision
from shardckpt.core.modules.dtensors import memory_order
from shardckpt.core.modules.fqn_and_params import Name, managed_parameters
from shardckpt.core.params.gradient_reduction import ReductionSettings, start_reduce_scatters
from shardckpt.core.params.param_bucket import Bucket, ShardSpec
from tests.kit.ranks.harness import run


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.matrix = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.line = nn.Parameter(torch.arange(5.0))


def made(group, **settings) -> tuple[Bucket, list[torch.Tensor]]:
    module = Uneven()
    values = [p.detach().clone() for p in module.parameters()]
    managed = managed_parameters(module, set())
    return Bucket(managed, group, Name("unit"), ShardSpec(**settings), Precision(), Offload()), values


def gathered(bucket: Bucket) -> None:
    bucket.unsharded.start_all_gather()
    bucket.unsharded.wait_all_gather()


def test_full_parameters_come_back_with_values_and_strides():
    bucket, values = made(ShardGroup(None))
    assert not bucket.unsharded.is_unsharded
    assert bucket.unsharded.params[1].untyped_storage().nbytes() == 0
    gathered(bucket)
    for leaf, value in zip(bucket.unsharded.params, values, strict=True):
        assert torch.equal(leaf, value)
    assert bucket.unsharded.params[1].stride() == (1, 4)
    assert all(leaf.is_leaf and leaf._version == 0 for leaf in bucket.unsharded.params)


def test_full_bytes_are_counted_and_freed():
    before = FULL_BYTES.held
    bucket, _ = made(ShardGroup(None), aligned=True)
    assert FULL_BYTES.held == before
    gathered(bucket)
    assert FULL_BYTES.held == before + 4 * bucket.layout.chunk
    bucket.unsharded.reshard()
    assert FULL_BYTES.held == before


def test_what_keeps_everything_is_never_freed():
    bucket, values = made(ShardGroup(None), keeps_full=True)
    bucket.unsharded.reshard()
    assert bucket.unsharded.is_unsharded
    assert torch.equal(bucket.unsharded.params[3], values[3])
    assert bucket.shard.data_ptr() == bucket.unsharded.params[0].data_ptr()


def test_gathering_again_sees_the_shard_and_not_the_edit_of_the_full_parameter():
    bucket, values = made(ShardGroup(None))
    gathered(bucket)
    bucket.unsharded.params[3].data.fill_(9)
    bucket.unsharded.reshard()
    gathered(bucket)
    assert torch.equal(bucket.unsharded.params[3], values[3])
    bucket.unsharded.params[3].data.fill_(9)
    bucket.write_back()
    bucket.unsharded.reshard()
    gathered(bucket)
    assert bucket.unsharded.params[3].tolist() == [9.0] * 5


def test_a_reduction_averages_and_tells_who_used_what():
    def body(rank, world):
        bucket, _ = made(ShardGroup(torch.distributed.group.WORLD))
        bucket.unsharded.params[1].grad = torch.full((4, 3), float(rank))
        if rank == 1:
            bucket.unsharded.params[0].grad = torch.tensor(6.0)
        start_reduce_scatters([bucket.reducer], ReductionSettings())
        reduced = bucket.reducer.wait_reduce_scatter()
        return reduced.used, reduced.gradient.tolist(), all(leaf.grad is None for leaf in bucket.unsharded.params)

    results = run(3, body)
    assert [used for used, _, _ in results] == [(True, True, False, False)] * 3
    assert [x for _, grad, _ in results for x in grad] == [2.0] + [1.0] * 12 + [0.0] * 5
    assert all(taken for _, _, taken in results)


def test_integers_of_sixteen_bits_are_gathered():
    def body(rank, world):
        module = nn.Module()
        module.table = nn.Parameter(torch.arange(7, dtype=torch.int16), requires_grad=False)
        managed = managed_parameters(module, set())
        group = ShardGroup(torch.distributed.group.WORLD)
        bucket = Bucket(managed, group, Name("u"), ShardSpec(aligned=True), Precision(), Offload())
        gathered(bucket)
        return bucket.unsharded.params[0].tolist(), bucket.unsharded.requires_grad

    assert run(2, body) == [(list(range(7)), False)] * 2


def test_memory_order_of_dense_and_other_tensors():
    assert memory_order(torch.empty(2, 3)) == ()
    assert memory_order(torch.empty(2, 3).t()) == (1, 0)
    assert memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert memory_order(torch.empty(1, 3).expand(2, 3)) == ()
