"""What a rank tells the first one of the arrays it holds, and what that decides: bytes both ways, no pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

from shardckpt.boxes import Box, Shape
from shardckpt.checkpoint.stateful.flatten import Captured
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.errors import UsageError
from shardckpt.format.native.payload import PayloadChunk
from shardckpt.manifest import Path, dotted
from shardckpt.plan.layout.box_codec import BoxRow, decode_rows, encode_rows
from shardckpt.plan.layout.write_plan import LocalTensor, TensorSpec, plan_save

_BUFFER, _FROZEN = 1, 2


@dataclass(frozen=True)
class Draft:
    """Everything about a rank's state that a plan depends on, and nothing else.

    Attributes:
        arrays: What it holds, in the order of the nest.
        buffers: Which of these ranks may have different values of: the first one's count.
        ties: Further path of an array to its first.
        frozen: Which of these are not written: they lie in the base.
    """

    arrays: tuple[LocalTensor, ...]
    buffers: frozenset[Path]
    ties: Mapping[Path, Path]
    frozen: frozenset[Path] = frozenset()

    def encode(self) -> bytes:
        """Return it as bytes."""
        kinds = [[at, kind] for at, each in enumerate(self.arrays) if (kind := self._kind(each.path))]
        ties = [[list(path), list(first)] for path, first in self.ties.items()]
        head = json.dumps([kinds, ties], separators=(",", ":")).encode()
        rows = encode_rows(BoxRow(a.path, a.shape, a.dtype, a.boxes) for a in self.arrays)
        return len(head).to_bytes(8, "little") + head + rows

    def _kind(self, path: Path) -> int:
        return _BUFFER if path in self.buffers else _FROZEN if path in self.frozen else 0

    @classmethod
    def decode(cls, data: bytes) -> Draft:
        """Return what `encode` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        kinds, ties = json.loads(data[8:end])
        arrays = tuple(LocalTensor(*row) for row in decode_rows(data[end:]))
        return cls(
            arrays,
            frozenset(arrays[at].path for at, kind in kinds if kind == _BUFFER),
            {tuple(path): tuple(first) for path, first in ties},
            frozenset(arrays[at].path for at, kind in kinds if kind == _FROZEN),
        )


def draft_of(captured: Captured, *, trainable_only: bool = False) -> Draft:
    """Return what of a captured state a plan depends on.

    Args:
        captured: The state.
        trainable_only: Frozen parameters are not written.
    """
    arrays = tuple(
        LocalTensor(path, array.shape, dtype_name(array.dtype), tuple(shard.box for shard in array.shards))
        for path, array in captured.arrays.items()
    )
    frozen = frozenset(captured.frozen) if trainable_only else frozenset()
    return Draft(arrays, frozenset(captured.buffers), dict(captured.ties), frozen)


Class = tuple[int, ...]
"""Ranks that hold the same elements."""


