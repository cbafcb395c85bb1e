"""All-to-all for packed elements, sent as bytes so that every dtype is supported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def pack(parts: Sequence[torch.Tensor], row: torch.Tensor) -> None:
    """Copy tensors into a row's consecutive elements."""
    if all(part.dtype == row.dtype and part.device == row.device and part.is_contiguous() for part in parts):
        if parts:
            torch.cat([part.view(-1) for part in parts], out=row)
        return
    for part, place in zip(parts, torch.split(row, [part.numel() for part in parts]), strict=True):
        place.view(part.shape).copy_(part)


def unpack(row: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """Copy a row's consecutive elements to destinations."""
    for place, part in zip(places, torch.split(row, [place.numel() for place in places]), strict=True):
        place.copy_(part.view(place.shape))


def all_to_all(
    taken: torch.Tensor,
    given: torch.Tensor,
    takes: Sequence[int],
    gives: Sequence[int],
    group: dist.ProcessGroup | None,
) -> dist.Work:
    """Start an all-to-all with uneven splits. Collective; the caller waits, and keeps `given` unchanged until then."""
    size = taken.element_size()
    into, out = [size * n for n in takes], [size * n for n in gives]
    work: dist.Work | None = dist.all_to_all_single(
        taken.view(torch.uint8), given.view(torch.uint8), into, out, group=group, async_op=True
    )
    assert work is not None, "this rank is in the group"
    return work
