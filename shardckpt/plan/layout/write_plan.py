"""Plan a save: each element is written once, and ranks are balanced by bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from shardckpt.boxes import Box, Shape, contiguous_blocks, cover, full_box, is_grid, strides
from shardckpt.dtypes import bits, nbytes
from shardckpt.errors import IncompleteError, UsageError
from shardckpt.manifest import Path, dotted

LEAST_SHARE_BYTES = 1 << 22  # smallest part if ranks split a replicated box

# Advice in an error about names that are equal by chance.
NAME_STAGES = 'Pipeline stages need different names: nn.ModuleDict({f"stage{n}": stage}) gives them.'

_NO_LIMIT = 1 << 62


class LocalTensor(NamedTuple):
    """One rank's boxes of a tensor."""

    path: Path  # in the saved state
    shape: Shape
    dtype: str  # in torch's spelling
    boxes: tuple[Box, ...]  # disjoint; empty if this rank has no elements
    # Digest of the elements' bytes, if known; ranks with the same boxes must have equal digests.
    digest: int | None = None


class TensorSpec(NamedTuple):
    """A tensor in the save."""

    path: Path  # in the saved state
    shape: Shape
    dtype: str  # in torch's spelling


class WriteItem(NamedTuple):
    """One box that a rank writes."""

    array: int  # index in the plan
    box: Box  # in the rank's memory


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The boxes that each rank writes."""

    arrays: tuple[TensorSpec, ...]  # ordered by the lowest rank that has each
    tasks: tuple[tuple[WriteItem, ...], ...]  # boxes by rank, in the order of `arrays`

    def count_rank_bytes(self, rank: int) -> int:
        """Return how many bytes a rank writes."""
        return sum(nbytes(self.arrays[task.array].dtype, task.box.volume) for task in self.tasks[rank])


def plan_save(held: Sequence[Sequence[LocalTensor]], loads: Sequence[int] | None = None) -> SavePlan:
    """Assign each box to a rank that writes it."""
    arrays = _gather(held)
    try:
        return _plan(arrays, [0] * len(held) if loads is None else [*loads])  # ranks may write other bytes too
    except IncompleteError:
        require_one_form({array.spec.path: array.first for array in arrays})
        raise


def require_one_form(paths: Mapping[Path, int]) -> None:
    """Refuse a tensor that some ranks have in several parts. Paths are given with the lowest rank that has each."""
    for path, rank in paths.items():
        if path[:-1] in paths:
            raise UsageError(
                "ranks hold this moment in tensors of different classes",
                where=dotted(path[:-1]),
                found=f"plain on rank {paths[path[:-1]]}, and with inner tensors, such as {path[-1]}, on rank {rank}",
                fix="A low-bit optimizer chooses the class by a shard's size: shard the parameter over another number"
                " of ranks, or choose another `block_size`.",
            )


def _plan(arrays: Sequence[_Array], written: list[int]) -> SavePlan:
    tasks: list[list[WriteItem]] = [[] for _ in written]
    shared: list[_Shared] = []
    for number, array in enumerate(arrays):
        dtype = array.spec.dtype
        width = bits(dtype)
        for box, volume, ranks in _disjoint(array):
            if len(ranks) == 1:
                rank = ranks[0]
                tasks[rank].append(WriteItem(number, box))
                written[rank] += (volume * width + 7) >> 3
            else:
                ranks = tuple(ranks)
                shared += [_Shared(nbytes(dtype, b.volume), number, b, ranks) for b in _parts(box, dtype, len(ranks))]
    for part, rank in _share_out(shared, written):
        tasks[rank].append(WriteItem(part.array, part.box))
    return SavePlan(tuple(array.spec for array in arrays), tuple(tuple(sorted(mine)) for mine in tasks))


def digest(held: Iterable[LocalTensor]) -> bytes:
    """Return a 16-byte digest over names, shapes, dtypes and boxes, without values."""
    hasher = hashlib.blake2b(digest_size=16)
    for each in held:
        hasher.update(repr((each.path, each.shape, each.dtype, [tuple(box) for box in each.boxes])).encode())
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class _Array:
    """An array, and the ranks that have each box."""

    spec: TensorSpec
    first: int  # lowest rank that has a part
    ranks_by_box: dict[Box, list[int]]  # in rank order
    # By boxes: the lowest rank with exactly these, and its digest.
    digests: dict[tuple[Box, ...], tuple[int, int]]


class _Shared(NamedTuple):
    """A box or part that several ranks have."""

    nbytes: int
    array: int
    box: Box
    ranks: tuple[int, ...]


def _gather(held: Sequence[Sequence[LocalTensor]]) -> list[_Array]:
    """Collect each array's boxes from all ranks; check dtypes and shapes."""
    arrays: dict[Path, _Array] = {}
    for rank, mine in enumerate(held):
        for path, shape, dtype, boxes, value in mine:
            array = arrays.get(path)
            if array is None:
                array = arrays[path] = _Array(TensorSpec(path, shape, dtype), rank, {}, {})
            elif array.spec != (path, shape, dtype):
                raise _disagreement(array, rank, TensorSpec(path, shape, dtype))
            ranks_by_box = array.ranks_by_box
            for box in boxes:
                if box in ranks_by_box:
                    ranks_by_box[box].append(rank)
                else:
                    ranks_by_box[box] = [rank]
            if value is not None:
                first, known = array.digests.setdefault(boxes, (rank, value))
                if known != value:
                    raise UsageError(
                        "ranks hold different values of replicated data",
                        where=dotted(path),
                        found=f"rank {rank} differs from rank {first}",
                        fix="Save it under a different name on each rank, or make the values equal.",
                    )
    return list(arrays.values())