@dataclass(frozen=True)
class Task:
    """One rank's part of a plan.

    Attributes:
        chunks: What it writes.
        classes: For each set of ranks that hold the same, by its number, the positions of what this rank holds of that:
            position of the array in its draft, position of the box.
        frozen: What this rank has to compare with the base instead of writing it.
    """

    chunks: tuple[PayloadChunk, ...]
    classes: Mapping[int, Sequence[tuple[int, int]]]
    frozen: tuple[PayloadChunk, ...] = ()

    def encode(self) -> bytes:
        """Return it as bytes."""
        classes = [[number, [list(p) for p in positions]] for number, positions in self.classes.items()]
        head = json.dumps([len(self.chunks), classes], separators=(",", ":")).encode()
        rows = encode_rows(BoxRow(c.path, c.shape, c.dtype, (c.box,)) for c in (*self.chunks, *self.frozen))
        return len(head).to_bytes(8, "little") + head + rows

    @classmethod
    def decode(cls, data: bytes) -> Task:
        """Return what `encode` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        count, classes = json.loads(data[8:end])
        positions = {number: [(a, b) for a, b in each] for number, each in classes}
        chunks = [PayloadChunk(path, shape, dtype, box) for path, shape, dtype, (box,) in decode_rows(data[end:])]
        return cls(tuple(chunks[:count]), positions, tuple(chunks[count:]))


@dataclass(frozen=True)
class Plan:
    """Who writes what.

    Attributes:
        tasks: One for each rank.
        order: Every array once, in the order of the nest.
        ties: Further path of an array to its first.
        classes: Sets of ranks that hold the same.
        nbytes: Bytes of all that is written.
        frozen: What is not written, but lies in the base.
    """

    tasks: tuple[Task, ...]
    order: tuple[Path, ...]
    ties: Mapping[Path, Path]
    classes: Sequence[Class]
    nbytes: int
    frozen: tuple[TensorSpec, ...] = ()


def plan_of(drafts: Sequence[Draft]) -> Plan:
    """Decide who writes what: every element once, what several ranks hold shared out among them.

    Args:
        drafts: One for each rank.

    Raises:
        UsageError: Ranks hold arrays of one path that differ in type or shape.
        IncompleteError: Elements that no rank holds.
    """
    plan = plan_save(_counted(drafts))
    order = tuple(spec.path for spec in plan.arrays)
    known = set(order)
    ties = {p: first for draft in reversed(drafts) for p, first in draft.ties.items() if p not in known}
    frozen = _frozen(drafts)
    chunks = [[PayloadChunk(*plan.arrays[task.array], task.box) for task in tasks] for tasks in plan.tasks]
    classes, positions = _classes(drafts)
    tasks = tuple(_task(mine, told, frozen) for mine, told in zip(chunks, positions, strict=True))
    specs = tuple(spec for spec in plan.arrays if spec.path in frozen)
    return Plan(tasks, order, ties, classes, sum(c.nbytes for task in tasks for c in task.chunks), specs)


def _frozen(drafts: Sequence[Draft]) -> frozenset[Path]:
    """Return what is not written.

    Raises:
        UsageError: A parameter is frozen on some ranks and not on others.
    """
    found: frozenset[Path] = frozenset().union(*(draft.frozen for draft in drafts))
    for rank, draft in enumerate(drafts) if found else ():
        odd = next((each.path for each in draft.arrays if each.path in found - draft.frozen), None)
        if odd is not None:
            raise UsageError(
                "a parameter is frozen on some ranks and not on others",
                where=dotted(odd),
                found=f"rank {rank} trains it",
                fix="Set requires_grad alike on every rank.",
            )
    return found


def _task(chunks: Sequence[PayloadChunk], classes: Mapping[int, Sequence[tuple[int, int]]], frozen: Set[Path]) -> Task:
    if not frozen:
        return Task(tuple(chunks), classes)
    return Task(
        tuple(chunk for chunk in chunks if chunk.path not in frozen),
        classes,
        tuple(chunk for chunk in chunks if chunk.path in frozen),
    )


def plan_alone(captured: Captured, *, trainable_only: bool = False) -> Plan:
    """Return the plan of a world of one: everything, as it lies.

    Args:
        captured: The state.
        trainable_only: Frozen parameters are not written.

    Raises:
        IncompleteError: Elements that this rank does not hold.
    """
    chunks = []
    for path, array in captured.arrays.items():
        if len(array.shards) != 1 or array.shards[0].box.size != array.shape:
            return plan_of([draft_of(captured, trainable_only=trainable_only)])
        chunks.append(PayloadChunk(path, array.shape, dtype_name(array.dtype), array.shards[0].box))
    task = _task(chunks, {}, captured.frozen if trainable_only else set())
    specs = tuple(TensorSpec(chunk.path, chunk.shape, chunk.dtype) for chunk in task.frozen)
    written = sum(chunk.nbytes for chunk in task.chunks)
    return Plan((task,), tuple(captured.arrays), captured.ties, (), written, specs)


def _counted(drafts: Sequence[Draft]) -> list[list[LocalTensor]]:
    """Return what ranks hold; of a buffer only what the first rank has, so that one rank's values are saved."""
    seen: set[Path] = set()
    found = []
    for draft in drafts:
        found.append([each for each in draft.arrays if each.path not in seen])
        seen |= draft.buffers
    return found


def _classes(drafts: Sequence[Draft]) -> tuple[list[Class], list[dict[int, list[tuple[int, int]]]]]:
    """Return sets of ranks that hold the same boxes, and for each rank which of its boxes belong to which set."""
    holders: dict[tuple[Path, Box], dict[int, tuple[int, int]]] = {}
    buffers: frozenset[Path] = frozenset().union(*(draft.buffers for draft in drafts))
    shared = _held_twice(drafts)
    for rank, draft in enumerate(drafts) if shared else ():
        for at, array in enumerate(draft.arrays):
            for which, box in enumerate(array.boxes) if array.path in shared else ():
                if box.volume:
                    holders.setdefault((array.path, box), {})[rank] = (at, which)
    numbers: dict[Class, int] = {}
    positions: list[dict[int, list[tuple[int, int]]]] = [{} for _ in drafts]
    for (path, _), ranks in holders.items():
        if len(ranks) > 1 and path not in buffers:
            number = numbers.setdefault(tuple(ranks), len(numbers))
            for rank, position in ranks.items():
                positions[rank].setdefault(number, []).append(position)
    return list(numbers), positions


def _held_twice(drafts: Sequence[Draft]) -> set[Path]:
    """Return the arrays of which ranks hold more elements than there are: some of them twice, since none is missing."""
    held: dict[Path, int] = {}
    shapes: dict[Path, Shape] = {}
    for draft in drafts:
        for array in draft.arrays:
            held[array.path] = held.get(array.path, 0) + sum([prod(size) for _, size in array.boxes])
            shapes[array.path] = array.shape
    return {path for path, elements in held.items() if elements > prod(shapes[path])}
