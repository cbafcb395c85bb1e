"""Local save plans, and rank 0's global plan, encoded as bytes."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar, overload

from shardckpt.boxes import Box, Shape
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.devices import has_pinned_copies
from shardckpt.errors import UsageError
from shardckpt.manifest import Path, dotted
from shardckpt.native.payload import FileLayout, PayloadChunk, arrange_files
from shardckpt.native.records import ArrayRecord
from shardckpt.plan.layout.box_codec import BoxRow, PackedRows, encode_rows, pack_message, unpack_message
from shardckpt.plan.layout.packed_plan import find_tilings
from shardckpt.plan.layout.write_plan import NAME_STAGES, LocalTensor, TensorSpec, plan_save
from shardckpt.state.local.tensor_shards import LocalShard

_BUFFER, _FROZEN, _ON_DEVICE = 1, 2, 4
LEAST_SUM_BYTES = 1 << 20  # smallest box whose replicas are compared by sums on their devices; others are copied
_Item = TypeVar("_Item")


class _PackedSequence(Sequence[_Item]):
    """Sequence that unpacks its items from packed rows at the first access."""

    # Rank 0 needs only a few items of other ranks.

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows

    @abstractmethod
    def _unpack(self) -> tuple[_Item, ...]:
        """Return the items."""

    @cached_property
    def _items(self) -> tuple[_Item, ...]:
        return self._unpack()

    @overload
    def __getitem__(self, at: int) -> _Item: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[_Item]: ...
    def __getitem__(self, at: int | slice) -> Any:
        return self._items[at]

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items == tuple(other)

    def __hash__(self) -> int:
        return hash(self._items)


class _PackedTensors(_PackedSequence[LocalTensor]):
    """A rank's arrays."""

    def _unpack(self) -> tuple[LocalTensor, ...]:
        return tuple(LocalTensor(*row) for row in self.rows.unpack())


class _PackedChunks(_PackedSequence[PayloadChunk]):
    """Chunks that a rank writes."""

    def _unpack(self) -> tuple[PayloadChunk, ...]:
        return tuple(_unpack_chunks(self.rows))


def _unpack_chunks(rows: PackedRows) -> list[PayloadChunk]:
    return [PayloadChunk(row.path, row.shape, row.dtype, box) for row in rows.unpack() for box in row.boxes]


@dataclass(frozen=True)
class LocalSavePlan:
    """One rank's arrays: exactly the global plan's input."""

    arrays: Sequence[LocalTensor]  # arrays of the rank, in the order of the state tree
    buffers: frozenset[Path]  # paths of arrays that may differ between ranks; rank 0's are saved
    ties: Mapping[Path, Path]  # further paths of shared arrays, each with the first path
    frozen: frozenset[Path] = frozenset()  # paths of arrays that are not written, because the base has them
    on_device: frozenset[Path] = frozenset()  # paths of large arrays on an accelerator

    def equals(self, other: LocalSavePlan) -> bool:
        """Return True if both have the same global plan; ties must have the same order."""
        return self == other and list(self.ties) == list(other.ties)

    def encode(self) -> bytes:
        """Return the plan as bytes."""
        kinds = [[at, kind] for at, array in enumerate(self.arrays) if (kind := self._kind(array.path))]
        ties = [[list(path), list(first)] for path, first in self.ties.items()]
        rows = encode_rows(BoxRow(a.path, a.shape, a.dtype, a.boxes) for a in self.arrays)
        return pack_message([kinds, ties], rows)

    def _kind(self, path: Path) -> int:
        kind = _BUFFER if path in self.buffers else _FROZEN if path in self.frozen else 0
        return kind | (_ON_DEVICE if path in self.on_device else 0)

    @classmethod
    def decode(cls, data: bytes) -> LocalSavePlan:
        """Return the plan from the bytes of `encode`."""
        (kinds, ties), message = unpack_message(data)
        rows = PackedRows.decode(message)
        arrays = rows.names.arrays
        return cls(
            _PackedTensors(rows),
            frozenset(arrays[at][0] for at, kind in kinds if kind & _BUFFER),
            {tuple(path): tuple(first) for path, first in ties},
            frozenset(arrays[at][0] for at, kind in kinds if kind & _FROZEN),
            frozenset(arrays[at][0] for at, kind in kinds if kind & _ON_DEVICE),
        )


def create_local_plan(flattened: FlattenedState, *, trainable_only: bool = False) -> LocalSavePlan:
    """Return a flattened state's local plan."""
    arrays = tuple(
        [
            LocalTensor(path, shape, dtype_name(dtype), tuple([shard.box for shard in shards]))
            for path, (shape, dtype, shards) in flattened.arrays.items()
        ]
    )
    frozen = frozenset(flattened.frozen) if trainable_only else frozenset()
    on_device = frozenset(path for path, array in flattened.arrays.items() if any(map(_has_sum, array.shards)))
    return LocalSavePlan(arrays, frozenset(flattened.buffers), dict(flattened.ties), frozen, on_device)


