"""Arithmetic for DeepSpeed's ZeRO partitions, on element counts.

Stages 1 and 2 concatenate a group's parameters, pad the end, and give each rank an equal partition. Stage 3
partitions each parameter individually and concatenates a rank's parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from shardckpt.boxes import Box, Shape, chunk_range, flat_to_boxes

# Possible alignments of a partition, in elements: 2 since collectives are aligned to 4 bytes, 1 in older versions.
_ALIGNMENTS = (2, 1)


class PartitionRun(NamedTuple):
    """A parameter's contiguous elements in one rank's flat tensor."""

    rank: int  # data-parallel rank
    unit: int  # index of the flat tensor on the rank
    at: int  # first element in that flat tensor
    start: int  # first element in the parameter, in row-major order
    stop: int  # end of the elements in the parameter, exclusive


def partition_elements(total: int, world: int, alignment: int = 2) -> int:
    """Return how many elements each rank's equal partition has in stages 1 and 2, with padding."""
    return -(-total // (alignment * world)) * alignment


def lean_elements(total: int, partition: int, rank: int) -> int:
    """Return how many elements a rank's partition has without padding at the group's end."""
    return min(max(total - rank * partition, 0), partition)


def possible_lengths(total: int, partition: int, world: int, rank: int) -> set[int]:
    """Return a rank's possible tensor lengths in elements: with padding, without, and as in old versions."""
    # Before 0.15, DeepSpeed attributed all padding of a group to the last rank. If that exceeds its partition,
    # `part[:length - padding]` counts from the end and keeps some of the padding.
    found = {partition, lean_elements(total, partition, rank)}
    padding = world * partition - total
    if rank == world - 1 and padding > partition:
        found.add(max(2 * partition - padding, 0))
    return found


def original_order(names: Sequence[str], world: int) -> list[str]:
    """Return the parameters' order before `round_robin_gradients` reordered them."""
    reordered = [i for rank in range(world) for i in range(rank, len(names), world)]
    return [name for _, name in sorted(zip(reordered, names, strict=True))]


def fit_partition(total: int, world: int, lengths: Mapping[int, int]) -> int | None:
    """Return the partition size that explains all lengths, with padding or without; None if no size does."""
    for alignment in _ALIGNMENTS:
        partition = partition_elements(total, world, alignment)
        if all(n in possible_lengths(total, partition, world, rank) for rank, n in lengths.items()):
            return partition
    return None


def offsets(numels: Sequence[int], paddings: Sequence[int] | None = None) -> list[int]:
    """Return each parameter's offset in a group, and the group's end, in elements."""
    spaces = [n + p for n, p in zip(numels, paddings, strict=True)] if paddings else numels
    return list(accumulate(spaces, initial=0))


def split_partition_runs(offset: int, numel: int, partition: int, unit: int = 0) -> list[PartitionRun]:
    """Split a parameter over ranks like stages 1 and 2."""
    runs, start = [], 0
    while start < numel:
        rank, at = divmod(offset + start, partition)
        stop = min(start + partition - at, numel)
        runs.append(PartitionRun(rank, unit, at, start, stop))
        start = stop
    return runs


def part_elements(numel: int, world: int) -> int:
    """Return how many elements each rank has of one parameter in stage 3, with padding."""
    return chunk_range(numel, world, 0)[1]


def split_stage3_runs(offset: int, numel: int, world: int, bounds: Sequence[int]) -> list[PartitionRun]:
    """Split a parameter over ranks like stage 3."""
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
    """Return a run's boxes, each with its first element in the flat tensor."""
    at, found = run.at, []
    for box in flat_to_boxes(shape, run.start, run.stop):
        found.append((box, at))
        at += box.volume
    return found
