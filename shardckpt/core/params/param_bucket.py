"""Bucket: parameters that are gathered together (torch: `FSDPParamGroup`)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core.comm.collectives import CommHook, CustomCollectives, ShardGroup
from shardckpt.core.comm.rank_checks import InitialChecksums
from shardckpt.core.config import Offload, Precision
from shardckpt.core.modules.fqn_and_params import Name, ParamInfo
from shardckpt.core.params.buffer_layout import DimPacking, FlatPacking, Packing, StoredShard
from shardckpt.core.params.gradient_reduction import GradientReducer
from shardckpt.core.params.unsharded_params import ParamPlacement, UnshardedParams
from shardckpt.devices import wait_for_deferred_copies
from shardckpt.layout import ALIGNMENT, Layout


@dataclass(frozen=True)
class ShardSpec:
    """Sharding settings for a bucket's parameters."""

    # In a flat layout, each parameter starts at a multiple of 16 bytes in the compute dtype. Parameters with placements
    # always do, in all dtypes.
    aligned: bool = False
    keeps_full: bool = False  # every rank keeps all elements
    # Each parameter's placement on a mesh, sharded along a dimension; empty for plain, flat parameters.
    placements: tuple[ParamPlacement, ...] = ()
    # Use a flat layout even with `placements`, which then describe the module's parameters only.
    flat: bool = False
    # Ranks to reshard to after forward (`reshard_after_forward` as a number); None without it.
    post_forward_group: dist.ProcessGroup | None = None


