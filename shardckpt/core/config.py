"""Settings of one unit, for both front ends, and further enums of torch's FSDP."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch

from shardckpt.core.api import *  # noqa: F403  (they were defined here: imports and pickled objects name this module)
from shardckpt.core.api import BackwardPrefetch


class TrainingState(Enum):
    """Training state of a wrapper, as in torch's assertions."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class OptimStateKeyType(Enum):
    """Kind of keys in an optimizer state dict: parameter names or ids."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True)
class Precision:
    """Dtypes of one unit, for both front ends; None keeps the original dtype.

    Only tensors of floating dtypes are cast.

    Attributes:
        param_dtype: Dtype of the full parameters while the unit computes.
        reduce_dtype: Dtype in which gradients are averaged; None for `param_dtype`.
        output_dtype: Dtype of the unit's outputs.
        buffer_dtype: Dtype of the unit's buffers.
        cast_inputs: Whether to cast the unit's inputs to `param_dtype`.
        cast_root_inputs: Whether to cast the inputs if the unit is the root.
        keep_low_precision_grads: Whether sharded gradients keep the dtype in which they were averaged.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = False
    cast_root_inputs: bool = False
    keep_low_precision_grads: bool = False

    def computed(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype of computation for parameters of a stored dtype."""
        return self.param_dtype if self.param_dtype is not None and stored.is_floating_point else stored

    def reduced(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a stored dtype are averaged."""
        wanted = self.reduce_dtype if stored.is_floating_point else None
        return wanted if wanted is not None else self.computed(stored)


@dataclass(frozen=True)
class Offload:
    """Settings for offloading a unit's shards.

    Attributes:
        enabled: Whether shards and their gradients are stored on the CPU.
        pin: Whether they are stored in pinned memory.
    """

    enabled: bool = False
    pin: bool = True


@dataclass(frozen=True)
class UnitConfig:
    """Settings of one unit, of either front end.

    Attributes:
        reshard_after_forward: Whether to free full parameters between forward and backward.
        keeps_root_unsharded: Whether the root is an exception to `reshard_after_forward`.
        post_forward_ranks: Number of ranks to reshard to after forward; 0 for all ranks.
        keeps_unsharded_without_grad: Whether parameters that stay unsharded after forward also stay unsharded after a
            forward without gradients.
        reshard_after_backward: Whether to free full parameters after backward.
        keeps_unsharded_without_sync: Whether parameters that stay unsharded after forward also stay unsharded after a
            backward without gradient sync.
        unshard_in_backward: Whether backward needs the full parameters.
        keeps_full: Whether nothing is sharded: full parameters alias the shard.
        backward_prefetch: Time of the next unit's prefetch in backward; None for no prefetch.
        forward_prefetch: Whether to prefetch the next unit while this unit computes its forward.
        limit_all_gathers: Whether to limit unsharded units that wait for their computation to two.
        precision: Dtypes of the unit.
        offload: Settings for offloading.
        gradient_divide_factor: Divisor of summed gradients; None for the number of ranks.
        force_sum_reduction: Whether to divide before and after a plain sum, even if the backend can average.
        sync_gradients: Whether backward reduces gradients.
        all_reduce: Whether a reduction includes the all-reduce over replicas.
        reduce_scatter_unused_params: Whether a parameter that no rank used gets a gradient of zeros.
        reduce_scatter_max_input_buffers: Maximum number of concurrent reductions of units.
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
