"""A bucket's shard on this rank, with its layout over ranks and its dtypes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.config import Offload, Precision
from shardckpt.core.modules.fqn_and_params import Name
from shardckpt.core.params.buffer_layout import Packing
from shardckpt.devices import pinned


@dataclass(frozen=True)
class BucketDtypes:
    """One bucket's dtypes."""

    stored: torch.dtype  # the shard
    compute: torch.dtype  # full parameters
    reduce: torch.dtype  # while gradients are averaged
    gradient: torch.dtype  # gradients that an optimizer gets

    @classmethod
    def resolve(cls, stored: torch.dtype, precision: Precision) -> BucketDtypes:
        """Return the dtypes for a shard's stored dtype."""
        reduced = precision.reduced(stored)
        gradient = reduced if precision.keep_low_precision_grads else stored
        return cls(stored, precision.computed(stored), reduced, gradient)


@dataclass(frozen=True)
class BucketLayout:
    """A bucket's parameter layout in buffers and over ranks."""

    name: Name  # in messages
    packing: Packing  # in the shard and in collective buffers
    group: ShardGroup  # ranks that shard the parameters, and their replicas
    keeps_full: bool  # every rank keeps all elements


class StoredShard:
    """A bucket's 1-D shard, which the optimizer updates."""

    def __init__(self, data: torch.Tensor, precision: Precision, offload: Offload) -> None:
        self.precision = precision
        self.offload = offload
        self.data = self.pinned(data.cpu()) if offload.enabled and not data.is_meta else data
        self.dtypes = BucketDtypes.resolve(data.dtype, precision)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredShard:
        """Return a copy with its own memory."""
        copied = memo[id(self)] = copy.copy(self)
        copied.data = self.pinned(self.data.detach().clone())
        return copied

    def replace(self, data: torch.Tensor) -> None:
        """Replace the shard by a tensor, whose dtype and device may differ."""
        # The tensor is aliased unless it has to move to the CPU.
        self.data = self.pinned(data.cpu()) if self.offload.enabled else data
        self.dtypes = BucketDtypes.resolve(data.dtype, self.precision)

    def pinned(self, data: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor in pinned memory, if shards are offloaded to pinned memory."""
        return pinned(data, self.offload.enabled and self.offload.pin and not data.is_meta)
