"""Flat shards become rows of each parameter, and back, by one all-to-all: what goes where is known from the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
import torch.distributed as dist

from shardckpt.core.full import Staging
from shardckpt.core.packing import ordered
from shardckpt.layout import FlatLayout, ParamSpec, Run


def row_dim(spec: ParamSpec) -> int:
    """Return the dimension that is slowest in memory."""
    return spec.order[0] if spec.order else 0


@lru_cache(maxsize=4096)
def strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose dimensions lie in memory in a given order; empty for row-major."""
    return ordered(torch.empty(prod(shape), device="meta"), shape, order).stride()


@dataclass(frozen=True)
class Rows:
    """A parameter cut into equal numbers of rows along its slowest dimension; later ranks may have fewer or none.

    Attributes:
        dim: The dimension, of the parameter's shape.
        starts: Where each rank's part begins, in elements of the memory order; one more for the end.
    """

    dim: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, spec: ParamSpec, world: int) -> Rows:
        """Cut a parameter.

        Args:
            spec: The parameter.
            world: Ranks.
        """
        shape = spec.memory_shape or (1,)
        row = spec.numel // shape[0] if shape[0] else 0
        step = -(-shape[0] // world)
        return cls(row_dim(spec), tuple(min(r * step, shape[0]) * row for r in range(world + 1)))

    def shape(self, spec: ParamSpec, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        if not spec.shape:
            return () if rank == 0 else (0,)
        row = spec.numel // spec.shape[self.dim] if spec.shape[self.dim] and spec.numel else 0
        held = (self.starts[rank + 1] - self.starts[rank]) // row if row else self._empty_rows(spec, rank)
        return tuple(held if d == self.dim else n for d, n in enumerate(spec.shape))

    def _empty_rows(self, spec: ParamSpec, rank: int) -> int:
        """Rows without elements are counted too: a DTensor's shape adds up."""
        step = -(-spec.shape[self.dim] // (len(self.starts) - 1))
        first = min(rank * step, spec.shape[self.dim])
        return min(step, spec.shape[self.dim] - first)


@dataclass(frozen=True)
class Span:
    """Elements that travel together.

    Attributes:
        index: The parameter.
        flat: Where they begin in the flat shard that has them.
        part: Where they begin in the rows that have them, in memory order.
        numel: How many.
    """

    index: int
    flat: int
    part: int
    numel: int


@dataclass(frozen=True)
class Exchange:
    """What one rank gives and takes.

    Attributes:
        rows: How each parameter is cut.
        out: For each rank that takes, what this one's flat shard gives.
        into: For each rank that gives, what this one's rows take.
        shapes: Of this rank's rows of each parameter.
    """

    rows: tuple[Rows, ...]
    out: tuple[tuple[Span, ...], ...]
    into: tuple[tuple[Span, ...], ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def gives(self) -> list[int]:
        """Elements for each rank that takes."""
        return [sum(span.numel for span in spans) for spans in self.out]

    @cached_property
    def takes(self) -> list[int]:
        """Elements from each rank that gives."""
        return [sum(span.numel for span in spans) for spans in self.into]

    @cached_property
    def held(self) -> list[int]:
        """Elements of this rank's rows of each parameter."""
        return [prod(shape) for shape in self.shapes]


@lru_cache(maxsize=4096)
def exchange(layout: FlatLayout, rank: int) -> Exchange:
    """Plan one rank's part of the way from flat shards to rows.

    Args:
        layout: The flat layout.
        rank: Whose part.
    """
    rows = tuple(Rows.of(spec, layout.world) for spec in layout.specs)
    ranks = range(layout.world)
    out = tuple(tuple(_spans(layout, rows, rank, taker)) for taker in ranks)
    into = tuple(tuple(_spans(layout, rows, giver, rank)) for giver in ranks)
    shapes = tuple(cut.shape(spec, rank) for cut, spec in zip(rows, layout.specs, strict=True))
    return Exchange(rows, out, into, shapes)


def _spans(layout: FlatLayout, rows: Sequence[Rows], giver: int, taker: int) -> list[Span]:
    found = []
    for run in _runs(layout, giver):
        cut = rows[run.index].starts
        start, stop = max(run.start, cut[taker]), min(run.stop, cut[taker + 1])
        if start < stop:
            found.append(Span(run.index, run.offset + start - run.start, start - cut[taker], stop - start))
    return found


@lru_cache(maxsize=4096)
def _runs(layout: FlatLayout, rank: int) -> tuple[Run, ...]:
    return tuple(layout.runs(rank))


@lru_cache(maxsize=4096)
def first_owners(layout: FlatLayout) -> dict[int, int]:
    """Return for each parameter with elements the first rank that has some.

    Args:
        layout: The flat layout.
    """
    found: dict[int, int] = {}
    for rank in range(layout.world):
        for run in _runs(layout, rank):
            if run.stop > run.start:
                found.setdefault(run.index, rank)
    return found


def to_rows(
    shard: torch.Tensor, layout: FlatLayout, group: dist.ProcessGroup | None, staging: Staging
) -> list[torch.Tensor]:
    """Return this rank's rows of every parameter, views of one tensor. Collective: one all-to-all.

    What arrives is in the order of ranks, so in that of the flat layout: each parameter's rows are in one piece. What
    this rank has itself does not travel where it comes first or last, so that the rest is in one piece.

    Args:
        shard: This rank's flat shard, or anything laid out as it is: 1-D, `layout.chunk` elements.
        layout: The flat layout.
        group: The ranks that share it; None for one.
        staging: Where what is sent is put together.
    """
    rank = dist.get_rank(group) if group is not None else 0
    plan = exchange(layout, rank)
    given = [[shard[s.flat : s.flat + s.numel] for s in spans] for spans in plan.out]
    gives, takes = list(plan.gives), list(plan.takes)
    taken = shard.new_empty(sum(takes))
    arriving = taken
    if rank in (0, layout.world - 1):
        before, stays = sum(takes[:rank]), takes[rank]
        _cat(given[rank], taken[before : before + stays])
        arriving = taken[:before] if rank else taken[stays:]
        gives[rank], takes[rank], given[rank] = 0, 0, []
    _travel([part for parts in given for part in parts], arriving, gives, takes, group, staging)
    parts = torch.split(taken, plan.held)
    return [_shaped(part, shape, spec) for part, shape, spec in zip(parts, plan.shapes, layout.specs, strict=True)]


def from_rows(
    parts: Sequence[torch.Tensor], layout: FlatLayout, group: dist.ProcessGroup | None, staging: Staging
) -> torch.Tensor:
    """Return this rank's flat shard of parameters of which every rank has rows. Collective: one all-to-all.

    Args:
        parts: This rank's rows of every parameter, all of one dtype.
        layout: The flat layout.
        group: The ranks that share it; None for one.
        staging: Where what is sent is put together.
    """
    rank = dist.get_rank(group) if group is not None else 0
    plan = exchange(layout, rank)
    flats = [_flat(part, spec) for part, spec in zip(parts, layout.specs, strict=True)]
    given = [[flats[s.index][s.part : s.part + s.numel] for s in spans] for spans in plan.into]
    stay, given[rank] = given[rank], []
    gives, takes = ([0 if other == rank else n for other, n in enumerate(side)] for side in (plan.takes, plan.gives))
    shard = parts[0].new_zeros(layout.chunk)
    taken = shard.new_empty(sum(takes))
    _travel([part for parts in given for part in parts], taken, gives, takes, group, staging)
    spans = [span for other, spans in enumerate(plan.out) if other != rank for span in spans]
    arrived = torch.split(taken, [span.numel for span in spans])
    for span, part in zip((*spans, *plan.out[rank]), (*arrived, *stay), strict=True):
        shard[span.flat : span.flat + span.numel].copy_(part)
    return shard


def _travel(
    given: Sequence[torch.Tensor],
    taken: torch.Tensor,
    gives: Sequence[int],
    takes: Sequence[int],
    group: dist.ProcessGroup | None,
    staging: Staging,
) -> None:
    """Send each rank so many elements, in order, and fill `taken` with what they send. Both counts are in elements."""
    if group is None or dist.get_world_size(group) == 1:
        return
    sent = staging.place(sum(gives), taken.dtype, taken.device)
    _cat(given, sent)
    dist.all_to_all_single(taken.view(torch.uint8), sent.view(torch.uint8), *_bytes(takes, gives, taken), group=group)


def _cat(parts: Sequence[torch.Tensor], place: torch.Tensor) -> None:
    if parts:
        torch.cat(list(parts), out=place)


def _bytes(takes: Sequence[int], sends: Sequence[int], like: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes in bytes: they travel as such, so that every type does."""
    size = like.element_size()
    return [n * size for n in takes], [n * size for n in sends]


def _shaped(part: torch.Tensor, shape: tuple[int, ...], spec: ParamSpec) -> torch.Tensor:
    """Return memory-ordered elements in their shape."""
    if not spec.order:
        return part.view(shape)
    return part.view([shape[d] for d in spec.order]).permute([spec.order.index(d) for d in range(len(spec.order))])


def _flat(part: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    return (part.permute(spec.order) if spec.order else part).reshape(-1)
