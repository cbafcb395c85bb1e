"""Flat shards become rows of each parameter, and back, by one all-to-all: what goes where is known from the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
import torch.distributed as dist

from shardckpt.boxes import chunk_box, chunk_range
from shardckpt.core.params.buffer_layout import view_in_order
from shardckpt.core.params.full_params import Staging
from shardckpt.layout import FlatLayout, ParamSpec, ShardRun
from shardckpt.state.redistribute.all_to_all import all_to_all, pack, unpack


def row_dim(spec: ParamSpec) -> int:
    """Return the dimension that is slowest in memory."""
    return spec.order[0] if spec.order else 0


@lru_cache(maxsize=4096)
def strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor with a given memory order of dimensions; empty for row-major."""
    return view_in_order(torch.empty(prod(shape), device="meta"), shape, order).stride()


@dataclass(frozen=True)
class Rows:
    """A parameter split along its slowest dimension, as `torch.chunk` splits.

    Attributes:
        dim: The dimension, of the parameter's shape.
        starts: Where each rank's part begins, in elements of the memory order; one more for the end.
    """

    dim: int
    starts: tuple[int, ...]

    @classmethod
    def from_spec(cls, spec: ParamSpec, world: int) -> Rows:
        """Split a parameter into rows."""
        shape = spec.memory_shape or (1,)
        row = spec.numel // shape[0] if shape[0] else 0
        return cls(row_dim(spec), tuple(chunk_range(shape[0], world, rank)[0] * row for rank in range(world + 1)))

    def shape(self, spec: ParamSpec, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        if not spec.shape:
            return () if rank == 0 else (0,)
        return chunk_box(spec.shape, self.dim, len(self.starts) - 1, rank).size


@dataclass(frozen=True)
class ElementRun:
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
        rows: How each parameter is split.
        out: For each rank that takes, what this one's flat shard gives.
        into: For each rank that gives, what this one's rows take.
        shapes: Of this rank's rows of each parameter.
        starts: Where each parameter that this rank's flat shard has some of begins there.
    """

    rows: tuple[Rows, ...]
    out: tuple[tuple[ElementRun, ...], ...]
    into: tuple[tuple[ElementRun, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: dict[int, int]

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
def plan_exchange(layout: FlatLayout, rank: int) -> Exchange:
    """Plan one rank's part of the exchange from flat shards to rows."""
    rows = tuple(Rows.from_spec(spec, layout.world) for spec in layout.specs)
    ranks = range(layout.world)
    out = tuple(tuple(_spans(layout, rows, rank, getter)) for getter in ranks)
    into = tuple(tuple(_spans(layout, rows, giver, rank)) for giver in ranks)
    shapes = tuple(split.shape(spec, rank) for split, spec in zip(rows, layout.specs, strict=True))
    return Exchange(rows, out, into, shapes, {run.index: run.offset for run in _runs(layout, rank)})


def _spans(layout: FlatLayout, rows: Sequence[Rows], giver: int, getter: int) -> list[ElementRun]:
    spans = []
    for run in _runs(layout, giver):
        starts = rows[run.index].starts
        start, stop = max(run.start, starts[getter]), min(run.stop, starts[getter + 1])
        if start < stop:
            spans.append(ElementRun(run.index, run.offset + start - run.start, start - starts[getter], stop - start))
    return spans


@lru_cache(maxsize=4096)
def _runs(layout: FlatLayout, rank: int) -> tuple[ShardRun, ...]:
    return tuple(layout.runs(rank))


@lru_cache(maxsize=4096)
def find_first_owners(layout: FlatLayout) -> dict[int, int]:
    """Return for each parameter with elements the lowest rank that has some."""
    owners: dict[int, int] = {}
    for rank in range(layout.world):
        for run in _runs(layout, rank):
            if run.stop > run.start:
                owners.setdefault(run.index, rank)
    return owners


def start_flat_to_rows(
    shard: torch.Tensor, layout: FlatLayout, group: dist.ProcessGroup | None, staging: Staging
) -> Callable[[], list[torch.Tensor]]:
    """Start to fetch this rank's rows of every parameter. Collective: one all-to-all.

    What arrives is in the order of ranks, so in that of the flat layout: each parameter's rows are in one piece. What
    this rank has itself does not travel where it comes first or last, so that the rest is in one piece; it is copied
    while the rest travels.

    Args:
        shard: This rank's flat shard, or another tensor of its layout: 1-D, `layout.chunk` elements.
        layout: The flat layout.
        group: The ranks that share it; None for one.
        staging: Where what is sent is put together, in use until the end.

    Returns:
        What waits for them and returns them, views of one tensor.
    """
    rank = dist.get_rank(group) if group is not None else 0
    plan = plan_exchange(layout, rank)
    given = [[shard[s.flat : s.flat + s.numel] for s in spans] for spans in plan.out]
    gives, takes = list(plan.gives), list(plan.takes)
    taken = shard.new_empty(sum(takes))
    arriving, own, stay = taken, taken[:0], given[rank]
    if rank in (0, layout.world - 1):
        before, stays = sum(takes[:rank]), takes[rank]
        own, arriving = taken[before : before + stays], taken[:before] if rank else taken[stays:]
        gives[rank], takes[rank], given[rank] = 0, 0, []
    else:
        stay = []
    sent = [part for parts in given for part in parts]
    pending = None
    if group is not None and layout.world > 1:
        room = staging.place(sum(gives), taken.dtype, taken.device)
        pack(sent, room)
        pending = all_to_all(arriving, room, takes, gives, group)
    pack(stay, own)

    def arrived() -> list[torch.Tensor]:
        if pending is not None:
            pending.wait()
        parts = torch.split(taken, plan.held)
        return [
            _to_shape(part, shape, spec) for part, shape, spec in zip(parts, plan.shapes, layout.specs, strict=True)
        ]

    return arrived


def rows_to_flat(
    parts: Sequence[torch.Tensor | None],
    into: Sequence[torch.Tensor | None],
    layout: FlatLayout,
    group: dist.ProcessGroup | None,
    staging: Staging,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Copy this rank's parts of a flat layout from rows that every rank has some of. Collective: one all-to-all.

    Args:
        parts: This rank's rows of every parameter; None, on all ranks, for those that are left alone.
        into: This rank's flat part of each, 1-D; not looked at for those that are left alone.
        layout: The flat layout.
        group: The ranks that share it; None for one.
        staging: Memory that they pass through.
        dtype: The type in which they travel.
        device: Where they travel from and to.
    """
    rank = dist.get_rank(group) if group is not None else 0
    plan = plan_exchange(layout, rank)
    flats = [None if part is None else _flat(part, spec) for part, spec in zip(parts, layout.specs, strict=True)]
    given = [_slice_spans(flats, spans) for spans in plan.into]
    arriving = [_slice_targets(into, parts, spans, plan.starts) for spans in plan.out]
    stay, given[rank] = given[rank], []
    own, arriving[rank] = arriving[rank], []
    gives, takes = ([sum(part.numel() for part in row) for row in side] for side in (given, arriving))
    pending, taken = None, None
    if group is not None and layout.world > 1:
        room = staging.place(sum(gives) + sum(takes), dtype, device)
        sent, taken = room[: sum(gives)], room[sum(gives) :]
        pack([part for row in given for part in row], sent)
        pending = all_to_all(taken, sent, takes, gives, group)
    for place, part in zip(own, stay, strict=True):
        place.copy_(part)
    if pending is not None and taken is not None:
        pending.wait()
        unpack(taken, [place for row in arriving for place in row])


def _slice_spans(flats: Sequence[torch.Tensor | None], spans: Sequence[ElementRun]) -> list[torch.Tensor]:
    pairs = ((flats[span.index], span) for span in spans)
    return [flat[span.part : span.part + span.numel] for flat, span in pairs if flat is not None]


def _slice_targets(
    into: Sequence[torch.Tensor | None],
    parts: Sequence[torch.Tensor | None],
    spans: Sequence[ElementRun],
    starts: Mapping[int, int],
) -> list[torch.Tensor]:
    """Return where spans go of the parameters that are not left alone."""
    targets = []
    for span in spans:
        place, at = into[span.index], span.flat - starts[span.index]
        if place is not None and parts[span.index] is not None:
            targets.append(place[at : at + span.numel])
    return targets


def _to_shape(part: torch.Tensor, shape: tuple[int, ...], spec: ParamSpec) -> torch.Tensor:
    """Return memory-ordered elements in their shape."""
    if not spec.order:
        return part.view(shape)
    return part.view([shape[d] for d in spec.order]).permute([spec.order.index(d) for d in range(len(spec.order))])


def _flat(part: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    return (part.permute(spec.order) if spec.order else part).reshape(-1)
