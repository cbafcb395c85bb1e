"""Shards of tensors that follow a model's parameters, such as moving averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.boxes import full_box
from shardckpt.core.modules.dtensors import detach, local
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.errors import UnsupportedError
from shardckpt.state.adapters.name_collision import clean_keys
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards, find_wrapper, get_tensor_shards

if TYPE_CHECKING:
    from shardckpt.state.adapters.base import Entry
    from shardckpt.state.local.local_shards import LocalModel


def map_ema_shards(
    model: nn.Module, local_model: LocalModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, TensorShards]:
    """Return this rank's shards by FQN, for tensors that follow a model's parameters."""
    # A tensor may be a DTensor, be like the parameter's local shard, or be unsharded.
    given = clean_keys(tensors)
    arrays: dict[str, TensorShards] = {}
    live = {id(parameter): clean(name) for name, parameter in model.named_parameters()}
    for adapter in local_model.index.adapters if local_model.index is not None else ():
        exposed = adapter.exposed
        for parameter, entries in zip(exposed, _shares(adapter.entries, len(exposed)), strict=True):
            tensor = given.pop(live.get(id(parameter), ""), None)
            for entry in entries if tensor is not None else ():
                assert tensor is not None
                arrays[entry.name] = _array(tensor, parameter, entry, local_model.arrays[entry.name])
    return {**arrays, **{name: get_tensor_shards(tensor) for name, tensor in given.items()}}


def _shares(entries: tuple[Entry, ...], count: int) -> list[tuple[Entry, ...]]:
    """Return the entries in each exposed parameter: all entries, or one."""
    return [entries] if count == 1 else [(entry,) for entry in entries]


def _array(tensor: torch.Tensor, parameter: nn.Parameter, entry: Entry, own: TensorShards) -> TensorShards:
    if isinstance(tensor, DTensor):
        return get_tensor_shards(tensor, parameter)
    if find_wrapper(own) is not None:
        return _array_of_wrapper(tensor, entry, own)
    here = local(parameter.detach()) if isinstance(parameter, DTensor) else parameter.detach()
    data = tensor.detach()
    if data.shape == here.shape and data.is_contiguous() and here.is_contiguous():
        shards = tuple(LocalShard(box, _beside(part, here, data)) for box, part in own.shards)
        return TensorShards(own.shape, data.dtype, shards)
    if tuple(data.shape) == entry.shape:
        return TensorShards(entry.shape, data.dtype, (LocalShard(full_box(entry.shape), data),))
    raise UnsupportedError(
        "a tensor must have its parameter's shape, on this rank or unsharded",
        where=entry.name,
        found=list(data.shape),
        expected=f"{list(here.shape)} or {list(entry.shape)}",
    )


def _array_of_wrapper(tensor: torch.Tensor, entry: Entry, own: TensorShards) -> TensorShards:
    """Return the shards of a tensor that follows a wrapper subclass, which has no memory to be a view of."""
    shape = tuple(tensor.shape)
    for box in (own.shards[0].box, full_box(entry.shape)):
        if shape == box.size:
            return TensorShards(entry.shape, tensor.dtype, (LocalShard(box, detach(tensor)),))
    raise UnsupportedError(
        "a tensor must have its parameter's shape, on this rank or unsharded",
        where=entry.name,
        found=list(shape),
        expected=list(entry.shape),
    )


def _beside(part: torch.Tensor, here: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return the view into `data` that corresponds to the view `part` into `here`."""
    start = (part.data_ptr() - here.data_ptr()) // here.element_size()
    if not part.numel() or not 0 <= start < here.numel():
        assert part.numel() == here.numel(), "a rank has a part of a parameter, or a copy of all"
        return data.view(part.shape)
    return data.as_strided(part.shape, part.stride(), data.storage_offset() + start)
