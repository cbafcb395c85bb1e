"""A model's shards on this rank: boxes in full tensors as views, without copies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.boxes import full_box, shift
from shardckpt.core.modules.dtensors import local, view_in_order
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.layout import DimLayout, FlatLayout, ParamSpec
from shardckpt.state.adapters import torch_fsdp1
from shardckpt.state.adapters.base import ShardingAdapter
from shardckpt.state.adapters.engine_bucket import EngineBucketAdapter
from shardckpt.state.adapters.model_index import Buffer, ModelIndex, index_complete_model, reshard_all
from shardckpt.state.local.quant_states import QuantState, find_quant_states
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards, get_box, get_tensor_shards


@dataclass(frozen=True)
class LocalModel:
    """A model's shards on this rank."""

    index: ModelIndex | None  # None under torch's own wrapper, which returns full states only
    arrays: dict[str, TensorShards]  # parameters and persistent buffers by FQN in the unsharded model
    aliases: dict[str, str]  # a shared parameter's other names, each with the first name
    buffers: frozenset[str]  # names in `arrays`; ranks may have different values
    extra: dict[str, nn.Module]  # modules with `get_extra_state`, by the state's name
    names: tuple[str, ...]  # all names in a state dict, in its order
    finish: Callable[[], None] = field(default=lambda: None)  # call it after writes into the arrays
    frozen: frozenset[str] = frozenset()  # parameters in `arrays` that do not require gradients
    # Names in `arrays` for which ranks have different parts; one rank may have a small tensor alone.
    sharded: frozenset[str] = frozenset()
    quant_states: tuple[QuantState, ...] = ()  # of packed weights; their names are in `arrays`


def get_adapter_shards(adapter: ShardingAdapter, packed: torch.Tensor) -> list[tuple[LocalShard, ...]]:
    """Return this rank's shards for each entry in an adapter, as views."""
    if not isinstance(adapter, EngineBucketAdapter):
        (part,) = adapter.parts(packed)
        return [get_tensor_shards(part).shards]
    return [get_member_shards(adapter, index, part) for index, part in enumerate(adapter.bucket.split_shard(packed))]


def get_member_shards(adapter: EngineBucketAdapter, index: int, part: torch.Tensor) -> tuple[LocalShard, ...]:
    """Return this rank's shards for one parameter in a bucket."""
    leaf = adapter.bucket.unsharded.params[index]
    shards = _iter_bucket_shards(adapter, index, part)
    if not isinstance(leaf, DTensor):
        return tuple(shards)
    box = get_box(leaf)  # tensor parallelism splits first: the bucket shards its local tensor
    assert box is not None, "a rank that has a parameter is in its mesh"
    back = tuple(-at for at in box.offset)
    return tuple(LocalShard(shift(shard.box, back), shard.tensor) for shard in shards)


def _iter_bucket_shards(adapter: EngineBucketAdapter, index: int, part: torch.Tensor) -> Iterator[LocalShard]:
    bucket = adapter.bucket
    layout = bucket.layout
    if bucket.keeps_full:
        yield LocalShard(full_box(tuple(part.shape)), part)
    elif isinstance(layout, DimLayout):
        box = layout.box(index, bucket.group.rank)
        if box.volume:
            yield LocalShard(box, part if part.shape == box.size else part.view(box.size))
    else:
        assert isinstance(layout, FlatLayout)
        start, stop = _get_run(layout, index, bucket.group.rank)
        yield from _boxes(layout.specs[index], part, start, stop)


def _get_run(layout: FlatLayout, index: int, rank: int) -> tuple[int, int]:
    """Return start and stop for a rank's elements in a parameter, in memory order."""
    first, numel = layout.offsets[index], layout.specs[index].numel
    low = rank * layout.chunk
    start = max(first, low)
    return start - first, max(start, min(first + numel, low + layout.chunk)) - first


def _boxes(spec: ParamSpec, part: torch.Tensor, start: int, stop: int) -> Iterator[LocalShard]:
    if start >= stop:
        return
    at = 0
    for box in spec.boxes(start, stop):
        yield LocalShard(box, view_in_order(part[at : at + box.volume], box.size, spec.order))
        at += box.volume