class Bucket:
    """Parameters with one dtype that are gathered, freed and reduced together."""

    def __init__(
        self,
        members: Sequence[ParamInfo],
        group: ShardGroup,
        name: Name,
        spec: ShardSpec,
        precision: Precision,
        offload: Offload,
    ) -> None:
        self.name = name
        self.members = tuple(members)
        self.group = group
        self.keeps_full = spec.keeps_full
        self.placements = spec.placements
        self.trainable = members[0].parameter.requires_grad
        values = [member.parameter.detach() for member in members]
        if spec.placements:
            values = [place.local(value) for place, value in zip(spec.placements, values, strict=True)]
        self.packing = self._build_packing(values, spec, precision)
        shard = self._allocate_shard(values[0], self.packing.layout.chunk)
        self.packing.write_shard(values, group.rank, shard)
        self.stored = StoredShard(name, self.packing, group, shard, precision, offload, keeps_full=spec.keeps_full)
        self.unsharded = self._build_unsharded(values[0].device, spec)
        self.reducer = GradientReducer(self.stored, self.unsharded)
        self.initial_checksums = InitialChecksums.compute([member.fqn for member in members], values, self.local_shards)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """Return a bucket with copied parameters, over the same ranks, without gradients."""
        self.unsharded.reshard()
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    def _allocate_shard(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    def _build_packing(self, values: Sequence[torch.Tensor], spec: ShardSpec, precision: Precision) -> Packing:
        names = [member.fqn for member in self.members]
        aliases = [tuple(place.fqn for place in member.places[1:]) for member in self.members]
        dims = [place.dim for place in spec.placements]
        is_flat, stored = not dims or spec.flat, values[0].dtype
        dtype = precision.computed(stored) if is_flat else precision.smallest(stored)
        alignment = max(1, ALIGNMENT // dtype.itemsize) if spec.aligned or not is_flat else 1
        if is_flat or spec.keeps_full:
            return FlatPacking(names, values, aliases, self.group.size, alignment=alignment)
        rows = [dim or 0 for dim in dims]
        return DimPacking(names, values, aliases, self.group.size, dims=rows, alignment=alignment)

    def _build_unsharded(self, device: torch.device, spec: ShardSpec) -> UnshardedParams:
        """Create the full parameters, without values unless they alias the shard."""
        group = spec.post_forward_group
        return UnshardedParams(
            self.stored,
            placements=spec.placements,
            device=device,
            trains=[member.parameter.requires_grad for member in self.members],
            post_forward_group=ShardGroup(group) if group is not None else None,
        )

    # ----------------------------------------------------------------------------------------------------- facts

    @property
    def layout(self) -> Layout:
        """Parameter layout in every rank's shard."""
        return self.packing.layout

    @property
    def shard(self) -> torch.Tensor:
        """This rank's 1-D shard."""
        return self.stored.data

    @property
    def compute_device(self) -> torch.device:
        """The unit's compute device."""
        return self.unsharded.device

    @property
    def local_shards(self) -> list[torch.Tensor]:
        """Views into the shard, one per parameter; full parameters if nothing is sharded."""
        return self.split_shard(self.stored.data.data)

    def split_shard(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Split a tensor with the shard's layout into views, one per parameter."""
        return self.packing.views(shard) if self.keeps_full else self.packing.split_shard(shard, self.group.rank)

    def wrap_unsharded(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return a full value as the module's parameter, which may be a DTensor."""
        return self.placements[index].full(value) if self.placements else value

    # ------------------------------------------------------------------------------------------------- the shard

    def replace_shard(self, shard: torch.Tensor) -> None:
        """Replace the shard by another tensor with the same length."""
        stored = self.stored
        # The new shard is aliased unless nothing is sharded, or it has to move to the CPU or to pinned memory.
        if shard.dtype == self.stored.dtypes.stored and shard.device == stored.data.device:
            if self.unsharded.is_aliased:
                wait_for_deferred_copies()
                stored.data.copy_(shard)
            else:
                stored.data = stored.pinned(shard)
            self.mark_shard_written()
            return
        self.unsharded.reshard()
        stored.replace(shard)
        self.unsharded.rebuild(self.compute_device if stored.offload.enabled else shard.device)
        self.mark_shard_written()

    def set_compute_device(self, device: torch.device) -> None:
        """Set the compute device, if it is not the shard's device."""
        if device != self.compute_device:
            self.unsharded.reshard()
            self.unsharded.rebuild(device)

    def write_back(self) -> None:
        """Copy this rank's part of full parameters that a user changed to the shard."""
        if not self.unsharded.is_aliased:
            wait_for_deferred_copies()
            self.packing.write_shard(self.unsharded.tensors, self.group.rank, self.stored.data.data)
            self.mark_shard_written()

    def mark_shard_written(self) -> None:
        """Make all-gathers wait for writes to the shard, at any time in an iteration."""
        self.unsharded.streams.make_gathers_wait()

    def select(self, kind: type[Bucket], indices: Sequence[int]) -> Bucket:
        """Return a bucket with some members and the same collectives, without values."""
        placements = tuple(self.placements[index] for index in indices)
        for index in indices:
            full, leaf = self.unsharded.tensors[index], self.unsharded.params[index]
            empty = torch.empty_strided(full.shape, full.stride(), dtype=self.stored.dtypes.stored, device="meta")
            stand_in = nn.Parameter(
                placements[0].full(empty) if placements else empty, requires_grad=leaf.requires_grad
            )
            stand_in.__dict__.update(leaf.__dict__)
            self.members[index].replace(stand_in)
        group = self.unsharded.post_forward_group
        post_forward_group = None if group is None else group.shard
        spec = ShardSpec(keeps_full=self.keeps_full, placements=placements, post_forward_group=post_forward_group)
        members = [self.members[index] for index in indices]
        selected = kind(members, self.group, self.name, spec, self.stored.precision, self.stored.offload)
        reducer = self.reducer
        selected.unsharded.keeps_storage = self.unsharded.keeps_storage
        selected.set_collectives(hook=reducer.hook, comms=reducer.comms, group=reducer.group)
        return selected

    def set_collectives(
        self, *, hook: CommHook | None = None, comms: CustomCollectives | None = None, group: ShardGroup | None = None
    ) -> None:
        """Set the collectives and hooks that gather and reduce."""
        self.reducer.set_collectives(hook=hook, comms=comms, group=group)
        self.unsharded.set_all_gather(self.reducer.comms.all_gather)

    def reset_after_error(self) -> None:
        """Wait for collectives after an error; drop gradients and free full parameters."""
        try:
            self.reducer.reset_after_error()
        finally:
            self.unsharded.discard()
