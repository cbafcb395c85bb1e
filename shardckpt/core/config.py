"""One unit's settings, for both front ends, and further enums from torch's FSDP."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch

from shardckpt.core.api import *  # noqa: F403  (they were defined here: imports and pickled objects name this module)
from shardckpt.core.api import BackwardPrefetch


class TrainingState(Enum):
    """A wrapper's training state, as in torch's assertions."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


class OptimStateKeyType(Enum):
    """Keys in an optimizer state dict: parameter names or ids."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass(frozen=True)
class Precision:
    """One unit's dtypes, for both front ends; None keeps the original dtype."""

    # Only tensors with floating dtypes are cast.

    param_dtype: torch.dtype | None = None  # full parameters while the unit computes
    reduce_dtype: torch.dtype | None = None  # averages gradients; None for `param_dtype`
    output_dtype: torch.dtype | None = None  # the unit's outputs
    buffer_dtype: torch.dtype | None = None  # the unit's buffers
    cast_inputs: bool = False  # inputs to `param_dtype`
    cast_root_inputs: bool = False  # if the unit is the root
    keep_low_precision_grads: bool = False  # sharded gradients keep `reduce_dtype`

    def computed(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype that parameters with a stored dtype compute in."""
        return self.param_dtype if self.param_dtype is not None and stored.is_floating_point else stored

    def reduced(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype that averages gradients with a stored dtype."""
        wanted = self.reduce_dtype if stored.is_floating_point else None
        return wanted if wanted is not None else self.computed(stored)

    def smallest(self, stored: torch.dtype) -> torch.dtype:
        """Return the smallest dtype that parameters with a stored dtype, or their gradients, have."""
        every = (stored, self.computed(stored), self.reduced(stored))
        return min(every, key=lambda dtype: dtype.itemsize)


@dataclass(frozen=True)
class Offload:
    """Settings for offloading a unit's shards."""

    enabled: bool = False  # store shards and their gradients on the CPU
    pin: bool = True  # in pinned memory


@dataclass(frozen=True)
class UnitConfig:
    """One unit's settings, for either front end."""

    reshard_after_forward: bool = True  # free full parameters between forward and backward
    keeps_root_unsharded: bool = True  # the root ignores `reshard_after_forward`
    post_forward_ranks: int = 0  # ranks to reshard to after forward; 0 for all ranks
    # Parameters that stay unsharded after forward also do so after a forward without gradients.
    keeps_unsharded_without_grad: bool = False
    reshard_after_backward: bool = True  # free full parameters after backward
    # Parameters that stay unsharded after forward also do so after a backward without gradient sync.
    keeps_unsharded_without_sync: bool = True
    unshard_in_backward: bool = True  # backward needs the full parameters
    keeps_full: bool = False  # nothing is sharded: full parameters alias the shard
    # When backward prefetches the next unit; None for no prefetch.
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False  # prefetch the next unit while this unit computes its forward
    limit_all_gathers: bool = True  # at most two unsharded units wait for their computation
    precision: Precision = Precision()
    offload: Offload = Offload()
    gradient_divide_factor: float | None = None  # divides summed gradients; None for the number of ranks
    force_sum_reduction: bool = False  # divide before and after a plain sum, even if the backend can average
    sync_gradients: bool = True  # backward reduces gradients
    all_reduce: bool = True  # a reduction includes the all-reduce over replicas
    reduce_scatter_unused_params: bool = False  # a parameter that no rank used gets a gradient with zeros
    reduce_scatter_max_input_buffers: int = 1  # maximum number of concurrent unit reductions
