"""Communication hooks for `register_comm_hook`, which average gradients.

A hook gets its state and one contiguous 1-D gradient per bucket, with padding: the sum over this rank's backwards. It
computes the mean over ranks. For a sharded bucket its third argument is a 1-D tensor for this rank's shard of the mean;
with NO_SHARD it changes the gradient in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from shardckpt.core.api import ShardingStrategy
from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.errors import ArgumentError, HookError
from shardckpt.core.runtime.fsdp_unit import FSDPUnit, Phase

_LOW_PRECISION = frozenset({"fp16_compress_hook", "bf16_compress_hook"})


def is_low_precision(hook: Callable[..., Any] | None) -> bool:
    """Return True if a hook from this package or torch reduces in fp16 or bf16."""
    return getattr(hook, "__name__", "") in _LOW_PRECISION


def check(
    hook: object, root: bool, units: Sequence[tuple[FSDPUnit, ShardingStrategy, Callable[..., Any] | None]]
) -> None:
    """Refuse a hook that cannot be registered."""
    if not root:
        raise HookError("register_comm_hook can only be called on a root instance.")
    for unit, strategy, before in units:
        if strategy.is_hybrid:
            raise HookError(
                f"Communication hook is not supported for hybrid strategies: {strategy}",
                fix=f"Shard {unit.name} without replicas.",
            )
        if before is not None:
            raise HookError("A communication hook is already registered")
        if unit.phase is not Phase.IDLE or unit.pending_forward_ids:
            raise HookError(
                "A communication hook is registered before the first forward, or after a backward",
                found=f"{unit.name} waits for its backward",
            )
    if not callable(hook):
        raise ArgumentError(f"The communication hook must be callable but got {hook}")


class DefaultState:
    """The ranks and two divisors for `allreduce_hook` and `reduce_scatter_hook`.

    Args:
        process_group: Process group that reduces.

    Raises:
        ArgumentError: `process_group` is None.
    """

    __slots__: ClassVar[list[str]] = [
        "gradient_postdivide_factor",
        "gradient_predivide_factor",
        "process_group",
        "world_size",
    ]

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ArgumentError(
                "Expected to pass in an explicit ProcessGroup", where=type(self).__name__, fix="All: dist.group.WORLD."
            )
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        # Divides gradients before the sum, to avoid overflow.
        self.gradient_predivide_factor = self._get_gradient_predivide_factor(self.world_size)
        # Divides the sum, to avoid underflow.
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor

    @staticmethod
    def _get_gradient_predivide_factor(world_size: int) -> float:
        """Return a power of two near the square root of the number of ranks."""
        powers = 0
        while world_size % 2**powers == 0 and world_size > 4**powers:
            powers += 1
        return float(2**powers)


class LowPrecisionState(DefaultState):
    """State for the compressing hooks.

    Args:
        process_group: Process group that reduces.
        parameter_type: Dtype of the parameters, and so of the averaged gradients.
    """

    __slots__: ClassVar[list[str]] = ["parameter_type"]

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Replace a gradient by the mean over ranks. Collective.

    Args:
        state: Ranks and divisors.
        grad: 1-D gradient, changed in place.
    """
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    ShardGroup(None, state.process_group).all_reduce(grad, "reduce a gradient by a hook").wait()
    if state.gradient_postdivide_factor > 1:
        grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Fill `output` with this rank's shard of the mean over ranks. Collective.

    Args:
        state: Ranks and divisors.
        grad: 1-D gradient with all ranks' shards in rank order; its content is lost.
        output: 1-D shard for this rank.
    """
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    ShardGroup(state.process_group).reduce_scatter(output, grad, "reduce a gradient by a hook").wait()
    if state.gradient_postdivide_factor > 1:
        output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average a gradient in float16, to halve the communication. Collective.

    Args:
        state: Ranks, divisors and the parameters' dtype.
        grad: 1-D gradient; changed in place if `output` is None, else its content is lost.
        output: 1-D shard for this rank's part of the mean; None with NO_SHARD.
    """
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average a gradient in bfloat16, to halve the communication. Collective.

    Args:
        state: Ranks, divisors and the parameters' dtype.
        grad: 1-D gradient; changed in place if `output` is None, else its content is lost.
        output: 1-D shard for this rank's part of the mean; None with NO_SHARD.
    """
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    small = grad.to(dtype)
    if output is None:
        allreduce_hook(state, small)
        grad.data = small.to(state.parameter_type)
    else:
        part = torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, small, part)
        output.data = part.to(state.parameter_type)
