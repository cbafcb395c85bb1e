"""`fully_shard` policies for dtypes and offloading; custom collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core.config import Offload, Precision
from shardckpt.core.errors import ArgumentError


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes for computation, reduction and outputs; None keeps the original dtype.

    Attributes:
        param_dtype: Dtype for full parameters while a module computes.
        reduce_dtype: Dtype in which gradients are averaged; None for `param_dtype`.
        output_dtype: Dtype for a module's outputs.
        cast_forward_inputs: Whether to cast a module's inputs to `param_dtype`.
        param_dtype_override_fn: Returns a full parameter's dtype: its stored dtype, or None or `param_dtype`. Called
            once for each parameter, with equal results on all ranks. Inputs are cast to `param_dtype`.
        buffer_dtype: Dtype for a module's buffers; state dicts contain the original dtype (not in torch).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    buffer_dtype: torch.dtype | None = field(default=None, kw_only=True, repr=False)

    @property
    def precision(self) -> Precision:
        """Return the equivalent engine settings."""
        return Precision(
            self.param_dtype,
            self.reduce_dtype,
            self.output_dtype,
            self.buffer_dtype,
            cast_inputs=self.cast_forward_inputs,
        )

    def resolve_param_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype | None:
        """Return a full parameter's dtype; None for its stored dtype.

        Args:
            name: Parameter name in messages.
            parameter: Parameter that is not sharded yet.

        Raises:
            ArgumentError: `param_dtype_override_fn` returns another dtype, or no dtype.
        """
        override = self.param_dtype_override_fn(parameter) if self.param_dtype_override_fn is not None else None
        if override is None:
            return self.param_dtype
        if override not in (self.param_dtype, parameter.dtype):
            raise ArgumentError(
                f"param_dtype_override_fn must return None, param_dtype or the parameter's dtype, got {override!r}",
                where=name,
                expected=[None, self.param_dtype, parameter.dtype],
            )
        return override


@dataclass
class OffloadPolicy:
    """Policy that keeps shards on the device; base class for policies that offload."""

    @property
    def offload(self) -> Offload:
        """Return the equivalent engine settings."""
        return Offload()


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Policy that stores shards, gradients and therefore optimizer state on the CPU.

    Attributes:
        pin_memory: Whether to store shards in pinned memory.
    """

    pin_memory: bool = True

    @property
    def offload(self) -> Offload:
        """Return the equivalent engine settings."""
        return Offload(True, self.pin_memory)


class Comm(ABC):
    """Custom collective that allocates its own buffers."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for the collective.

        Args:
            size: Buffer shape.
            dtype: Buffer dtype.
            device: Buffer device.
        """


class AllGather(Comm):
    """Custom all-gather, for `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill the output with all ranks' inputs, in rank order.

        Args:
            output_tensor: 1-D output with all ranks' elements.
            input_tensor: This rank's 1-D input; it may be a view into the output.
            group: Process group to gather over.
            async_op: Whether the call may return work to wait for.
        """


class ReduceScatter(Comm):
    """Custom reduce-scatter, for `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill the output with this rank's shard of the reduced inputs.

        Args:
            output_tensor: This rank's 1-D shard.
            input_tensor: 1-D input with all ranks' shards, in rank order.
            group: Process group to reduce over.
            op: Reduction operation.
            async_op: Whether the call may return work to wait for.
        """
