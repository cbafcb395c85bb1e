"""Adapters for the engine's buckets; for `fully_shard`, DTensors that are sharded along one dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.dtensors import MeshPlacements, gather_full_tensor, get_mesh_placements, local, split_rows
from shardckpt.core.params.full_params import Staging, concat_shards, gather_copies
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.registration.base import ParamRegistration
from shardckpt.core.registration.dtensor_params import DTensorRegistration
from shardckpt.errors import UnsupportedError
from shardckpt.state.adapters.base import Entry, ShardingAdapter, Tensors, broadcast_from_rank0, copy_parts
from shardckpt.state.keys.slots import has_own_elements
from shardckpt.state.redistribute.dtensor_rows import has_rows_everywhere, scatter_from_rank0
from shardckpt.state.redistribute.rank_grid import Ranks
from shardckpt.torch_features import shard_replicated


class EngineBucketAdapter(ShardingAdapter):
    """Adapter for an engine's bucket; subclasses know how its parameters are exposed."""

    def __init__(self, registration: ParamRegistration, names: Sequence[Sequence[str]], ranks: Ranks) -> None:
        bucket = registration.bucket
        rows = zip(names, bucket.unsharded.params, strict=True)  # each parameter's first FQN comes before its aliases
        super().__init__(
            [
                Entry(first, tuple(others), tuple(leaf.shape), bucket.stored.dtypes.stored, leaf.requires_grad)
                for (first, *others), leaf in rows
            ],
            ranks,
        )
        self._registration = registration

    @property
    def bucket(self) -> Bucket:
        """The engine's bucket."""
        return self._registration.bucket

    @property
    def device(self) -> torch.device:
        """The unit's compute device."""
        return self.bucket.compute_device

    @property
    def exposed(self) -> list[nn.Parameter]:
        """Parameters that an optimizer updates."""
        return self._registration.parameters

    @property
    def is_everywhere(self) -> bool:
        """Return True if every rank has a part or a copy."""
        return self.bucket.group.world == self.ranks.size

    @property
    def is_sharded(self) -> bool:
        """Return True if ranks have different parts."""
        return not self.bucket.keeps_full and self.bucket.group.size > 1

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Process group that shards the bucket."""
        return self.bucket.group.shard

    @property
    def is_parallel(self) -> bool:
        """Return True if tensor parallelism sharded parameters before the engine did."""
        return any(isinstance(leaf, DTensor) for leaf in self.bucket.unsharded.params)

    def layout_metadata(self) -> dict[str, Any]:
        """Return the layout, and this rank's index in it."""
        return {"layout": self.bucket.layout.to_json(), "place": self.bucket.group.rank}

    @property
    def packed(self) -> torch.Tensor:
        """This rank's shard."""
        self._registration.pull_user_changes()
        return self.bucket.shard.detach()

    def mark_written(self) -> None:
        """Free stale unsharded parameters; make the next all-gather wait for the write."""
        self.bucket.unsharded.reshard()
        self._registration.register_sharded()
        self.bucket.mark_shard_written()

    def part_views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part as a view."""
        return self.bucket.split_shard(packed)

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part as a view."""
        return self.bucket.split_shard(packed)

    def pack(self, parts: Tensors, dtype: torch.dtype, staging: Staging | None = None) -> torch.Tensor:
        """Pack parts into one 1-D tensor with the shard's layout."""
        return concat_shards(self.bucket, [None if part is None else local(part) for part in parts], dtype, staging)

    def to_full(self, packed: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:
        """Gather the bucket; gather tensor-parallel parameters again over their mesh."""
        values: Iterable[torch.Tensor] | None = gather_copies(self.bucket, packed, staging, first_only=first_only)
        if values is not None and self.is_parallel:
            values = [self._to_full(index, value) for index, value in enumerate(values)]
        return values if not first_only or self.ranks.is_first else None

    def _to_full(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return the full parameter from its part in the bucket. Collective if parallel."""
        seen = self.bucket.wrap_unsharded(index, value)
        return gather_full_tensor(seen) if isinstance(seen, DTensor) else value

    def _take_local(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return a full parameter's part that the bucket contains."""
        leaf = self.bucket.unsharded.params[index]
        if not isinstance(leaf, DTensor):
            return value
        value = value.to(self.bucket.compute_device)
        return shard_replicated(value, leaf.device_mesh, leaf.placements).to_local()

    def from_full(self, values: Tensors, into: Tensors) -> None:
        """Copy this rank's shards from full values."""
        own = [None if value is None else self._take_local(index, value) for index, value in enumerate(values)]
        self._take(own, into)

    def _take(self, values: Tensors, into: Tensors) -> None:
        """Copy this rank's shards from the bucket's parts."""
        copy_parts(self._slice(values, self.bucket.group.rank), into)

    def _slice(self, values: Tensors, rank: int) -> list[torch.Tensor | None]:
        """Return a rank's shards from the bucket's parts, as views if possible."""
        return list(values) if self.bucket.keeps_full else self.bucket.packing.shard_values(values, rank)

    def from_rank0(self, values: Tensors | None, into: Tensors, dtype: torch.dtype, staging: Staging) -> None:
        """Scatter the shards; broadcast if the group has not all ranks."""
        group = self.bucket.group
        if self.is_parallel or group.world != self.ranks.size:  # the group's rank 0 may not be the model's
            self.from_full(self._broadcast_full(values, into, dtype), into)
            return
        rows = None
        if values is not None and group.is_first:
            rows = [self._slice(values, rank) for rank in range(group.size)]
        replicas = Ranks(() if group.replicate is None else (group.replicate,))
        scatter_from_rank0(rows, into, group.shard, replicas, dtype=dtype, device=self.device, staging=staging)

    def _broadcast_full(self, values: Tensors | None, into: Tensors, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Broadcast rank 0's full values. Collective."""
        given = [None] * len(self.entries) if values is None else values
        return [
            None if place is None else broadcast_from_rank0(self.ranks, entry.shape, dtype, self.device, value)
            for entry, place, value in zip(self.entries, into, given, strict=True)
        ]


class EngineDTensorAdapter(EngineBucketAdapter):
    """Adapter for a `fully_shard` bucket; for arguments see `EngineBucketAdapter`."""

    def __init__(self, registration: DTensorRegistration, names: Sequence[Sequence[str]], ranks: Ranks) -> None:
        super().__init__(registration, names, ranks)
        self._placed = registration.placements

    @property
    def has_parts_everywhere(self) -> bool:
        """Return True if every rank has rows from every parameter."""
        rows = [
            spec.shape[placed.dim]
            for spec, placed in zip(self.bucket.layout.specs, self._placed, strict=True)
            if placed.dim is not None
        ]
        return all(has_rows_everywhere(count, self.bucket.group.size) for count in rows)

    def layout_metadata(self) -> dict[str, Any]:
        """Return the layout, and this rank's index in it."""
        # Alignment is not saved: a state has the parameters as separate tensors.
        layout = replace(self.bucket.layout, alignment=1)
        return {"layout": layout.to_json(), "place": self.bucket.group.rank}

    def shard_lengths(self, position: int) -> tuple[int, ...] | None:
        """Return each rank's number of rows."""
        dim = self._placed[position].dim
        shape, ranks = self.bucket.layout.specs[position].shape, self.bucket.group.size
        return None if dim is None else split_rows(shape[dim], ranks)

    def placements(self) -> list[MeshPlacements | None]:
        """Return the parameters' meshes and placements."""
        return [get_mesh_placements(parameter) for parameter in self.exposed]

    def to_sharded(self, packed: torch.Tensor, staging: Staging) -> list[torch.Tensor]:  # noqa: ARG002
        """Return DTensors that alias `packed`, without communication or copies."""
        if packed.numel() and packed.data_ptr() == self.bucket.shard.data_ptr():
            return [parameter.detach() for parameter in self.exposed]
        return self.parts(packed)

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return DTensors around each parameter's part."""
        return [placed.sharded(part) for placed, part in zip(self._placed, self.local_parts(packed), strict=True)]

    def local_parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part."""
        return super().parts(packed)

    def to_full(self, packed: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:
        """Gather the bucket; refuse a subclass without dense elements on all ranks, before a collective fails."""
        if not _has_dense_elements(packed):
            raise UnsupportedError(
                "a FULL state cannot contain this sharded parameter",
                where=self.entries[0].name,
                found=f"a tensor of the class {type(packed).__name__}",
                expected="a dense tensor",
                fix="Take the SHARDED state, or dequantize the parameter before it is sharded.",
            )
        return super().to_full(packed, staging, first_only=first_only)

    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a DTensor around new memory."""
        return self._placed[position].sharded(torch.empty_like(local(self.exposed[position].detach()), dtype=dtype))


def _has_dense_elements(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements can be copied into a plain tensor, as a gather does."""
    if has_own_elements(tensor):
        return True
    try:
        none = tensor[:0]
        torch.empty(none.shape, dtype=none.dtype, device=none.device).copy_(none)
    except Exception:  # noqa: BLE001  (each class raises another one)
        return False
    return True
