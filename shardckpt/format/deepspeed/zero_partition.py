"""How DeepSpeed's ZeRO splits flat parameters: pure arithmetic on counts of elements.

Stages 1 and 2 concatenate the parameters of a group, pad the end, and give every rank an equal part of the result.
Stage 3 splits each parameter by itself, and concatenates a rank's parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from shardckpt.boxes import Box, Shape, chunk_range, flat_to_boxes

_ALIGNMENTS = (2, 1)
"""Elements that each rank's part is a multiple of: two since collectives are aligned to four bytes, one before."""


class PartitionRun(NamedTuple):
    """Contiguous elements of a parameter in one rank's flat tensor.

    Attributes:
        rank: The rank.
        unit: Which of its flat tensors.
        at: First element in that tensor.
        start: First element in the parameter, in row-major order.
        stop: One past the last.
    """

    rank: int
    unit: int
    at: int
    start: int
    stop: int


def partition_elements(total: int, world: int, alignment: int = 2) -> int:
    """Return the elements of each rank's equal part of a group (stages 1 and 2), padding included.

    Args:
        total: Elements of the group's parameters, padding between them included.
        world: Ranks that share the group.
        alignment: What the part is a multiple of.
    """
    return -(-total // (alignment * world)) * alignment


def lean_elements(total: int, partition: int, rank: int) -> int:
    """Return the elements of a rank's part without the padding at the end of the group."""
    return min(max(total - rank * partition, 0), partition)


def possible_lengths(total: int, partition: int, world: int, rank: int) -> set[int]:
    """Return how many elements a rank's tensor may have: with padding, without, and as in older versions.

    Before 0.15, DeepSpeed counted all padding of a group as the last rank's. Where that is more than its part has,
    `part[:length - padding]` counts from the end, and leaves some of the padding.

    Args:
        total: Elements of the group.
        partition: Elements of each rank's part.
        world: Ranks that share the group.
        rank: Which of them.
    """
    found = {partition, lean_elements(total, partition, rank)}
    padding = world * partition - total
    if rank == world - 1 and padding > partition:
        found.add(max(2 * partition - padding, 0))
    return found


def original_order(names: Sequence[str], world: int) -> list[str]:
    """Return the order that parameters had before `round_robin_gradients` reordered them.

    Args:
        names: In the order of the flat group: every `world`-th from index 0, then from index 1, and so on.
        world: Ranks that share the group.
    """
    reordered = [i for rank in range(world) for i in range(rank, len(names), world)]
    return [name for _, name in sorted(zip(reordered, names, strict=True))]


def fit_partition(total: int, world: int, lengths: Mapping[int, int]) -> int | None:
    """Return the elements of a part that explain how long the ranks' tensors are, each with its padding or without.

    Args:
        total: Elements of the group.
        world: Ranks that share it.
        lengths: Rank to elements of its tensor, of the ranks that are there.
    """
    for alignment in _ALIGNMENTS:
        partition = partition_elements(total, world, alignment)
        if all(n in possible_lengths(total, partition, world, rank) for rank, n in lengths.items()):
            return partition
    return None


def offsets(numels: Sequence[int], paddings: Sequence[int] | None = None) -> list[int]:
    """Return where each parameter of a group starts, and last where the group ends.

    Args:
        numels: Elements of each parameter.
        paddings: Elements behind each parameter; none where there are none.
    """
    spaces = [n + p for n, p in zip(numels, paddings, strict=True)] if paddings else numels
    return list(accumulate(spaces, initial=0))


def split_partition_runs(offset: int, numel: int, partition: int, unit: int = 0) -> list[PartitionRun]:
    """Split a parameter over ranks as stages 1 and 2 do.

    Args:
        offset: First element in the group.
        numel: Its elements.
        partition: Elements of each rank's part.
        unit: Which flat tensor the group is.
    """
    runs, start = [], 0
    while start < numel:
        rank, at = divmod(offset + start, partition)
        stop = min(start + partition - at, numel)
        runs.append(PartitionRun(rank, unit, at, start, stop))
        start = stop
    return runs


def part_elements(numel: int, world: int) -> int:
    """Return the elements of each rank's part of one parameter (stage 3), padding included."""
    return chunk_range(numel, world, 0)[1]


def split_stage3_runs(offset: int, numel: int, world: int, bounds: Sequence[int]) -> list[PartitionRun]:
    """Split a parameter over ranks as stage 3 does.

    Args:
        offset: First element of a rank's part in its flat tensors, counted through all of them.
        numel: The parameter's elements.
        world: Ranks that share it.
        bounds: Where each flat tensor starts, counted so, and last where they end.
    """
    part = part_elements(numel, world)
    runs = []
    for rank in range(world):
        start, end = rank * part, min((rank + 1) * part, numel)
        while start < end:
            place = offset + start - rank * part
            unit = bisect_right(bounds, place) - 1
            stop = min(start + bounds[unit + 1] - place, end)
            runs.append(PartitionRun(rank, unit, place - bounds[unit], start, stop))
            start = stop
    return runs


def boxes(shape: Shape, run: PartitionRun) -> list[tuple[Box, int]]:
    """Return the boxes that a run's elements are, and where in the rank's flat tensor each begins."""
    at, found = run.at, []
    for box in flat_to_boxes(shape, run.start, run.stop):
        found.append((box, at))
        at += box.volume
    return found
