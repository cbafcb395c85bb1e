"""DTensors and ShardedTensors of any rank in one process: torch's own objects over its fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtensor(whole: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """Return this rank's rows of a tensor as a DTensor on a mesh of one dimension."""
    rank, world = mesh.get_rank(), mesh.size()
    parts = whole.chunk(world, dim)
    local = parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def sharded(whole: torch.Tensor, rank: int, world: int, copy: int = 0) -> ShardedTensor:
    """Return this rank's rows of a tensor as a ShardedTensor of `world` ranks, which have the `copy`-th replica."""
    parts, listed, at = whole.chunk(world), [], 0
    ranks = range(copy * world, (copy + 1) * world)
    group = None if dist.get_world_size() == world else dist.new_group(list(ranks))
    for owner, part in zip(ranks, parts, strict=False):
        offsets = [at, *(0 for _ in whole.shape[1:])]
        listed.append(ShardMetadata(offsets, list(part.shape), f"rank:{owner}/cpu"))
        at += part.shape[0]
    mine: list[Any] = [TensorShard(parts[rank].clone(), listed[rank])] if rank < len(parts) else []
    metadata = ShardedTensorMetadata(listed, whole.shape, TensorProperties(dtype=whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata, process_group=group)
