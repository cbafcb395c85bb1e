"""Convert ShardedTensors to DTensors; torch's wrapper returns them without a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from shardckpt.boxes import chunk_box
from shardckpt.core.modules.dtensors import wrap_local
from shardckpt.errors import ShardckptError
from shardckpt.state.adapters.engine_flat import EngineFlatAdapter
from shardckpt.state.adapters.model_index import ModelIndex, get_mesh
from shardckpt.state.keys.kinds import is_flat_part, is_sharded_tensor

MeshPlacements = tuple[DeviceMesh, tuple[Placement, ...]]
# Offsets and sizes of boxes, by rank with elements.
Rows = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]


class ShardedTensorError(ShardckptError, ValueError):
    """A ShardedTensor is sharded as no DTensor can be."""


def get_local_part(value: Any) -> torch.Tensor:
    """Return a ShardedTensor's shard on this rank; an empty tensor without a shard."""
    shards = value.local_shards()
    if shards:
        part = shards[0].tensor
        assert isinstance(part, torch.Tensor)
        return part
    return torch.empty((0, *value.shape[1:]), dtype=value.dtype)


def to_local_parts(values: Mapping[str, Any], index: ModelIndex) -> dict[str, Any]:
    """Return a LOCAL state with this rank's shards instead of ShardedTensors."""
    has_flat = any(
        isinstance(adapter, EngineFlatAdapter) and adapter.flat_name is not None for adapter in index.adapters
    )
    return {
        name: get_local_part(value) if is_flat_part(name, value) else value
        for name, value in values.items()
        if has_flat or not is_flat_part(name, value)
    }


def to_dtensors(values: Mapping[str, Any], index: ModelIndex) -> dict[str, Any]:
    """Convert ShardedTensors to DTensors, on the mesh of the model's own parameter if it fits."""
    if not any(map(is_sharded_tensor, values.values())):
        return dict(values)
    placements = get_placements(index)
    return {
        name: as_dtensor(name, value, placements.get(index.aliases.get(name, name)))
        if is_sharded_tensor(value)
        else value
        for name, value in values.items()
    }


def optim_state_to_dtensors(state: Mapping[Any, Mapping[str, Any]], index: ModelIndex) -> dict[Any, Mapping[str, Any]]:
    """Convert ShardedTensors in an optimizer's state, like `to_dtensors`."""
    if not any(is_sharded_tensor(value) for slots in state.values() for value in slots.values()):
        return dict(state)
    placements = get_placements(index)
    return {
        name: {
            slot: as_dtensor(f"{name}/{slot}", value, placements.get(name)) if is_sharded_tensor(value) else value
            for slot, value in slots.items()
        }
        for name, slots in state.items()
    }


def get_placements(index: ModelIndex) -> dict[str, MeshPlacements]:
    """Return meshes and placements for the model's sharded parameters."""
    return {
        entry.name: placed
        for adapter in index.adapters
        for entry, placed in zip(adapter.entries, adapter.placements(), strict=True)
        if placed is not None
    }


def as_dtensor(name: str, value: Any, best: MeshPlacements | None) -> DTensor:
    """Convert a ShardedTensor to a DTensor without communication, on the best mesh if it fits, else on all ranks."""
    rows: Rows = {
        shard.placement.rank(): (tuple(shard.shard_offsets), tuple(shard.shard_sizes))
        for shard in value.metadata().shards_metadata
    }
    own = get_local_part(value)
    everyone = get_mesh(dist.group.WORLD, own.device)
    assert everyone is not None, "there are ranks, or there would be no ShardedTensor"
    for mesh, placements in [*([best] if best else []), (everyone, (Shard(0),))]:
        if rows == _rows(mesh, placements, value.shape):
            stride = torch.empty(value.shape, device="meta").stride()
            return wrap_local(own, mesh, placements, value.shape, stride)
    raise ShardedTensorError(
        "a ShardedTensor must be split into rows as a DTensor over these ranks",
        where=name,
        found=", ".join(f"{size} at {at} on rank {rank}" for rank, (at, size) in sorted(rows.items())[:4]),
        fix="Take the state as FULL, or save it with torch.distributed.checkpoint.",
    )


def _rows(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> Rows | None:
    """Return a DTensor's boxes by rank; None if not split into rows."""
    coordinate = mesh.get_coordinate()
    is_by_rows = placements[-1] == Shard(0) and all(placement.is_replicate() for placement in placements[:-1])
    if coordinate is None or not is_by_rows or not shape:
        return None
    ranks = mesh.mesh[tuple(coordinate[:-1])].tolist()
    boxes = {rank: chunk_box(tuple(shape), 0, len(ranks), at) for at, rank in enumerate(ranks)}
    return {rank: box for rank, box in boxes.items() if box.size[0]}
