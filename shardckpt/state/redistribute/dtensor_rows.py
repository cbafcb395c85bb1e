"""Scatter data from rank 0; gather or scatter a DTensor's rows along one mesh dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from shardckpt.boxes import chunk_range
from shardckpt.core.modules.dtensors import pad_rows, split_rows, view_as_flat_bytes
from shardckpt.core.params.full_params import Staging
from shardckpt.ranks.torch_group import current_device
from shardckpt.state.redistribute.flat_to_rows import all_to_all, pack, unpack
from shardckpt.state.redistribute.rank_grid import Ranks

_Parts = Sequence[torch.Tensor | None]


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


def scatter_from_rank0(
    rows: Sequence[_Parts] | None,
    into: _Parts,
    group: dist.ProcessGroup | None,
    copies: Ranks,
    *,
    dtype: torch.dtype,
    device: torch.device,
    staging: Staging,
) -> None:
    """Fill this rank's tensors with its parts from rank 0. Collective: one all-to-all."""
    # Rank 0 copies its own parts while it sends the others. A rank with adjacent tensors receives directly into them;
    # other ranks copy the received elements once.
    places = [place for place in into if place is not None and place.numel()]
    count = sum(place.numel() for place in places)
    side_by_side = _in_one_piece(places, dtype, device)
    if rows is not None:
        _give(rows, into, group, dtype=dtype, device=device, staging=staging)
    elif copies.is_first:
        row = staging.place(count, dtype, device) if side_by_side is None else side_by_side
        world = dist.get_world_size(group)
        all_to_all(row, row[:0], [count] + [0] * (world - 1), [0] * world, group).wait()
        if side_by_side is None:
            unpack(row, places)
    if copies.size > 1:
        row = staging.place(count, dtype, device) if side_by_side is None else side_by_side
        if copies.is_first and side_by_side is None:
            pack(places, row)
        copies.broadcast_from_rank0(row)
        if not copies.is_first and side_by_side is None:
            unpack(row, places)


def _give(
    rows: Sequence[_Parts],
    into: _Parts,
    group: dist.ProcessGroup | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    staging: Staging,
) -> None:
    others = [[part for part in row if part is not None] for row in rows[1:]]
    counts = [sum(part.numel() for part in row) for row in others]
    sent = staging.place(sum(counts), dtype, device) if others else None
    pending = None
    if sent is not None:
        pack([part for row in others for part in row], sent)
        pending = all_to_all(sent[:0], sent, [0] * len(rows), [0, *counts], group)
    for place, part in zip(into, rows[0], strict=True):
        if place is not None and part is not None:
            place.copy_(part)
    if pending is not None:
        pending.wait()


def _in_one_piece(places: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Return adjacent tensors as one 1-D tensor; None if they are apart, or have another dtype or device."""
    if not places:
        return torch.empty(0, dtype=dtype, device=device)
    first = places[0]
    storage, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for place in places:
        is_next = place.data_ptr() == at and place.untyped_storage().data_ptr() == storage and place.is_contiguous()
        if not is_next or place.dtype != dtype or place.device != device:
            return None
        at += place.nbytes
    return first.as_strided((sum(place.numel() for place in places),), (1,))
