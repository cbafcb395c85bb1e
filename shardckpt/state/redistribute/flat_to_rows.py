"""Exchange flat shards for each parameter's rows, and back, by one all-to-all.

Every rank computes the complete exchange from the flat layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
import torch.distributed as dist

from shardckpt.boxes import chunk_box, chunk_range
from shardckpt.core.modules.dtensors import view_in_order
from shardckpt.core.params.full_params import Staging
from shardckpt.layout import FlatLayout, ParamSpec, ShardRun


def row_dim(spec: ParamSpec) -> int:
    """Return the dimension that is slowest in memory."""
    return spec.order[0] if spec.order else 0


@lru_cache(maxsize=4096)
def strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides for a memory order; an empty order is row-major."""
    return view_in_order(torch.empty(prod(shape), device="meta"), shape, order).stride()


@dataclass(frozen=True)
class Rows:
    """A parameter's split along its slowest dimension, as by `torch.chunk`."""

    dim: int  # in the parameter's shape
    starts: tuple[int, ...]  # each rank's offset, in elements in memory order; the last item is the end

    @classmethod
    def from_spec(cls, spec: ParamSpec, world: int) -> Rows:
        """Split a parameter into rows."""
        shape = spec.memory_shape or (1,)
        row = spec.numel // shape[0] if shape[0] else 0
        return cls(row_dim(spec), tuple(chunk_range(shape[0], world, rank)[0] * row for rank in range(world + 1)))

    def shape(self, spec: ParamSpec, rank: int) -> tuple[int, ...]:
        """Return the shape for a rank's part."""
        if not spec.shape:
            return () if rank == 0 else (0,)
        return chunk_box(spec.shape, self.dim, len(self.starts) - 1, rank).size


@dataclass(frozen=True)
class ElementRun:
    """A parameter's contiguous elements that one rank sends to another."""

    index: int  # the parameter's index
    flat: int  # offset in the flat shard, in elements
    part: int  # offset in the rows, in elements in memory order
    numel: int


@dataclass(frozen=True)
class Exchange:
    """One rank's sends and receives, from flat shards to rows."""

    rows: tuple[Rows, ...]  # by parameter
    out: tuple[tuple[ElementRun, ...], ...]  # runs in this rank's flat shard to send, by receiving rank
    into: tuple[tuple[ElementRun, ...], ...]  # runs in this rank's rows to receive, by sending rank
    shapes: tuple[tuple[int, ...], ...]  # shape of this rank's rows, by parameter
    starts: dict[int, int]  # offset in this rank's flat shard, by parameter with elements in it

    @cached_property
    def gives(self) -> list[int]:
        """Elements to send to each rank."""
        return [sum(span.numel for span in spans) for spans in self.out]

    @cached_property
    def takes(self) -> list[int]:
        """Elements to receive from each rank."""
        return [sum(span.numel for span in spans) for spans in self.into]

    @cached_property
    def held(self) -> list[int]:
        """Elements in this rank's rows, by parameter."""
        return [prod(shape) for shape in self.shapes]


@lru_cache(maxsize=4096)
def plan_exchange(layout: FlatLayout, rank: int) -> Exchange:
    """Plan one rank's part in the exchange from flat shards to rows."""
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
    """Return the lowest rank that has elements, by parameter index."""
    owners: dict[int, int] = {}
    for rank in range(layout.world):
        for run in _runs(layout, rank):
            if run.stop > run.start:
                owners.setdefault(run.index, rank)
    return owners


def start_flat_to_rows(
    shard: torch.Tensor, layout: FlatLayout, group: dist.ProcessGroup | None, staging: Staging
) -> Callable[[], list[torch.Tensor]]:
    """Start an all-to-all for this rank's rows; the returned function waits for them. Collective."""
    # Received elements are in rank order, as in the flat layout, so each parameter's rows are contiguous. This rank's
    # own elements are not sent if they come first or last, so that the others are contiguous; they are copied
    # meanwhile.
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
    """Fill this rank's flat parts from all ranks' rows, by one all-to-all. Collective."""
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
    """Return where runs go, without skipped parameters."""
    targets = []
    for span in spans:
        place, at = into[span.index], span.flat - starts[span.index]
        if place is not None and parts[span.index] is not None:
            targets.append(place[at : at + span.numel])
    return targets


def _to_shape(part: torch.Tensor, shape: tuple[int, ...], spec: ParamSpec) -> torch.Tensor:
    """Return elements in memory order as a tensor with the given shape."""
    if not spec.order:
        return part.view(shape)
    return part.view([shape[d] for d in spec.order]).permute([spec.order.index(d) for d in range(len(spec.order))])


def _flat(part: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    return (part.permute(spec.order) if spec.order else part).reshape(-1)


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
