"""Recognize a rank's shard of a flat parameter: without the wrapper, nothing shows which elements it has.

A flat parameter of `FullyShardedDataParallel` (torch's, or ours) has names and shapes only together with its wrapper.
What is registered below the wrapper (`model.module`), what an optimizer holds, and what a state dict of an inner module
has, is a 1-D part of it that looks like any other tensor.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.fqn_and_params import clean, is_held
from shardckpt.core.params.param_bucket import Bucket
from shardckpt.core.registration.base import FlatParameter
from shardckpt.errors import UsageError
from shardckpt.layout import FlatLayout

_REMEMBERED = 100_000
"""Tensors that are known to be full, so that the next save does not look for their flat parameter again."""


class FlatShardError(UsageError):
    """A rank's shard of a flat parameter is given without its wrapper."""

    def __init__(self, where: object) -> None:
        super().__init__(
            "this is one rank's shard of a flat parameter of FullyShardedDataParallel, not the parameter itself",
            where=where,
            fix="Pass the module that FullyShardedDataParallel returned, and not its `.module` or tensors of that"
            " (Lightning: `trainer.strategy.model`); or what `get_model_state_dict` returns for it.",
        )


class FlatShards:
    """The shards of flat parameters in this process. They are looked for once, when a tensor may be one."""

    @cached_property
    def _storages(self) -> frozenset[int]:
        """Find the memory of the sharded flat parameters of this process.

        Torch keeps no list of its wrappers, so that the objects of the process are gone through.
        """
        flat_param: Any = sys.modules.get("torch.distributed.fsdp._flat_param")
        handle = getattr(flat_param, "FlatParamHandle", Bucket)
        storages = set()
        for item in gc.get_objects():
            kind = type(item)
            if kind is Bucket:
                storages |= _shard_of_bucket(item)
            elif kind is handle:
                storages |= _shard_of_handle(item)
        return frozenset(storages - {0})

    def has_parameter(self, parameter: torch.Tensor) -> bool:
        """Return True if a registered parameter is a rank's shard of a flat parameter, or the flat parameter.

        Args:
            parameter: The parameter; one that is managed by its own wrapper must not be asked about.
        """
        if isinstance(parameter, DTensor):
            return False
        if isinstance(parameter, nn.Parameter) and isinstance(parameter, FlatParameter):
            return True
        flattened = getattr(parameter, "_fsdp_flattened", False) or (
            isinstance(parameter, nn.Parameter) and is_held(parameter)
        )
        if not flattened or parameter.dim() != 1:
            return False
        return not parameter.numel() or _get_storage(parameter) in self._storages

    def has_tensor(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is in a rank's shard of a flat parameter: a parameter, or a detached one."""
        if isinstance(tensor, DTensor) or tensor.dim() != 1 or not tensor.is_floating_point():
            return False
        if self.has_parameter(tensor):
            return True
        if not tensor.numel() or not has_peers():
            return False
        storage = tensor.untyped_storage()
        known = (storage.data_ptr(), storage.nbytes())
        if known in _FULL:
            return False
        if known[0] in self._storages:
            return True
        if len(_FULL) >= _REMEMBERED:
            _FULL.clear()
        _FULL.add(known)
        return False

    def require_none(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse registered parameters that are shards of flat parameters.

        Raises:
            FlatShardError: One is.
        """
        for name, parameter in named:
            if self.has_parameter(parameter):
                raise FlatShardError(clean(name))


_FULL: set[tuple[int, int]] = set()


def has_peers() -> bool:
    """Return True if there are several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _get_storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a class of its own, without memory of its own
        return 0


def _shard_of_bucket(bucket: Bucket) -> set[int]:
    is_sharded = not bucket.keeps_full and bucket.group.size > 1 and isinstance(bucket.packing.layout, FlatLayout)
    return {_get_storage(bucket.shard)} if is_sharded else set()


def _shard_of_handle(handle: Any) -> set[int]:
    """Return the memory of the shard of torch's wrapper; its names are private, so they may be missing."""
    flat = getattr(handle, "flat_param", None)
    shard = getattr(flat, "_local_shard", flat)  # before the first forward, the flat parameter itself
    is_sharded = getattr(handle, "uses_sharded_strategy", True)
    return {_get_storage(shard)} if is_sharded and isinstance(shard, torch.Tensor) else set()
