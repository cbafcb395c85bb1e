"""A wrapper's process groups, from groups, a mesh, or the ranks' nodes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardckpt.core.api import ShardingStrategy
from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.errors import ArgumentError, ArgumentTypeError
from shardckpt.torchrun import local_world_size


def resolve(strategy: ShardingStrategy, given: Any, mesh: DeviceMesh | None, *, by_hand: bool) -> ShardGroup:
    """Return the groups that a strategy shards and replicates over."""
    if given is not None and mesh is not None:
        raise ArgumentError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them"
        )
    if strategy.is_hybrid:
        return _hybrid(strategy, given, mesh, by_hand=by_hand)
    if mesh is not None:
        if mesh.ndim != 1:
            raise ArgumentError(
                "the mesh must have one dimension",
                where=strategy.name,
                found=f"{mesh.ndim} dimensions",
                fix="Give one of its dimensions (mesh['NAME']), or use HYBRID_SHARD for a mesh of (replicate, shard).",
            )
        given = mesh.get_group()
    group = given if given is not None else _world()
    if isinstance(group, (tuple, list)) or not (hasattr(group, "rank") and hasattr(group, "size")):
        raise ArgumentTypeError(
            f"{strategy} expects process_group to be one process group but got {type(group)}",
            fix="Pairs of groups are for hybrid strategies.",
        )
    if strategy is ShardingStrategy.NO_SHARD:
        if group.size() > 1:
            warnings.warn(
                "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use "
                "`DistributedDataParallel` instead",
                FutureWarning,
                stacklevel=4,
            )
        return ShardGroup(None, group)
    return ShardGroup(group, mesh=mesh)


def _hybrid(strategy: ShardingStrategy, given: Any, mesh: DeviceMesh | None, *, by_hand: bool) -> ShardGroup:
    if mesh is not None:
        if mesh.ndim != 2:
            raise ArgumentError(
                f"Expected device_mesh to have ndim=2 but got {mesh.ndim}", fix="Give a mesh of (replicate, shard)."
            )
        return ShardGroup(mesh.get_group(1), mesh.get_group(0), mesh=mesh)
    if given is None:
        if by_hand:
            raise ArgumentError(
                f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh",
                fix="Create the groups once, and pass them to every unit in the model.",
            )
        return _build_node_groups()
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(g, dist.ProcessGroup) for g in given)):
        raise ArgumentError(
            "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] "
            f"but got {type(given)}",
            fix="Pass (shard group, replicate group).",
        )
    return ShardGroup(given[0], given[1])


def ranks_per_node(world: int) -> int:
    """Return the number of ranks per node, or raise ArgumentError if it does not divide all ranks."""
    # torchrun sets `LOCAL_WORLD_SIZE`; otherwise a node has one rank per accelerator, or all ranks without
    # accelerators.
    setting = local_world_size()
    size = setting or torch.accelerator.device_count() or world
    if size > world or world % size:
        raise ArgumentError(
            "hybrid strategies need the same number of ranks on every node",
            found=f"{world} ranks, LOCAL_WORLD_SIZE={setting or 'not set'}, {size} to a node",
            fix="Set LOCAL_WORLD_SIZE, or give a device_mesh of (replicate, shard).",
        )
    return size


def _build_node_groups() -> ShardGroup:
    """Create groups to shard within a node and to replicate across nodes. Collective."""
    world = _world()
    count = dist.get_world_size(world)
    size = ranks_per_node(count)
    nodes = [list(range(first, first + size)) for first in range(0, count, size)]
    copies = [list(same) for same in zip(*nodes, strict=True)]
    shard, _ = dist.new_subgroups_by_enumeration(nodes)  # type: ignore[no-untyped-call]
    replicate, _ = dist.new_subgroups_by_enumeration(copies)  # type: ignore[no-untyped-call]
    return ShardGroup(shard, replicate)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise ArgumentError(
            "Default process group has not been initialized", fix="Call torch.distributed.init_process_group first."
        )
    return world