def _disagreement(array: _Array, rank: int, other: TensorSpec) -> UsageError:
    return UsageError(
        "ranks disagree on an array",
        where=dotted(other.path),
        found=f"rank {rank}: {other.dtype} {list(other.shape)}",
        expected=f"rank {array.first}: {array.spec.dtype} {list(array.spec.shape)}",
        fix="To keep each rank's own, wrap it in shardckpt.PerRank. If it is part of a sharded module, pass the"
        f" module that its wrapper returned (Lightning: `trainer.strategy.model`). {NAME_STAGES}",
    )


def _disjoint(array: _Array) -> Iterable[tuple[Box, int, Sequence[int]]]:
    """Return disjoint boxes that cover the array, with their element counts and ranks."""
    shape = array.spec.shape
    if 0 in shape:
        return ((full_box(shape), 0, (array.first,)),)
    boxes = [box for box in array.ranks_by_box if 0 not in box.size]
    if len(boxes) == 1 and boxes[0] == full_box(shape):
        return ((boxes[0], boxes[0].volume, tuple(array.ranks_by_box[boxes[0]])),)
    strange = next((box for box in boxes if not len(box.offset) == len(box.size) == len(shape)), None)
    if strange is not None:
        raise _outside(array, strange)
    volumes = _volumes_of_tiling(shape, boxes)
    if volumes is not None:
        if len(boxes) == len(array.ranks_by_box):
            return zip(boxes, volumes, array.ranks_by_box.values(), strict=True)
        return [(box, n, array.ranks_by_box[box]) for box, n in zip(boxes, volumes, strict=True)]
    if is_grid(shape, boxes):
        return [(box, box.volume, tuple(array.ranks_by_box[box])) for box in boxes]
    outside = next((box for box in boxes if not box.within(shape)), None)
    if outside is not None:
        raise _outside(array, outside)
    gaps = cover(full_box(shape), boxes, limit=_NO_LIMIT).gaps
    if gaps:
        raise IncompleteError(
            f"{dotted(array.spec.path)} {gaps[0]}: no rank holds these elements",
            found=f"{len(boxes)} boxes",
            expected=f"all of {list(shape)}",
        )
    return _carve(array, boxes)


def _outside(array: _Array, box: Box) -> UsageError:
    where = dotted(array.spec.path)
    return UsageError("a rank holds elements outside the array", where=where, found=str(box), expected=array.spec.shape)


def _volumes_of_tiling(shape: Shape, boxes: Sequence[Box]) -> list[int] | None:
    """Return element counts if the boxes fill the array in row-major order; else None."""
    # Most shardings have such boxes; thousands are checked at once.
    if not boxes or not shape:
        return None
    numbers = chain.from_iterable(chain.from_iterable(boxes))
    table = np.fromiter(numbers, np.int64, 2 * len(shape) * len(boxes)).reshape(-1, 2, len(shape))
    offsets, sizes = table[:, 0], table[:, 1]
    volumes = sizes.prod(axis=1)
    full = sizes == np.array(shape)
    inner_full = np.logical_and.accumulate(full[:, ::-1], axis=1)[:, -2::-1]  # over the dimensions after each
    starts = offsets @ np.array(strides(shape))
    order = starts.argsort()
    ends = (starts + volumes)[order]
    fits = (
        bool((inner_full | (sizes[:, :-1] == 1)).all())
        and bool(((offsets >= 0) & (offsets + sizes <= np.array(shape))).all())
        and starts[order[0]] == 0
        and ends[-1] == prod(shape)
        and bool((ends[:-1] == starts[order[1:]]).all())
    )
    return volumes.tolist() if fits else None


def _carve(array: _Array, boxes: Sequence[Box]) -> Iterator[tuple[Box, int, tuple[int, ...]]]:
    """Yield boxes without the parts that smaller boxes cover."""
    taken: list[Box] = []
    for box in sorted(boxes, key=lambda b: (b.volume, b)):
        for part in cover(box, taken, limit=_NO_LIMIT).gaps:
            yield part, part.volume, tuple(array.ranks_by_box[box])
        taken.append(box)


def _share_out(shared: Sequence[_Shared], loads: list[int]) -> Iterator[tuple[_Shared, int]]:
    """Yield replicated boxes with their writers: largest first, least loaded rank."""
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for part in sorted(shared, key=lambda each: (-each.nbytes, each)):
        queue = queues.get(part.ranks)
        if queue is None:
            queue = queues[part.ranks] = [(loads[rank], rank) for rank in part.ranks]
            heapify(queue)
        while queue[0][0] != loads[queue[0][1]]:  # the rank has received boxes in another set of ranks
            heapreplace(queue, (loads[queue[0][1]], queue[0][1]))
        load, rank = queue[0]
        loads[rank] = load + part.nbytes
        heapreplace(queue, (loads[rank], rank))
        yield part, rank


def _parts(box: Box, dtype: str, ranks: int) -> Iterable[Box]:
    """Split a replicated box if it is large enough."""
    size = nbytes(dtype, box.volume)
    if size < 2 * LEAST_SHARE_BYTES or bits(dtype) % 8:
        return (box,)
    count = min(ranks, size // LEAST_SHARE_BYTES)
    return contiguous_blocks(box, -(-box.volume // count))
