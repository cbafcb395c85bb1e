"""Adapter for the wrapper's units: a flat parameter, or 1-D views into a flat shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardckpt.core.modules.dtensors import MeshPlacements, get_mesh_placements, local, wrap_local
from shardckpt.core.params.buffer_layout import isolate_storage
from shardckpt.core.params.full_params import Staging, gather_full
from shardckpt.core.params.mesh_placement import join_placements
from shardckpt.core.registration.flat_param import FlatParamRegistration
from shardckpt.core.registration.orig_params import OrigParamsRegistration
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.state.adapters.base import Tensors
from shardckpt.state.adapters.engine_bucket import EngineBucketAdapter
from shardckpt.state.redistribute.flat_to_rows import (
    find_first_owners,
    row_dim,
    rows_to_flat,
    start_flat_to_rows,
    strides,
)
from shardckpt.state.redistribute.rank_grid import Ranks


class EngineFlatAdapter(EngineBucketAdapter):
    """Adapter for a bucket with a flat layout: a flat parameter or original ones."""

    def __init__(
        self,
        registration: FlatParamRegistration | OrigParamsRegistration,
        names: Sequence[Sequence[str]],
        ranks: Ranks,
        mesh: DeviceMesh | None,
        flat_name: str | None,
    ) -> None:
        super().__init__(registration, names, ranks)
        self._mesh = mesh
        self._flat_name = flat_name

    @property
    def layout(self) -> FlatLayout:
        """The entries' layout in all ranks' shards."""
        layout = self.bucket.layout
        assert isinstance(layout, FlatLayout), "the wrapper lays out flat"
        return layout

    def show(self, values: Sequence[torch.Tensor], *, is_flat: bool) -> None:
        """Register tensors on the modules for torch's own recursion; `hide` undoes it."""
        home = self._registration.home if isinstance(self._registration, FlatParamRegistration) else None
        if home is not None:
            home.module._parameters[home.attribute] = values[0] if is_flat else None  # type: ignore[assignment]
        if not is_flat:
            for member, value in zip(self.bucket.members, values, strict=True):
                for place in member.places:
                    place.module.__dict__.pop(place.attribute, None)  # a placeholder of the sharded unit
                    place.module._parameters[place.attribute] = value  # type: ignore[assignment]

    def registered(self, *, is_flat: bool) -> list[torch.Tensor]:
        """Return the registered tensors, from `show` or a user's replacements."""
        if is_flat:
            assert isinstance(self._registration, FlatParamRegistration), "only a flat parameter has a home"
            places = [self._registration.home]
        else:
            places = [member.places[0] for member in self.bucket.members]
        tensors = [place.module._parameters[place.attribute] for place in places]
        return [tensor for tensor in tensors if tensor is not None]

    def hide(self) -> None:
        """Register the bucket's sharded parameters again."""
        if isinstance(self._registration, FlatParamRegistration):
            self._registration.unregister_summoned()
        else:
            self._registration.register_sharded()

    @property
    def flat_name(self) -> str | None:
        """The flat parameter's FQN; None if the original parameters are registered."""
        return self._flat_name

    @property
    def unpadded_size(self) -> int:
        """Elements in this rank's shard, without the padding at its end."""
        return self.layout.get_unpadded_size(self.bucket.group.rank)

    @property
    def has_parts_everywhere(self) -> bool:
        """Return True if every rank has a part of every exposed parameter, as of a flat one."""
        return self._flat_name is not None or self.bucket.keeps_full

    def shard_lengths(self, position: int) -> tuple[int, ...] | None:
        """Return each rank's number of elements; with padding for a flat parameter."""
        if self.is_parallel:
            return None
        if self._flat_name is not None:
            return (self.layout.chunk,) * self.layout.world
        ranks = range(self.layout.world)
        return tuple(sum(run.stop - run.start for run in self.layout.runs(r) if run.index == position) for r in ranks)

    def is_reporting_rank(self, position: int) -> bool:
        """Return True on the lowest rank that has a part of a parameter."""
        group = self.bucket.group
        if group.replicate is not None and group.replicate.rank() != 0:
            return False
        return find_first_owners(self.layout).get(position, 0) == group.rank

    @property
    def is_stored_as_sharded(self) -> bool:
        """Return False: `to_sharded` exchanges rows between ranks."""
        return False

    def layout_metadata(self) -> dict[str, Any]:
        """Return the layout, this rank's index in it, and the flat parameter's FQN."""
        return {**super().layout_metadata(), "flat": self._flat_name}

    def to_sharded(self, packed: torch.Tensor, staging: Staging) -> list[torch.Tensor]:
        """Exchange flat shards for rows: one all-to-all."""
        return self.start_to_sharded(packed, staging)()

    def start_to_sharded(self, packed: torch.Tensor, staging: Staging) -> Callable[[], list[torch.Tensor]]:
        """Start the all-to-all, so that it overlaps with packing the next unit."""
        if self.bucket.keeps_full or self._mesh is None:
            parts = self.bucket.split_shard(packed)
            copies = [self.bucket.wrap_unsharded(index, part.clone()) for index, part in enumerate(parts)]
            return lambda: copies
        if self.is_parallel and self._both is None:
            gathered = self._parallel(packed)
            return lambda: gathered
        rows = start_flat_to_rows(packed.to(self.bucket.compute_device), self.layout, self.bucket.group.shard, staging)
        return lambda: [self._dtensor(part, index) for index, part in enumerate(rows())]

    def _parallel(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return tensor-parallel DTensors, gathered over data-parallel ranks."""
        values = gather_full(self.bucket, packed).values
        return [self.bucket.wrap_unsharded(index, value.clone()) for index, value in enumerate(values)]

    @cached_property
    def _both(self) -> list[MeshPlacements | None] | None:
        """Placements over one mesh for data and tensor parallelism; None without such a mesh."""
        # A tensor-parallel shard is split into rows again. Other parameters are replicated over tensor-parallel ranks.
        inner = next(leaf.device_mesh for leaf in self.bucket.unsharded.params if isinstance(leaf, DTensor))
        both: list[MeshPlacements | None] = []
        for spec, leaf in zip(self.layout.specs, self.bucket.unsharded.params, strict=True):
            if not spec.shape:
                both.append(get_mesh_placements(leaf))
                continue
            own = leaf.placements if isinstance(leaf, DTensor) else (Replicate(),) * inner.ndim
            placed = None if self._mesh is None else join_placements(self._mesh, row_dim(spec), inner, own)
            if placed is None or (isinstance(leaf, DTensor) and leaf.device_mesh != inner):
                return None
            both.append(placed)
        return both

    def _dtensor(self, part: torch.Tensor, index: int) -> torch.Tensor:
        assert self._mesh is not None
        spec = self.layout.specs[index]
        if not spec.shape:  # a 0-dim tensor cannot be split
            return self.bucket.wrap_unsharded(index, self._scalar(part)) if self.is_parallel else self._scalar(part)
        if self.is_parallel:
            both = self._both[index] if self._both is not None else None
            assert both is not None, "or it is gathered"
            leaf = self.bucket.unsharded.params[index]
            return wrap_local(isolate_storage(part), *both, leaf.shape, leaf.stride())
        stride = strides(spec.shape, spec.order)
        return wrap_local(isolate_storage(part), self._mesh, self._placements(spec), spec.shape, stride)

    def _placements(self, spec: ParamSpec) -> tuple[Placement, ...]:
        copies = 0 if self._mesh is None else self._mesh.ndim - 1
        return (*[Replicate()] * copies, Shard(row_dim(spec)))

    def placements(self) -> list[MeshPlacements | None]:
        """Return placements as rows along the dimension that is slowest in memory."""
        if self.is_parallel:
            if self._both is not None and not self.bucket.keeps_full:
                return self._both
            return [get_mesh_placements(leaf) for leaf in self.bucket.unsharded.params]
        mesh = None if self.bucket.keeps_full else self._mesh
        return [
            (mesh, self._placements(spec)) if mesh is not None and spec.shape else None for spec in self.layout.specs
        ]

    def _scalar(self, part: torch.Tensor) -> torch.Tensor:
        """Broadcast a 0-dim value from the shard group's rank 0. Collective."""
        value = part.clone() if part.dim() == 0 else part.new_zeros(())
        dist.broadcast(value.view(1).view(torch.uint8), group=self.bucket.group.shard, group_src=0)
        return value

    def from_sharded(self, values: Tensors, into: Tensors, staging: Staging) -> None:
        """Exchange rows for flat shards: one all-to-all."""
        own = [None if value is None else local(value) for value in values]
        if self.bucket.keeps_full or self._mesh is None or (self.is_parallel and self._both is None):
            self._take(own, into)
            return
        rows = [
            row if row is None or spec.shape or self.bucket.group.rank == 0 else row.new_empty(0)
            for row, spec in zip(own, self.layout.specs, strict=True)
        ]
        dtype = next(place.dtype for place in into if place is not None)
        rows_to_flat(rows, into, self.layout, self.bucket.group.shard, staging, dtype=dtype, device=self.device)

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the flat tensor itself, or each original parameter's part."""
        return [packed] if self._flat_name is not None else super().parts(packed)

    def pack(self, parts: Tensors, dtype: torch.dtype, staging: Staging | None = None) -> torch.Tensor:
        """Pack parts into one 1-D tensor with the shard's layout."""
        if self._flat_name is None:
            return super().pack(parts, dtype, staging)
        if parts[0] is None:
            return torch.zeros(self.layout.chunk, dtype=dtype, device=self.device)
        return local(parts[0]).to(dtype)

    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor; a flat parameter's padding is zero."""
        empty = torch.empty_like(local(self.exposed[position].detach()), dtype=dtype)
        if self._flat_name is not None:
            at = 0
            for run in self.layout.runs(self.bucket.group.rank):
                empty[at : run.offset].zero_()
                at = run.offset + run.numel
            empty[at:].zero_()
        return empty
