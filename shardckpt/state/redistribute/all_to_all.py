"""Elements on their way between ranks: packed one behind the other, and exchanged as bytes, so that every type is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def pack(parts: Sequence[torch.Tensor], row: torch.Tensor) -> None:
    """Copy parts one behind the other.

    Args:
        parts: Of any type, on any device.
        row: 1-D, as long as they are together.
    """
    if all(part.dtype == row.dtype and part.device == row.device and part.is_contiguous() for part in parts):
        if parts:
            torch.cat([part.view(-1) for part in parts], out=row)
        return
    for part, place in zip(parts, torch.split(row, [part.numel() for part in parts]), strict=True):
        place.view(part.shape).copy_(part)


def unpack(row: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """Copy consecutive elements of a row to their places.

    Args:
        row: 1-D, as long as all places together.
        places: Of any type, on any device.
    """
    for place, part in zip(places, torch.split(row, [place.numel() for place in places]), strict=True):
        place.copy_(part.view(place.shape))


def all_to_all(
    taken: torch.Tensor,
    given: torch.Tensor,
    takes: Sequence[int],
    gives: Sequence[int],
    group: dist.ProcessGroup | None,
) -> dist.Work:
    """Begin to send every rank its elements, and to take this one's from each. Collective; to be waited for.

    Args:
        taken: 1-D, filled in rank order.
        given: 1-D, in rank order; not to be changed before the end.
        takes: How many elements each rank gives.
        gives: How many each takes.
        group: The ranks.
    """
    size = taken.element_size()
    into, out = [size * n for n in takes], [size * n for n in gives]
    work: dist.Work | None = dist.all_to_all_single(
        taken.view(torch.uint8), given.view(torch.uint8), into, out, group=group, async_op=True
    )
    assert work is not None, "this rank is in the group"
    return work
