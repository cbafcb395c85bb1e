"""Gather a DTensor's rows to rank 0, or scatter them, along one mesh dimension."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from shardckpt.boxes import chunk_range
from shardckpt.core.modules.dtensors import pad_rows, split_rows, view_as_flat_bytes
from shardckpt.core.params.full_params import Staging
from shardckpt.groups import current_device
from shardckpt.state.redistribute.rank_grid import Ranks
from shardckpt.state.redistribute.scatter_from_rank0 import scatter_from_rank0


def direction(kept: DTensor) -> int | None:
    """Return the only mesh dimension that shards a DTensor; None if not exactly one."""
    sharded = [at for at, placement in enumerate(kept.placements) if not placement.is_replicate()]
    return sharded[0] if len(sharded) == 1 and type(kept.placements[sharded[0]]) is Shard else None


def gather_rows(kept: DTensor, at: int, part: torch.Tensor) -> torch.Tensor | None:
    """Gather a DTensor's rows to rank 0 of its mesh; other ranks return None. Collective."""
    mesh, place = kept.device_mesh, kept.device_mesh.get_coordinate()
    if place is None or any(where for axis, where in enumerate(place) if axis != at):
        return None  # ranks with copies of rows do nothing
    dim, counts = _rows(kept, at)
    own = pad_rows(part, dim, counts[0])
    rows = [torch.empty_like(own) for _ in counts] if place[at] == 0 else None
    seen = [view_as_flat_bytes(row) for row in rows] if rows is not None else None
    dist.gather(view_as_flat_bytes(own), seen, group=mesh.get_group(at), group_dst=0)
    if rows is None:
        return None
    return torch.cat([row.narrow(dim, 0, n) for row, n in zip(rows, counts, strict=True)], dim)


def scatter_rows(
    kept: DTensor, at: int, value: torch.Tensor | None, place: torch.Tensor, *, dtype: torch.dtype, staging: Staging
) -> None:
    """Scatter a full tensor's rows from rank 0 of the mesh. Collective."""
    mesh = kept.device_mesh
    dim, counts = _rows(kept, at)
    rows = None if value is None else [[part] for part in torch.split(value, list(counts), dim)]
    copies = Ranks(tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if axis != at))
    device = get_mesh_device(kept)
    scatter_from_rank0(rows, [place], mesh.get_group(at), copies, dtype=dtype, device=device, staging=staging)


def has_rows_everywhere(rows: int, ranks: int) -> bool:
    """Return True if every rank gets at least one row."""
    return chunk_range(rows, ranks, ranks - 1)[1] > 0


def get_mesh_device(kept: DTensor) -> torch.device:
    """Return the device on which a DTensor's mesh communicates; the local tensor may be offloaded."""
    kind = kept.device_mesh.device_type
    return kept.device if kept.device.type == kind else current_device(kind)


def _rows(kept: DTensor, at: int) -> tuple[int, tuple[int, ...]]:
    """Return the sharded dimension and each rank's number of rows; rank 0 has most."""
    placement = kept.placements[at]
    assert isinstance(placement, Shard), "this mesh dimension shards it"
    return placement.dim, split_rows(kept.shape[placement.dim], kept.device_mesh.size(at))
