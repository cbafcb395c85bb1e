"""Dtypes of computation, as far as they can be chosen: for now parameters, gradients and buffers keep their own."""

from __future__ import annotations

from shardckpt.core.config import CPUOffload, MixedPrecision
from shardckpt.errors import ShardckptError


class NotYetError(ShardckptError, NotImplementedError):
    """A setting of torch's engine that this version does not have yet."""


def check(mixed_precision: MixedPrecision | None, cpu_offload: CPUOffload | None) -> None:
    """Refuse what is not there yet, rather than train in another way than was asked for.

    Raises:
        NotYetError: A dtype is to change, or shards are to live on the CPU.
    """
    wanted = mixed_precision and (
        mixed_precision.param_dtype or mixed_precision.reduce_dtype or mixed_precision.buffer_dtype
    )
    if wanted:
        raise NotYetError(
            "mixed precision is not there yet", found=mixed_precision, fix="Use torch.autocast, or no mixed_precision."
        )
    if cpu_offload is not None and cpu_offload.offload_params:
        raise NotYetError("offloading to the CPU is not there yet", found=cpu_offload, fix="Leave out cpu_offload.")
