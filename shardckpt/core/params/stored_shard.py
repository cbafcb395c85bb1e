"""The shard of a bucket: its layout over ranks, what this rank stores, the types that follow from its type."""

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
    """Types of one bucket.

    Attributes:
        stored: Type of the shard.
        compute: Type of the full parameters.
        reduce: Type that gradients are averaged in.
        gradient: Type of the gradients that an optimizer sees.
    """

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    gradient: torch.dtype

    @classmethod
    def resolve(cls, stored: torch.dtype, precision: Precision) -> BucketDtypes:
        """Return the types for a shard of a type.

        Args:
            stored: Type of the shard.
            precision: Settings of the unit.
        """
        reduced = precision.reduced(stored)
        gradient = reduced if precision.keep_low_precision_grads else stored
        return cls(stored, precision.computed(stored), reduced, gradient)


@dataclass(frozen=True)
class BucketLayout:
    """How the parameters of one bucket are placed in buffers, and on which ranks.

    Attributes:
        name: What messages call the bucket.
        packing: Layout of the parameters in the shard and in the buffers of collectives.
        group: The ranks that share them.
        keeps_full: Every rank keeps everything.
    """

    name: Name
    packing: Packing
    group: ShardGroup
    keeps_full: bool


class StoredShard:
    """The shard of a bucket, 1-D, which the optimizer trains.

    Args:
        data: The shard; moved to the CPU where `offload` says so, unless it is on meta.
        precision: Dtypes to compute and to reduce in.
        offload: Where the shard is stored.

    Attributes:
        data: The shard.
        dtypes: Its type, and those that follow from it.
    """

    def __init__(self, data: torch.Tensor, precision: Precision, offload: Offload) -> None:
        self.precision = precision
        self.offload = offload
        self.data = self.pinned(data.cpu()) if offload.enabled and not data.is_meta else data
        self.dtypes = BucketDtypes.resolve(data.dtype, precision)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredShard:
        """Return a copy of the values, in memory of its own."""
        copied = memo[id(self)] = copy.copy(self)
        copied.data = self.pinned(self.data.detach().clone())
        return copied

    def replace(self, data: torch.Tensor) -> None:
        """Take another tensor, which may be of another type or on another device.

        Args:
            data: The new shard; it is aliased unless it has to move to the CPU.
        """
        self.data = self.pinned(data.cpu()) if self.offload.enabled else data
        self.dtypes = BucketDtypes.resolve(data.dtype, self.precision)

    def pinned(self, data: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the CPU as it is stored: in pinned memory where shards are offloaded to that.

        Args:
            data: The tensor; copied only if its memory is to be pinned and is not.
        """
        return pinned(data, self.offload.enabled and self.offload.pin and not data.is_meta)
