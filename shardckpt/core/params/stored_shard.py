"""Shard of a bucket on this rank, with its layout over ranks and its dtypes."""

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
    """Dtypes of one bucket.

    Attributes:
        stored: Dtype of the shard.
        compute: Dtype of the full parameters.
        reduce: Dtype in which gradients are averaged.
        gradient: Dtype of the gradients that an optimizer gets.
    """

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    gradient: torch.dtype

    @classmethod
    def resolve(cls, stored: torch.dtype, precision: Precision) -> BucketDtypes:
        """Return the dtypes for a shard of a dtype.

        Args:
            stored: Dtype of the shard.
            precision: Settings of the unit.
        """
        reduced = precision.reduced(stored)
        gradient = reduced if precision.keep_low_precision_grads else stored
        return cls(stored, precision.computed(stored), reduced, gradient)


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket's parameters in buffers and over ranks.

    Attributes:
        name: Name of the bucket in messages.
        packing: Layout of the parameters in the shard and in the buffers of collectives.
        group: Ranks that shard the parameters, and their replicas.
        keeps_full: Whether every rank keeps all elements.
    """

    name: Name
    packing: Packing
    group: ShardGroup
    keeps_full: bool


class StoredShard:
    """1-D shard of a bucket, which the optimizer updates.

    Args:
        data: Shard; moved to the CPU if `offload` is enabled, unless it is on the meta device.
        precision: Dtypes of computation and reduction.
        offload: Settings for offloading the shard.

    Attributes:
        data: Shard.
        dtypes: Dtypes of the bucket, which depend on that of the shard.
    """

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
        """Replace the shard by a tensor, also of another dtype or on another device.

        Args:
            data: New shard; it is aliased unless it has to move to the CPU.
        """
        self.data = self.pinned(data.cpu()) if self.offload.enabled else data
        self.dtypes = BucketDtypes.resolve(data.dtype, self.precision)

    def pinned(self, data: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor in pinned memory, if shards are offloaded to pinned memory.

        Args:
            data: CPU tensor; copied only if its memory has to be pinned and is not.
        """
        return pinned(data, self.offload.enabled and self.offload.pin and not data.is_meta)
