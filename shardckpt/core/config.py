"""Settings of one unit, for both front ends, and the enums of `torch.distributed.fsdp` that are not in its `api`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch

from shardckpt.core.api import *  # noqa: F403  (they were defined here: imports and pickled objects name this module)
from shardckpt.core.api import BackwardPrefetch


class TrainingState(Enum):
    """What an instance is in the middle of, as assertions on it name it."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class OptimStateKeyType(Enum):
    """How an optimizer state dict names parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True)
class Precision:
    """Dtypes of one unit's computation, for both front ends; None keeps the original. Only floating types are changed.

    Attributes:
        param_dtype: Type of the full parameters while the unit computes.
        reduce_dtype: Type that gradients are averaged in; `param_dtype` where None.
        output_dtype: Type of the unit's results.
        buffer_dtype: Type of the unit's buffers.
        cast_inputs: Cast the unit's arguments to `param_dtype`.
        cast_root_inputs: Cast them where the unit is the root.
        keep_low_precision_grads: Leave the sharded gradient in the type it was averaged in.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = False
    cast_root_inputs: bool = False
    keep_low_precision_grads: bool = False

    def computed(self, stored: torch.dtype) -> torch.dtype:
        """Return the type that parameters of a stored type compute in."""
        return self.param_dtype if self.param_dtype is not None and stored.is_floating_point else stored

    def reduced(self, stored: torch.dtype) -> torch.dtype:
        """Return the type that gradients of parameters of a stored type are averaged in."""
        wanted = self.reduce_dtype if stored.is_floating_point else None
        return wanted if wanted is not None else self.computed(stored)


@dataclass(frozen=True)
class Offload:
    """Where a unit's shards live between iterations.

    Attributes:
        enabled: On the CPU, gradients as well.
        pin: In memory that an accelerator can read by itself.
    """

    enabled: bool = False
    pin: bool = True


@dataclass(frozen=True)
class UnitConfig:
    """Settings of one unit, of either front end.

    Attributes:
        reshard_after_forward: Free full parameters between forward and backward.
        keeps_root_unsharded: But not those of the root.
        post_forward_ranks: Number of ranks to reshard to after forward; 0 for none.
        keeps_unsharded_without_grad: Parameters that stay after forward stay also after a forward without gradients.
        reshard_after_backward: Free full parameters after backward.
        keeps_unsharded_without_sync: Parameters that stay after forward stay after a backward without gradient sync.
        unshard_in_backward: Backward needs the full parameters.
        keeps_full: Nothing is sharded: full parameters are the shard.
        backward_prefetch: When the next unit is prefetched in backward.
        forward_prefetch: Prefetch the next unit while this one computes forward.
        limit_all_gathers: At most two unsharded units wait for their computation.
        precision: Dtypes.
        offload: Whether shards are on the CPU.
        gradient_divide_factor: Divisor of summed gradients; the number of ranks where None.
        force_sum_reduction: Divide before and after a plain sum, whatever the backend could do.
        sync_gradients: Backward reduces gradients.
        all_reduce: A reduction includes the all-reduce over replicas.
        reduce_scatter_unused_params: A parameter that no rank used gets a gradient of zeros.
        reduce_scatter_max_input_buffers: Number of reductions of units that may run at once.
    """

    reshard_after_forward: bool = True
    keeps_root_unsharded: bool = True
    post_forward_ranks: int = 0
    keeps_unsharded_without_grad: bool = False
    reshard_after_backward: bool = True
    keeps_unsharded_without_sync: bool = True
    unshard_in_backward: bool = True
    keeps_full: bool = False
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    precision: Precision = Precision()
    offload: Offload = Offload()
    gradient_divide_factor: float | None = None
    force_sum_reduction: bool = False
    sync_gradients: bool = True
    all_reduce: bool = True
    reduce_scatter_unused_params: bool = False
    reduce_scatter_max_input_buffers: int = 1

    def stays_after_backward(self, *, is_unsynced: bool) -> bool:
        """Return True if full parameters stay after a backward, which may have left gradients unreduced."""
        return not self.reshard_after_backward or (
            is_unsynced and self.keeps_unsharded_without_sync and not self.reshard_after_forward
        )
