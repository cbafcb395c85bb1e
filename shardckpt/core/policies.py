"""Settings of `fully_shard` for dtypes and offloading, and the interfaces of custom collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardckpt.core.config import Offload, Precision


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation, reduction and results; None keeps the original.

    Attributes:
        param_dtype: Type of the full parameters while a module computes.
        reduce_dtype: Type that gradients are averaged in; `param_dtype` where None.
        output_dtype: Type that a module's results are cast to.
        cast_forward_inputs: Cast a module's arguments to `param_dtype`.
        buffer_dtype: Type of the buffers of what is sharded with this; state dicts hold the one they had (torch has no
            such field).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    buffer_dtype: torch.dtype | None = field(default=None, kw_only=True, repr=False)

    @property
    def precision(self) -> Precision:
        """The same in the words of the engine."""
        return Precision(
            self.param_dtype,
            self.reduce_dtype,
            self.output_dtype,
            self.buffer_dtype,
            cast_inputs=self.cast_forward_inputs,
        )


@dataclass
class OffloadPolicy:
    """Shards stay on the device; what offloads derives from this."""

    @property
    def offload(self) -> Offload:
        """The same in the words of the engine."""
        return Offload()


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state live on the CPU.

    Attributes:
        pin_memory: Keep shards in memory that an accelerator can read by itself.
    """

    pin_memory: bool = True

    @property
    def offload(self) -> Offload:
        """The same in the words of the engine."""
        return Offload(True, self.pin_memory)


class Comm(ABC):
    """A collective of a user's own, with the buffers it works on."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor for the collective to work on.

        Args:
            size: Its shape.
            dtype: Its type.
            device: Its device.
        """


class AllGather(Comm):
    """An all-gather of a user's own, for `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill the output with everyone's input, in the order of ranks.

        Args:
            output_tensor: 1-D, as many times as long as there are ranks.
            input_tensor: This rank's part; it may be a view of the output.
            group: The ranks.
            async_op: Whether work that can be waited for may be returned.
        """


class ReduceScatter(Comm):
    """A reduce-scatter of a user's own, for `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill the output with this rank's part of the reduced inputs.

        Args:
            output_tensor: 1-D, this rank's part.
            input_tensor: As many times as long as there are ranks.
            group: The ranks.
            op: How to reduce.
            async_op: Whether work that can be waited for may be returned.
        """
