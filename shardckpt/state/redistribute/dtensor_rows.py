"""Gather rows of a DTensor to rank 0, or scatter them, if one mesh dimension shards it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from shardckpt.boxes import chunk_range
from shardckpt.core.params.full_params import Staging
from shardckpt.groups import current_device
from shardckpt.state.redistribute.rank_grid import Ranks
from shardckpt.state.redistribute.scatter_from_rank0 import scatter_from_rank0


def chunks(rows: int, ranks: int) -> tuple[int, ...]:
    """Return how many rows each rank has; the last ones may have fewer or none."""
    return tuple(chunk_range(rows, ranks, rank)[1] for rank in range(ranks))


def direction(kept: DTensor) -> int | None:
    """Return the mesh dimension that shards a DTensor into rows; None if there is not exactly one."""
    sharded = [at for at, placement in enumerate(kept.placements) if not placement.is_replicate()]
    return sharded[0] if len(sharded) == 1 and type(kept.placements[sharded[0]]) is Shard else None


def gather_rows(kept: DTensor, at: int, part: torch.Tensor) -> torch.Tensor | None:
    """Gather a tensor that is sharded as a DTensor to rank 0 of its mesh. Collective.

    Args:
        kept: A DTensor with the placements.
        at: The mesh dimension that shards it.
        part: This rank's rows, where the ranks of the mesh exchange parts.

    Returns:
        The full tensor on rank 0; None elsewhere. Ranks that have copies of rows do nothing.
    """
    mesh, place = kept.device_mesh, kept.device_mesh.get_coordinate()
    if place is None or any(where for axis, where in enumerate(place) if axis != at):
        return None
    dim, counts = _rows(kept, at)
    own = _padded(part, dim, counts[0])
    rows = [torch.empty_like(own) for _ in counts] if place[at] == 0 else None
    seen = [_bytes(row) for row in rows] if rows is not None else None
    dist.gather(_bytes(own), seen, group=mesh.get_group(at), group_dst=0)
    if rows is None:
        return None
    return torch.cat([row.narrow(dim, 0, n) for row, n in zip(rows, counts, strict=True)], dim)


def scatter_rows(
    kept: DTensor, at: int, value: torch.Tensor | None, place: torch.Tensor, *, dtype: torch.dtype, staging: Staging
) -> None:
    """Copy this rank's rows of a full tensor on rank 0 of the mesh. Collective.

    Args:
        kept: A DTensor with the target placements.
        at: The mesh dimension that shards it.
        value: The full tensor on rank 0; None elsewhere.
        place: Where the rows go.
        dtype: The type in which they travel.
        staging: Memory that they pass through.
    """
    mesh = kept.device_mesh
    dim, counts = _rows(kept, at)
    rows = None if value is None else [[part] for part in torch.split(value, list(counts), dim)]
    copies = Ranks(tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if axis != at))
    device = get_mesh_device(kept)
    scatter_from_rank0(rows, [place], mesh.get_group(at), copies, dtype=dtype, device=device, staging=staging)


def has_rows_everywhere(rows: int, ranks: int) -> bool:
    """Return True if every rank gets some of a parameter's rows; the last ones may get none."""
    return chunk_range(rows, ranks, ranks - 1)[1] > 0


def get_mesh_device(kept: DTensor) -> torch.device:
    """Return the device on which a DTensor's ranks exchange parts; its own local tensor may be offloaded to the CPU."""
    kind = kept.device_mesh.device_type
    return kept.device if kept.device.type == kind else current_device(kind)


def _rows(kept: DTensor, at: int) -> tuple[int, tuple[int, ...]]:
    """Return the sharded dimension and the number of rows of each rank; the first has most."""
    placement = kept.placements[at]
    assert isinstance(placement, Shard), "this mesh dimension shards it"
    return placement.dim, chunks(kept.shape[placement.dim], kept.device_mesh.size(at))


def _padded(part: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    if part.shape[dim] == rows:
        return part.contiguous()
    padded = part.new_zeros([rows if d == dim else n for d, n in enumerate(part.shape)])
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