def local_model(model: nn.Module) -> LocalModel:
    """Return a model's shards on this rank; reshards all units. Collective under torch's own wrapper only."""
    if torch_fsdp1.is_foreign(model):
        return _foreign_model(model)
    reshard_all(model)
    quant_states = tuple(find_quant_states(model)) if _has_packed_weights(model) else ()
    index = index_complete_model(model)
    arrays: dict[str, TensorShards] = {}
    packed = [adapter.packed for adapter in index.adapters]
    for adapter, values in zip(index.adapters, packed, strict=True):
        for entry, shards in zip(adapter.entries, get_adapter_shards(adapter, values), strict=True):
            arrays[entry.name] = TensorShards(entry.shape, values.dtype, shards)
    buffers = {buffer.name: buffer for buffer in index.buffers if buffer.persistent}
    shown = {name: buffer.saved_value for name, buffer in buffers.items()}
    arrays.update({name: get_tensor_shards(value) for name, value in shown.items()})

    def finish() -> None:
        for adapter in index.adapters:
            adapter.mark_written()
        for name, buffer in buffers.items():
            _take(buffer, shown[name])

    frozen = {name for adapter in index.adapters for name in _frozen(adapter)}
    scales: set[str] = set()
    names = list(index.names)
    for each in quant_states:
        arrays.update({name: get_tensor_shards(value) for name, value in each.arrays.items()})
        if each.text_name:
            arrays[each.text_name] = get_tensor_shards(each.encode_text())
        scales.update(each.names)
        frozen.update(each.names if each.weight in frozen else ())
        names[names.index(each.weight) + 1 : names.index(each.weight) + 1] = each.names
    return LocalModel(
        index,
        {name: arrays[name] for name in names if name in arrays},
        dict(index.aliases),
        frozenset(buffers) | scales,
        dict(index.extra),
        tuple(names),
        finish,
        frozenset(frozen),
        frozenset(_iter_sharded(index)) if index.ranks.size > 1 else frozenset(),
        quant_states,
    )


def _has_packed_weights(model: nn.Module) -> bool:
    """Return True if a model may have weights of bitsandbytes, in its modules or as a module's own parameter."""
    if "bitsandbytes" not in sys.modules:
        return False
    kinds = {type(each) for module in model.modules() for each in (module, *module._parameters.values())}
    return any(base.__module__.startswith("bitsandbytes.") for kind in kinds for base in kind.__mro__)


def _iter_sharded(index: ModelIndex) -> Iterator[str]:
    """Yield names for which ranks have different parts."""
    for adapter in index.adapters:
        if adapter.is_sharded or (isinstance(adapter, EngineBucketAdapter) and adapter.is_parallel):
            yield from (entry.name for entry in adapter.entries)
    for buffer in index.buffers:
        value = buffer.value
        if isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements):
            yield buffer.name


def _frozen(adapter: ShardingAdapter) -> Iterator[str]:
    """Yield the adapter's entries whose exposed parameter needs no gradients."""
    exposed = adapter.exposed
    for number, entry in enumerate(adapter.entries):
        shown = exposed[number] if len(exposed) == len(adapter.entries) else exposed[0] if len(exposed) == 1 else None
        if not (entry.trains if shown is None else shown.requires_grad):
            yield entry.name


def _take(buffer: Buffer, value: torch.Tensor) -> None:
    """Copy a loaded value to its buffer if the saved and the compute dtype differ."""
    if buffer.value.dtype != value.dtype:
        local(buffer.value).copy_(local(value))


def _foreign_model(model: nn.Module) -> LocalModel:
    state = torch_fsdp1.full_state(model, offload=False, first_only=False)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    buffers = frozenset(clean(name) for name, _ in model.named_buffers())

    def finish() -> None:
        torch_fsdp1.put_state(model, state, strict=True)

    arrays = {name: get_tensor_shards(value) for name, value in tensors.items()}
    frozen = frozenset(clean(name) for name, value in model.named_parameters() if not value.requires_grad)
    return LocalModel(None, arrays, {}, buffers, {}, tuple(state), finish, frozen & set(arrays))
