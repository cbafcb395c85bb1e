"""Flat shards become rows of each parameter, and back, by one all-to-all: what goes where is known from the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from shardckpt.layout import FlatLayout, ParamSpec, Run


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
        return cls(spec.order[0] if spec.order else 0, tuple(min(r * step, shape[0]) * row for r in range(world + 1)))

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
    """

    rows: tuple[Rows, ...]
    out: tuple[tuple[Span, ...], ...]
    into: tuple[tuple[Span, ...], ...]


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
    return Exchange(rows, out, into)


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


def to_rows(shard: torch.Tensor, layout: FlatLayout, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return this rank's rows of every parameter. Collective: one all-to-all.

    Args:
        shard: This rank's flat shard, or anything laid out as it is: 1-D, `layout.chunk` elements.
        layout: The flat layout.
        group: The ranks that share it; None for one.
    """
    rank = dist.get_rank(group) if group is not None else 0
    plan = exchange(layout, rank)
    given = [shard[span.flat : span.flat + span.numel] for spans in plan.out for span in spans]
    taken = _travel(given, plan.out, plan.into, group, shard)
    parts = [shard.new_empty(cut.starts[rank + 1] - cut.starts[rank]) for cut in plan.rows]
    _scatter(taken, [parts[s.index][s.part : s.part + s.numel] for spans in plan.into for s in spans])
    return [
        _shaped(part, cut.shape(spec, rank), spec)
        for part, cut, spec in zip(parts, plan.rows, layout.specs, strict=True)
    ]


def from_rows(parts: Sequence[torch.Tensor], layout: FlatLayout, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return this rank's flat shard of parameters of which every rank has rows. Collective: one all-to-all.

    Args:
        parts: This rank's rows of every parameter, all of one dtype.
        layout: The flat layout.
        group: The ranks that share it; None for one.
    """
    rank = dist.get_rank(group) if group is not None else 0
    plan = exchange(layout, rank)
    flats = [_flat(part, spec) for part, spec in zip(parts, layout.specs, strict=True)]
    given = [flats[s.index][s.part : s.part + s.numel] for spans in plan.into for s in spans]
    shard = parts[0].new_zeros(layout.chunk)
    taken = _travel(given, plan.into, plan.out, group, shard)
    _scatter(taken, [shard[span.flat : span.flat + span.numel] for spans in plan.out for span in spans])
    return shard


def _travel(
    given: Sequence[torch.Tensor],
    out: Sequence[Sequence[Span]],
    into: Sequence[Sequence[Span]],
    group: dist.ProcessGroup | None,
    like: torch.Tensor,
) -> torch.Tensor:
    sent = torch.cat(list(given)) if given else like.new_empty(0)
    if group is None or dist.get_world_size(group) == 1:
        return sent
    sends, takes = ([sum(span.numel for span in spans) for spans in side] for side in (out, into))
    taken = like.new_empty(sum(takes))
    dist.all_to_all_single(taken.view(torch.uint8), sent.view(torch.uint8), *_bytes(takes, sends, like), group=group)
    return taken


def _bytes(takes: Sequence[int], sends: Sequence[int], like: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes in bytes: they travel as such, so that every type does."""
    size = like.element_size()
    return [n * size for n in takes], [n * size for n in sends]


def _scatter(source: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    at = 0
    for place in places:
        place.copy_(source[at : at + place.numel()])
        at += place.numel()


def _shaped(part: torch.Tensor, shape: tuple[int, ...], spec: ParamSpec) -> torch.Tensor:
    """Return memory-ordered elements in their shape."""
    if not spec.order:
        return part.view(shape)
    return part.view([shape[d] for d in spec.order]).permute([spec.order.index(d) for d in range(len(spec.order))])


def _flat(part: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    return (part.permute(spec.order) if spec.order else part).reshape(-1)
