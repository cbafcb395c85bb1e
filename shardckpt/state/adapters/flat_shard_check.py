"""Recognize flat parameters' shards that are given without their wrapper.

Only a flat parameter's wrapper (`FullyShardedDataParallel`, torch's or ours) knows the names and shapes inside. Below
the wrapper (`model.module`), in an optimizer, and in an inner module's state dict, the shard looks like any other 1-D
tensor.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.fqn_and_params import clean, is_held
from shardckpt.errors import UsageError

if TYPE_CHECKING:
    from shardckpt.core.params.param_bucket import Bucket

# Storages without a flat parameter's shard, so that the next save does not search again. An address is not enough: the
# allocator gives a freed tensor's address to the next one.
_FULL: WeakSet[torch.UntypedStorage] = WeakSet()


class FlatShardError(UsageError):
    """A flat parameter's shard is given without its wrapper."""

    def __init__(self, where: object) -> None:
        super().__init__(
            "this is one rank's shard of a flat parameter of FullyShardedDataParallel, not the parameter itself",
            where=where,
            fix="Pass the module that FullyShardedDataParallel returned, and not its `.module` or the tensors in it"
            " (Lightning: `trainer.strategy.model`); or what `get_model_state_dict` returns for it.",
        )


class FlatShards:
    """Flat parameters' shards in this process, searched once, on the first query."""

    @cached_property
    def _storages(self) -> frozenset[int]:
        """Data pointers of all storages with flat parameter shards in this process."""
        from shardckpt.core.params.param_bucket import Bucket  # noqa: PLC0415  (only 1-D tensors need the engine)

        # torch does not list its wrappers, so the search goes through all objects in the process.
        flat_param: Any = sys.modules.get("torch.distributed.fsdp._flat_param")
        handle = getattr(flat_param, "FlatParamHandle", Bucket)
        storages = set()
        for item in _find_instances(Bucket, handle):
            storages |= _shard_of_bucket(item) if type(item) is Bucket else _shard_of_handle(item)
        return frozenset(storages - {0})

    def has_parameter(self, parameter: torch.Tensor) -> bool:
        """Return True if a registered parameter is a flat parameter or its shard."""
        if isinstance(parameter, DTensor):
            return False
        if isinstance(parameter, nn.Parameter) and _is_flat_parameter(parameter):
            return True
        flattened = getattr(parameter, "_fsdp_flattened", False) or (
            isinstance(parameter, nn.Parameter) and is_held(parameter)
        )
        if not flattened or parameter.dim() != 1:
            return False
        return not parameter.numel() or _get_storage(parameter) in self._storages

    def has_tensor(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor, also a detached one, is in a flat parameter's shard."""
        if isinstance(tensor, DTensor) or tensor.dim() != 1 or not tensor.is_floating_point():
            return False
        if self.has_parameter(tensor):
            return True
        if not tensor.numel() or not has_group():
            return False
        storage = tensor.untyped_storage()
        if storage in _FULL:
            return False
        if storage.data_ptr() in self._storages:
            return True
        _FULL.add(storage)
        return False

    def require_none(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse registered parameters that are flat parameters' shards."""
        for name, parameter in named:
            if self.has_parameter(parameter):
                raise FlatShardError(clean(name))


def _is_flat_parameter(parameter: nn.Parameter) -> bool:
    from shardckpt.core.registration.base import FlatParameter  # noqa: PLC0415  (tensors alone need no engine)

    return isinstance(parameter, FlatParameter)


def _find_instances(*kinds: type) -> list[Any]:
    """Return all objects in this process with one of these types; each object refers to its type."""
    # A list of all objects would also refer to tuples that other threads build: `tuple(generator)` then raises
    # SystemError.
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


def has_group() -> bool:
    """Return True if this process is in a group, which every wrapper needs, even alone."""
    return dist.is_available() and dist.is_initialized()


def has_peers() -> bool:
    """Return True if there is more than one rank."""
    return has_group() and dist.get_world_size() > 1


def _get_storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor subclass without its own storage
        return 0


def _shard_of_bucket(bucket: Bucket) -> set[int]:
    from shardckpt.layout import FlatLayout  # noqa: PLC0415  (only 1-D tensors need the engine)

    is_flat = not bucket.keeps_full and isinstance(bucket.packing.layout, FlatLayout)
    return {_get_storage(bucket.shard)} if is_flat else set()


def _shard_of_handle(handle: Any) -> set[int]:
    """Return the storage for a shard in torch's wrapper; private names may be missing."""
    flat = getattr(handle, "flat_param", None)
    shard = getattr(flat, "_local_shard", flat)  # before the first forward, the flat parameter itself
    is_sharded = getattr(handle, "uses_sharded_strategy", True)
    return {_get_storage(shard)} if is_sharded and isinstance(shard, torch.Tensor) else set()
