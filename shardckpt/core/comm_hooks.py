"""Communication hooks for `FullyShardedDataParallel.register_comm_hook`: plain averaging, and in half precision.

A hook gets its state and one contiguous 1-D gradient a bucket, with padding: the sum over this rank's backwards that
is to become the mean over ranks. Where the bucket is sharded it gets, as a third argument, the 1-D tensor that this
rank's part of the mean goes to; with NO_SHARD it changes the gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from shardckpt.core.api import ShardingStrategy
from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.core.errors import ArgumentError
from shardckpt.core.runtime.fsdp_unit import FSDPUnit, Phase
from shardckpt.errors import ShardckptError

_LOW_PRECISION = frozenset({"fp16_compress_hook", "bf16_compress_hook"})


def is_low_precision(hook: Callable[..., Any] | None) -> bool:
    """Return True if a hook, ours or torch's by its name, reduces in fp16 or bf16."""
    return getattr(hook, "__name__", "") in _LOW_PRECISION


class HookError(ShardckptError, AssertionError):
    """A communication hook at a time, or for a unit, where there can be none."""


def check(
    hook: object, root: bool, units: Sequence[tuple[FSDPUnit, ShardingStrategy, Callable[..., Any] | None]]
) -> None:
    """Refuse a hook that cannot be registered.

    Args:
        hook: The hook.
        root: Whether it is the root that is to have it.
        units: Every unit below, with its strategy and the hook that it has.

    Raises:
        HookError: It is not the root, or a unit cannot have it.
        ArgumentError: It cannot be called.
    """
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
    """What `allreduce_hook` and `reduce_scatter_hook` need: the ranks, and how their mean is taken in two steps.

    Args:
        process_group: The ranks that reduce.

    Attributes:
        process_group: The ranks.
        world_size: Their number.
        gradient_predivide_factor: What gradients are divided by before they are added up, against overflow.
        gradient_postdivide_factor: What the sum is divided by, against underflow.

    Raises:
        ArgumentError: No group was given.
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
        self.gradient_predivide_factor = self._get_gradient_predivide_factor(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor

    @staticmethod
    def _get_gradient_predivide_factor(world_size: int) -> float:
        """Return the power of two next to the root of the number of ranks, as long as the powers below divide it."""
        powers = 0
        while world_size % 2**powers == 0 and world_size > 4**powers:
            powers += 1
        return float(2**powers)


class LowPrecisionState(DefaultState):
    """What the compressing hooks need besides.

    Args:
        process_group: The ranks that reduce.
        parameter_type: Type of the parameters, which gradients are given back in.
    """

    __slots__: ClassVar[list[str]] = ["parameter_type"]

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Replace a gradient by the mean over ranks. Collective.

    Args:
        state: The ranks and the divisors.
        grad: 1-D, changed in place.
    """
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    ShardGroup(None, state.process_group).all_reduce(grad, "reduce a gradient by a hook").wait()
    if state.gradient_postdivide_factor > 1:
        grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Fill `output` with this rank's part of the mean over ranks. Collective.

    Args:
        state: The ranks and the divisors.
        grad: 1-D, the ranks' parts in rank order; its content is lost.
        output: 1-D, of this rank's size.
    """
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    ShardGroup(state.process_group).reduce_scatter(output, grad, "reduce a gradient by a hook").wait()
    if state.gradient_postdivide_factor > 1:
        output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Take the mean in float16, which halves what travels. Collective.

    Args:
        state: The ranks, the divisors and the parameters' type.
        grad: 1-D; the mean itself if `output` is None.
        output: 1-D, this rank's part of the mean.
    """
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Take the mean in bfloat16, which halves what travels. Collective.

    Args:
        state: The ranks, the divisors and the parameters' type.
        grad: 1-D; the mean itself if `output` is None.
        output: 1-D, this rank's part of the mean.
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
