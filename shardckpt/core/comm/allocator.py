"""Collective buffers from the process group's allocator (NCCL only)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shardckpt.core.policies import AllGather, ReduceScatter

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def allocator(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a group's backend that can allocate on a device; None without one."""
    try:
        backend = group._get_backend(device)
        return backend if backend.supports_tensor_alloc(device) else None
    except (RuntimeError, AttributeError):  # no backend for the device, or one without an allocator
        return None


class _Allocating:
    """Collective whose buffers the process group's backend allocates."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer that the backend sends without a copy."""
        backend = allocator(self._group, device)
        if backend is None:
            return torch.empty(*size, dtype=dtype, device=device)
        buffer: torch.Tensor = backend.allocate_tensor(prod(size), dtype=dtype, device=device)
        return buffer.view(*size)


class PooledAllGather(_Allocating, AllGather):
    """All-gather with buffers from the backend."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill the output with all ranks' inputs."""
        work: dist.Work | None = _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class PooledReduceScatter(_Allocating, ReduceScatter):
    """Reduce-scatter with buffers from the backend."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill the output with this rank's shard of the sum."""
        work: dist.Work | None = _REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work
