"""Scatter tensors from rank 0, directly into each rank's final memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardckpt.core.params.full_params import Staging
from shardckpt.state.redistribute.flat_to_rows import all_to_all, pack, unpack
from shardckpt.state.redistribute.rank_grid import Ranks

Parts = Sequence[torch.Tensor | None]


def scatter_from_rank0(
    rows: Sequence[Parts] | None,
    into: Parts,
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
    rows: Sequence[Parts],
    into: Parts,
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