def drop_boxes(local_plan: LocalSavePlan) -> LocalSavePlan:
    """Return the plan of a rank that has the arrays, but no elements."""
    if isinstance(local_plan.arrays, _PackedTensors):
        return replace(local_plan, arrays=_PackedTensors(local_plan.arrays.rows.drop_boxes()))
    return replace(local_plan, arrays=tuple(each._replace(boxes=()) for each in local_plan.arrays))


def _has_sum(shard: LocalShard) -> bool:
    return shard.tensor.nbytes >= LEAST_SUM_BYTES and has_pinned_copies(shard.tensor.device)


ReplicaGroup = tuple[int, ...]  # indices of the ranks with the same elements, in order


@dataclass(frozen=True)
class RankSavePlan:
    """One rank's save plan."""

    chunks: Sequence[PayloadChunk]  # chunks that this rank writes
    # Boxes of this rank in each replica group, by number of the group: position of the array in the local plan,
    # position of the box in the array.
    replica_groups: Mapping[int, Sequence[tuple[int, int]]]
    frozen: tuple[PayloadChunk, ...] = ()  # chunks that this rank compares with the base instead of writing them
    summed: frozenset[int] = frozenset()  # replica groups that all ranks compare by sums on their devices
    _files: dict[Path | None, tuple[FileLayout, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def arrange_files(self, model: Path | None, unchanged: Collection[int] = ()) -> tuple[FileLayout, ...]:
        """Return the files for the chunks to write; if all are written, the result is cached."""
        if unchanged:
            kept = set(unchanged)
            chunks = tuple(chunk for at, chunk in enumerate(self.chunks) if at not in kept)
            return arrange_files(chunks, model=model)
        if model not in self._files:
            self._files[model] = arrange_files(tuple(self.chunks), model=model)
        return self._files[model]

    def encode(self) -> bytes:
        """Return the plan as bytes."""
        replica_groups = [[number, [list(p) for p in positions]] for number, positions in self.replica_groups.items()]
        if isinstance(self.chunks, _PackedChunks) and not self.frozen:
            packed = self.chunks.rows
            return pack_message([int(packed.counts.sum()), replica_groups, sorted(self.summed)], packed.encode())
        rows = encode_rows(BoxRow(c.path, c.shape, c.dtype, (c.box,)) for c in (*self.chunks, *self.frozen))
        return pack_message([len(self.chunks), replica_groups, sorted(self.summed)], rows)

    @classmethod
    def decode(cls, data: bytes) -> RankSavePlan:
        """Return the plan from the bytes of `encode`."""
        (count, replica_groups, summed), rows = unpack_message(data)
        positions = {number: [(a, b) for a, b in pairs] for number, pairs in replica_groups}
        chunks = _unpack_chunks(PackedRows.decode(rows))
        return cls(tuple(chunks[:count]), positions, tuple(chunks[count:]), frozenset(summed))


@dataclass(frozen=True)
class GlobalSavePlan:
    """The save plan for all ranks."""

    rank_plans: tuple[RankSavePlan, ...]  # plans of the ranks, in rank order
    order: tuple[Path, ...]  # paths of all distinct arrays, in the order of the state tree
    ties: Mapping[Path, Path]  # further paths of shared arrays, each with the first path
    replica_groups: Sequence[ReplicaGroup]  # groups of ranks with the same elements, by number
    nbytes: int  # number of bytes of all chunks to write
    frozen: tuple[TensorSpec, ...] = ()  # arrays that are not written, because the base has them
    local_plans: tuple[LocalSavePlan, ...] = field(default=(), compare=False)  # what was planned, in rank order

    @cached_property
    def numbers(self) -> Mapping[Path, int]:
        """Each array's and tie's position in `order`."""
        numbers = {path: at for at, path in enumerate(self.order)}
        return {**numbers, **{path: numbers[first] for path, first in self.ties.items()}}

    @cached_property
    def records(self) -> tuple[ArrayRecord, ...]:
        """The arrays' records, in order, without dtypes, shapes and rows."""
        return tuple(ArrayRecord(path, "", (), array("q")) for path in self.order)


def create_global_plan(local_plans: Sequence[LocalSavePlan], stages: Sequence[int] = ()) -> GlobalSavePlan:
    """Plan a save that writes every element once and divides replicas among ranks.

    Args:
        local_plans: Plans of the ranks, in rank order.
        stages: For each rank its pipeline stage; empty if all ranks have the same models.
    """
    stages = stages or [0] * len(local_plans)
    ties = _merge_ties(local_plans)
    packed = [plan.arrays.rows for plan in local_plans if isinstance(plan.arrays, _PackedTensors)]
    if len(packed) == len(local_plans) and all(rows.names == packed[0].names for rows in packed):
        plan = _plan_packed(local_plans, packed, stages)
    else:
        plan = _plan_unpacked(local_plans, [0] * len(local_plans), stages)
    return replace(plan, ties=ties, local_plans=tuple(local_plans))


def _plan_packed(
    local_plans: Sequence[LocalSavePlan], packed: Sequence[PackedRows], stages: Sequence[int]
) -> GlobalSavePlan:
    """Return the plan for ranks with the same arrays."""
    # Most arrays need no decision; only the others are unpacked.
    paths = [path for path, _, _ in packed[0].names.arrays]
    special = frozenset[Path]().union(*(plan.buffers | plan.frozen for plan in local_plans))
    tilings = find_tilings(packed, [at for at, path in enumerate(paths) if path in special])
    others = [
        replace(plan, arrays=tuple(LocalTensor(*row) for row in rows.unpack(tilings.others)))
        for plan, rows in zip(local_plans, packed, strict=True)
    ]
    rest = _plan_unpacked(others, tilings.nbytes, stages)
    known = {path: at for at, path in enumerate(paths)}
    rank_plans = tuple(
        replace(
            rank_plan,
            chunks=_PackedChunks(_add_chunks(rows, rank_plan.chunks, known)),
            replica_groups={
                number: [(tilings.others[at], which) for at, which in positions]
                for number, positions in rank_plan.replica_groups.items()
            },
        )
        for rows, rank_plan in zip(tilings.tasks, rest.rank_plans, strict=True)
    )
    return replace(rest, rank_plans=rank_plans, order=tuple(paths), nbytes=rest.nbytes + sum(tilings.nbytes))


def _add_chunks(rows: PackedRows, chunks: Collection[PayloadChunk], known: Mapping[Path, int]) -> PackedRows:
    """Return a rank's rows, plus chunks of arrays that are not in them."""
    if not chunks:
        return rows
    boxes: dict[int, list[Box]] = {}
    for chunk in chunks:
        boxes.setdefault(known[chunk.path], []).append(chunk.box)
    return rows.add_boxes(boxes)


def _plan_unpacked(local_plans: Sequence[LocalSavePlan], loads: Sequence[int], stages: Sequence[int]) -> GlobalSavePlan:
    """Return the plan for unpacked arrays."""
    plan = plan_save(_counted(local_plans), loads)
    order = tuple(spec.path for spec in plan.arrays)
    frozen = _frozen(local_plans)
    chunks = [[PayloadChunk(*plan.arrays[task.array], task.box) for task in tasks] for tasks in plan.tasks]
    replica_groups, summed, positions = _find_replica_groups(local_plans, stages)
    rank_plans = tuple(
        replace(_build_rank_plan(mine, held, frozen), summed=summed.intersection(held))
        for mine, held in zip(chunks, positions, strict=True)
    )
    specs = tuple(spec for spec in plan.arrays if spec.path in frozen)
    return GlobalSavePlan(
        rank_plans,
        order,
        {},
        replica_groups,
        sum(c.nbytes for rank_plan in rank_plans for c in rank_plan.chunks),
        specs,
    )


def _merge_ties(local_plans: Sequence[LocalSavePlan]) -> dict[Path, Path]:
    """Return the ranks' ties; names that are one tensor on a rank must be one on each rank that has them."""
    # Ranks may have other first names, if their dicts have other orders; then each name is written.
    ties = {path: first for local_plan in reversed(local_plans) for path, first in local_plan.ties.items()}
    arrays: set[Path] = set()
    for rank, local_plan in enumerate(local_plans) if ties else ():
        own, held = local_plan.ties, set(_list_paths(local_plan))
        arrays |= held
        held |= own.keys()
        here = [(path, first) for path, first in ties.items() if path in held]
        odd = next((p for p, first in here if own.get(p, p) != own.get(first, first)), None)
        if odd is not None:
            first, tied = ties[odd], next(n for n, each in enumerate(local_plans) if odd in each.ties)
            raise UsageError(
                "two names are one tensor on some ranks, and not on others",
                where=dotted(odd),
                found=f"it is the same tensor as {dotted(first)} on rank {tied}, but not on rank {rank}",
                fix="Make them one tensor on all ranks or on none. To keep each rank's own, use shardckpt.PerRank."
                f" {NAME_STAGES}",
            )
    return {path: first for path, first in ties.items() if path not in arrays}


def _list_paths(local_plan: LocalSavePlan) -> list[Path]:
    if isinstance(local_plan.arrays, _PackedTensors):
        return [path for path, _, _ in local_plan.arrays.rows.names.arrays]
    return [each.path for each in local_plan.arrays]


def _frozen(local_plans: Sequence[LocalSavePlan]) -> frozenset[Path]:
    """Return the paths to parameters that are not written."""
    frozen: frozenset[Path] = frozenset().union(*(local_plan.frozen for local_plan in local_plans))
    for rank, local_plan in enumerate(local_plans) if frozen else ():
        odd = next((array.path for array in local_plan.arrays if array.path in frozen - local_plan.frozen), None)
        if odd is not None:
            raise UsageError(
                "a parameter is frozen on some ranks and not on others",
                where=dotted(odd),
                found=f"rank {rank} trains it",
                fix="Set requires_grad alike on every rank.",
            )
    return frozen


def _build_rank_plan(
    chunks: Sequence[PayloadChunk], replica_groups: Mapping[int, Sequence[tuple[int, int]]], frozen: Set[Path]
) -> RankSavePlan:
    if not frozen:
        return RankSavePlan(tuple(chunks), replica_groups)
    return RankSavePlan(
        tuple(chunk for chunk in chunks if chunk.path not in frozen),
        replica_groups,
        tuple(chunk for chunk in chunks if chunk.path in frozen),
    )


def create_single_rank_plan(local_plan: LocalSavePlan) -> GlobalSavePlan:
    """Return the plan for a single rank, which writes all its arrays."""
    chunks = []
    for path, shape, dtype, boxes, _ in local_plan.arrays:
        if len(boxes) != 1 or boxes[0].size != shape:
            return create_global_plan([local_plan])
        chunks.append(PayloadChunk(path, shape, dtype, boxes[0]))
    rank_plan = _build_rank_plan(chunks, {}, local_plan.frozen)
    order = tuple(chunk.path for chunk in chunks)
    specs = tuple(TensorSpec(chunk.path, chunk.shape, chunk.dtype) for chunk in rank_plan.frozen)
    written = sum(chunk.nbytes for chunk in rank_plan.chunks)
    return GlobalSavePlan((rank_plan,), order, local_plan.ties, (), written, specs, (local_plan,))


def _counted(local_plans: Sequence[LocalSavePlan]) -> list[list[LocalTensor]]:
    """Return each rank's arrays to save; buffers are saved only from rank 0."""
    seen: set[Path] = set()
    counted = []
    for local_plan in local_plans:
        counted.append([array for array in local_plan.arrays if array.path not in seen])
        seen |= local_plan.buffers
    return counted


def _find_replica_groups(
    local_plans: Sequence[LocalSavePlan], stages: Sequence[int]
) -> tuple[list[ReplicaGroup], frozenset[int], list[dict[int, list[tuple[int, int]]]]]:
    """Return the replica groups, those that are compared by sums, and for each rank its boxes in each group."""
    owners: dict[tuple[Path, Box], dict[int, tuple[int, int]]] = {}
    buffers: frozenset[Path] = frozenset().union(*(local_plan.buffers for local_plan in local_plans))
    shared = _held_twice(local_plans)
    for rank, local_plan in enumerate(local_plans) if shared else ():
        for at, tensor in enumerate(local_plan.arrays):
            for which, box in enumerate(tensor.boxes) if tensor.path in shared else ():
                if box.volume:
                    owners.setdefault((tensor.path, box), {})[rank] = (at, which)
    numbers: dict[tuple[ReplicaGroup, bool], int] = {}
    positions: list[dict[int, list[tuple[int, int]]]] = [{} for _ in local_plans]
    for (path, _), holders in owners.items():
        # Ranks of one stage may have different buffers.
        ranks = _keep_first_ranks(holders, stages) if path in buffers else holders
        if len(ranks) > 1:
            # All ranks use one kind of digest, also if a replica is on the CPU on some of them.
            is_summed = all(path in local_plans[rank].on_device for rank in ranks)
            number = numbers.setdefault((tuple(ranks), is_summed), len(numbers))
            for rank, position in ranks.items():
                positions[rank].setdefault(number, []).append(position)
    summed = frozenset(number for (_, is_summed), number in numbers.items() if is_summed)
    return [ranks for ranks, _ in numbers], summed, positions


def _keep_first_ranks(holders: Mapping[int, tuple[int, int]], stages: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the lowest rank of each stage."""
    firsts = {stages[rank]: rank for rank in sorted(holders, reverse=True)}
    return {rank: holder for rank, holder in holders.items() if firsts[stages[rank]] == rank}


def _held_twice(local_plans: Sequence[LocalSavePlan]) -> set[Path]:
    """Return the arrays whose ranks hold more elements than exist, so some twice."""
    held: dict[Path, int] = {}
    shapes: dict[Path, Shape] = {}
    for local_plan in local_plans:
        for tensor in local_plan.arrays:
            held[tensor.path] = held.get(tensor.path, 0) + sum([prod(size) for _, size in tensor.boxes])
            shapes[tensor.path] = tensor.shape
    return {path for path, elements in held.items() if elements > prod(shapes[path])}
