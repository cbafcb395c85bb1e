"""A bucket's layout in all-gather and reduce-scatter buffers, and its shard on this rank."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardckpt.boxes import narrow_to_box
from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.config import Offload, Precision
from shardckpt.core.modules.dtensors import memory_order, view_in_order
from shardckpt.core.modules.fqn_and_params import Name
from shardckpt.devices import pinned
from shardckpt.layout import DimLayout, FlatLayout, Layout, ParamSpec, ShardRun


def build_param_spec(
    name: str, tensor: torch.Tensor, aliases: tuple[str, ...], order: tuple[int, ...] = ()
) -> ParamSpec:
    """Return a full parameter's spec."""
    return ParamSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), order, aliases)


def isolate_storage(part: torch.Tensor) -> torch.Tensor:
    """Return part of a buffer with its own storage object over the same memory."""
    # A DTensor around a view with a storage offset can be neither copied nor saved. Saving a view saves its complete
    # storage. This also applies to a part without elements, which keeps its shape.
    if type(part) is not torch.Tensor or part.is_meta:
        return part
    if part.numel() == 0:  # no memory to share; the offset may differ from 0
        return part.new_empty(part.shape)
    extent = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
    storage, width = part.untyped_storage(), part.element_size()
    if storage.nbytes() == extent * width:
        return part
    start = part.storage_offset() * width
    isolated = torch.empty(0, dtype=part.dtype, device=part.device)
    return isolated.set_(storage[start : start + extent * width], 0, part.shape, part.stride())


class Packing(ABC):
    """A bucket's layout in shards, in the all-gather output, and in the full buffer."""

    layout: Layout  # in every rank's shard

    @property
    def all_gather_numel(self) -> int:
        """Number of elements in all ranks' shards, and in the full buffer, including padding."""
        return self.layout.chunk * self.layout.world

    def __deepcopy__(self, memo: dict[int, Any]) -> Packing:
        """Return itself: it is immutable, and copies share it."""
        return self

    is_direct = True  # the all-gather output is the full buffer

    @abstractmethod
    def views(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return each full parameter as a view into the full buffer."""

    @abstractmethod
    def split_shard(self, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Split a rank's shard into one view per parameter; empty if the rank does not have its elements."""

    @abstractmethod
    def unpack(self, rows: torch.Tensor, full: torch.Tensor) -> None:
        """Copy gathered shards, one row per rank, to the full buffer."""

    def list_rows(self, full: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the parts of the full buffer that a gathered row fills in order; None if they are not contiguous."""
        del full
        return None

    @abstractmethod
    def copy_full_params(self, gathered: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a copy of each full parameter, with the full buffer's strides."""

    @abstractmethod
    def pack(self, values: Iterable[torch.Tensor | None], rows: torch.Tensor) -> None:
        """Copy full values to the first `chunk` columns of the rows for ranks with a part; None gives zeros."""

    def list_chunks(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
        """Return tensors that `torch._chunk_cat` packs as `pack` packs values; None if it cannot."""
        del values
        return None

    def write_shard(self, values: Sequence[torch.Tensor], rank: int, out: torch.Tensor) -> None:
        """Write a rank's shard of full values to `out`, with zeros as padding."""
        out.zero_()
        for part, value in zip(self.split_shard(out, rank), self.shard_values(values, rank), strict=True):
            if value is not None:
                part.copy_(value)

    @abstractmethod
    def shard_values(self, values: Sequence[torch.Tensor | None], rank: int) -> list[torch.Tensor | None]:
        """Return a rank's shards of full values, as views if possible; None if missing."""


class FlatPacking(Packing):
    """Flat layout: concatenated parameters, split at any element."""

    # The all-gather output is the full buffer. `alignment` is a number of elements.

    def __init__(
        self,
        names: Sequence[str],
        values: Sequence[torch.Tensor],
        aliases: Sequence[tuple[str, ...]],
        world: int,
        *,
        alignment: int,
    ) -> None:
        rows = zip(names, values, aliases, strict=True)
        specs = tuple(build_param_spec(name, value, other, memory_order(value)) for name, value, other in rows)
        self.layout: FlatLayout = FlatLayout(specs, world, alignment)

    def views(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return each full parameter as a view into the full buffer."""
        places = zip(self.layout.specs, self.layout.offsets, strict=True)
        return [view_in_order(full[at : at + spec.numel], spec.shape, spec.order) for spec, at in places]

    def split_shard(self, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return each parameter's part in a rank's shard, as a 1-D view."""
        parts = [shard[0:0]] * len(self.layout.specs)
        for run in self.layout.runs(rank):
            parts[run.index] = shard[run.offset : run.offset + run.numel]
        return parts

    def shard_values(self, values: Sequence[torch.Tensor | None], rank: int) -> list[torch.Tensor | None]:
        """Return a rank's parts of full values, 1-D."""
        nothing = next((value.new_empty(0) for value in values if value is not None), None)
        parts = [None if value is None else nothing for value in values]
        for run in self.layout.runs(rank):
            value = values[run.index]
            if value is not None:
                parts[run.index] = self._flat(value, run.index)[run.start : run.stop]
        return parts

    def unpack(self, rows: torch.Tensor, full: torch.Tensor) -> None:
        """Do nothing: the gathered shards are the full buffer."""

    def copy_full_params(self, gathered: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a copy of each full parameter."""
        return (view.clone() for view in self.views(gathered))

    def pack(self, values: Iterable[torch.Tensor | None], rows: torch.Tensor) -> None:
        """Copy full values to the rows for ranks that have parts, with zeros elsewhere."""
        for rank, start, stop in self._holes:
            rows[rank, start:stop].zero_()
        for index, (value, runs) in enumerate(zip(values, self._runs_by_param, strict=True)):
            flat = None if value is None else self._flat(value, index)
            for rank, run in runs:
                place = rows[rank, run.offset : run.offset + run.numel]
                if flat is None:
                    place.zero_()
                else:
                    place.copy_(flat[run.start : run.stop])

    def _flat(self, value: torch.Tensor, index: int) -> torch.Tensor:
        order = self.layout.specs[index].order
        return (value.permute(order) if order else value).reshape(-1)

    @cached_property
    def _runs(self) -> tuple[tuple[ShardRun, ...], ...]:
        return tuple(tuple(self.layout.runs(rank)) for rank in range(self.layout.world))

    @cached_property
    def _runs_by_param(self) -> tuple[tuple[tuple[int, ShardRun], ...], ...]:
        """The ranks that have a part, for each parameter, each with the run."""
        runs_by_param: list[list[tuple[int, ShardRun]]] = [[] for _ in self.layout.specs]
        for rank, runs in enumerate(self._runs):
            for run in runs:
                runs_by_param[run.index].append((rank, run))
        return tuple(tuple(runs) for runs in runs_by_param)

    @cached_property
    def _holes(self) -> tuple[tuple[int, int, int], ...]:
        """Padding ranges: rank, and start and stop in its shard, in elements."""
        holes = []
        for rank, runs in enumerate(self._runs):
            at = 0
            for run in runs:
                holes.append((rank, at, run.offset))
                at = run.offset + run.numel
            holes.append((rank, at, self.layout.chunk))
        return tuple(hole for hole in holes if hole[1] < hole[2])


class DimPacking(Packing):
    """Layout in which each parameter is sharded along one dimension."""

    # The all-gather output has to be unpacked. A parameter that is sharded along dimension 0 has its ranks' rows one
    # after the other in the full buffer, followed by padding. So one copy unpacks all such parameters. Other parameters
    # are copied rank by rank.

    def __init__(
        self,
        names: Sequence[str],
        values: Sequence[torch.Tensor],
        aliases: Sequence[tuple[str, ...]],
        world: int,
        *,
        dims: Sequence[int],
        alignment: int = 1,
    ) -> None:
        rows = zip(names, values, aliases, strict=True)
        self.layout: DimLayout = DimLayout(tuple(build_param_spec(*row) for row in rows), world, tuple(dims), alignment)
        self._orders = tuple(memory_order(value) for value in values)
        self._boxes = [[self.layout.box(i, rank) for rank in range(world)] for i in range(len(values))]
        self._volumes = [[box.volume for box in boxes] for boxes in self._boxes]
        self._sizes = [volumes[0] for volumes in self._volumes]
        ends = (*self.layout.places[1:], self.layout.chunk)
        # Elements between a parameter and the next one, in every rank's shard.
        self._gaps = [end - at - n for at, n, end in zip(self.layout.places, self._sizes, ends, strict=True)]
        pairs = zip(self._sizes, self._gaps, strict=True)
        self._splits = [n for size, gap in pairs for n in ((size, gap) if gap else (size,))]
        plain = zip(dims, self._orders, strict=True)
        self._rowwise = [dim == 0 and not order for dim, order in plain]
        self.is_direct = world == 1 and all(self._rowwise)

    def views(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return each full parameter as a view into the full buffer."""
        params = []
        for spec, place, order in zip(self.layout.specs, self.layout.places, self._orders, strict=True):
            at = place * self.layout.world
            params.append(view_in_order(full[at : at + spec.numel], spec.shape, order))
        return params

    def split_shard(self, shard: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return each parameter's part in a rank's shard, in its shape."""
        parts = []
        for boxes, volumes, place in zip(self._boxes, self._volumes, self.layout.places, strict=True):
            parts.append(shard[place : place + volumes[rank]].view(boxes[rank].size))
        return parts

    def shard_values(self, values: Sequence[torch.Tensor | None], rank: int) -> list[torch.Tensor | None]:
        """Return a rank's parts of full values, as views."""
        pairs = zip(values, self._boxes, strict=True)
        return [None if value is None else narrow_to_box(value, boxes[rank]) for value, boxes in pairs]

    def unpack(self, rows: torch.Tensor, full: torch.Tensor) -> None:
        """Copy gathered shards, one row per rank, to the full buffer."""
        out = self.list_rows(full)
        if out is not None:
            torch.split_with_sizes_copy(rows, self._splits, dim=1, out=out)
            return
        world, views = self.layout.world, self.views(full)
        for index, (at, n) in enumerate(zip(self.layout.places, self._sizes, strict=True)):
            if self._rowwise[index]:
                full[at * world : (at + n) * world].view(world, n).copy_(rows[:, at : at + n])
                continue
            for row, box in zip(rows, self._boxes[index], strict=True):
                narrow_to_box(views[index], box).copy_(row[at : at + box.volume].view(box.size))

    def list_rows(self, full: torch.Tensor) -> list[torch.Tensor] | None:
        """Return each parameter's rows of the full buffer, one per rank; None if one is not sharded by rows."""
        if not all(self._rowwise):
            return None
        world = self.layout.world
        parts = full.split_with_sizes([n * world for n in self._splits])
        return [part.view(world, n) for part, n in zip(parts, self._splits, strict=True)]

    def copy_full_params(self, gathered: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each full parameter, unpacked from the ranks' shards."""
        world, rows = self.layout.world, gathered.view(self.layout.world, -1)
        for index, (spec, at, n) in enumerate(zip(self.layout.specs, self.layout.places, self._sizes, strict=True)):
            flat = gathered.new_empty(spec.numel)
            value = view_in_order(flat, spec.shape, self._orders[index])
            if self._rowwise[index] and spec.numel == n * world:
                flat.view(world, n).copy_(rows[:, at : at + n])
            else:
                for row, box in zip(rows, self._boxes[index], strict=True):
                    narrow_to_box(value, box).copy_(row[at : at + box.volume].view(box.size))
            yield value

    def pack(self, values: Iterable[torch.Tensor | None], rows: torch.Tensor) -> None:
        """Copy full values to the rows for ranks that have parts, with zeros elsewhere."""
        places = zip(values, self.layout.places, self._sizes, self._gaps, strict=True)
        for index, (value, at, n, gap) in enumerate(places):
            if gap:
                rows[:, at + n : at + n + gap].zero_()
            if value is None:
                rows[:, at : at + n].zero_()
            elif self._rowwise[index] and value.numel() == n * self.layout.world:
                rows[:, at : at + n].copy_(value.reshape(self.layout.world, n))
            else:
                for row, box in zip(rows, self._boxes[index], strict=True):
                    row[at : at + box.volume].view(box.size).copy_(narrow_to_box(value, box))
                    row[at + box.volume : at + n].zero_()

    def list_chunks(self, values: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
        """Return tensors that `torch._chunk_cat` packs as `pack` packs values; None if it cannot."""
        there = [value for value in values if type(value) is torch.Tensor]
        if len(there) < len(values) or not all(self._rowwise):
            return None
        most = max(self._gaps) * self.layout.world
        zeros = there[0].new_zeros(most) if most else there[0]
        chunks = []
        for value, gap in zip(there, self._gaps, strict=True):
            chunks += [value.contiguous() if value.dim() else value.view(1)] if value.numel() else []
            chunks += [zeros[: gap * self.layout.world]] if gap else []
        return chunks


@dataclass(frozen=True)
class _BucketDtypes:
    """One bucket's dtypes."""

    stored: torch.dtype  # the shard
    compute: torch.dtype  # full parameters
    reduce: torch.dtype  # while gradients are averaged
    gradient: torch.dtype  # gradients that an optimizer gets

    @classmethod
    def resolve(cls, stored: torch.dtype, precision: Precision) -> _BucketDtypes:
        """Return the dtypes for a shard's stored dtype."""
        reduced = precision.reduced(stored)
        gradient = reduced if precision.keep_low_precision_grads else stored
        return cls(stored, precision.computed(stored), reduced, gradient)


class StoredShard:
    """A bucket's 1-D shard, which the optimizer updates, and its layout in buffers and over ranks."""

    def __init__(
        self,
        name: Name,  # in messages
        packing: Packing,  # in the shard and in collective buffers
        group: ShardGroup,  # ranks that shard the parameters, and their replicas
        data: torch.Tensor,
        precision: Precision,
        offload: Offload,
        *,
        keeps_full: bool,  # every rank keeps all elements
    ) -> None:
        self.name = name
        self.packing = packing
        self.group = group
        self.keeps_full = keeps_full
        self.precision = precision
        self.offload = offload
        self.data = self.pinned(data.cpu()) if offload.enabled and not data.is_meta else data
        self.dtypes = _BucketDtypes.resolve(data.dtype, precision)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredShard:
        """Return a copy with its own memory, over the same ranks."""
        copied = memo[id(self)] = copy.copy(self)
        copied.name = copy.deepcopy(self.name, memo)
        copied.data = self.pinned(self.data.detach().clone())
        return copied

    def replace(self, data: torch.Tensor) -> None:
        """Replace the shard by a tensor, whose dtype and device may differ."""
        # The tensor is aliased unless it has to move to the CPU.
        self.data = self.pinned(data.cpu()) if self.offload.enabled else data
        self.dtypes = _BucketDtypes.resolve(data.dtype, self.precision)

    def pinned(self, data: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor in pinned memory, if shards are offloaded to pinned memory."""
        return pinned(data, self.offload.enabled and self.offload.pin and not data.is_meta)
