"""Build a model's state dict, in any kind."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.fsdp1.state_dict_api import register_with_torch_dcp
from shardckpt.core.modules.dtensors import gather_full_tensor, local
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.core.params.full_params import Staging
from shardckpt.ranks.torch_group import current_group
from shardckpt.state.adapters import torch_fsdp1
from shardckpt.state.adapters.base import ShardingAdapter
from shardckpt.state.adapters.engine_flat import EngineFlatAdapter
from shardckpt.state.adapters.model_index import ModelIndex, index_complete_model, reshard_all, unwrap
from shardckpt.state.keys.kinds import KEY, VERSION, StateKind, outside_inference_mode, parse_kind_to_take
from shardckpt.state.model import module_hooks


def iter_full_state_dict(
    model: nn.Module, *, offload_to_cpu: bool = False, rank0_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and full tensors from a model's state dict, one unit at a time.

    Collective: every rank has to iterate to the end. A shared parameter is yielded once, under its first name.

    Args:
        model: As for `model_state_dict`.
        offload_to_cpu: Yield tensors on the CPU.
        rank0_only: Yield tensors on rank 0 only.
    """
    model = unwrap(model)
    if torch_fsdp1.is_foreign(model):
        yield from torch_fsdp1.full_state(model, offload=offload_to_cpu, first_only=rank0_only).items()
        return
    reshard_all(model)
    yield from _iter_full(index_complete_model(model), offload_to_cpu, rank0_only)


def _iter_full(index: ModelIndex, offload: bool, first_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    staging = Staging()
    for adapter in index.adapters:
        values = adapter.to_full(adapter.packed, staging, first_only=first_only)
        if values is None:
            continue
        for entry, value in zip(adapter.entries, values, strict=True):
            yield entry.name, value.cpu() if offload else value
    for name, value in _buffers(index, StateKind.FULL, offload):
        if not first_only or index.ranks.is_first:
            yield name, value


def _buffers(index: ModelIndex, kind: StateKind, offload: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for buffer in index.buffers:
        if buffer.persistent:
            value = _to_kind(buffer.saved_value, kind)
            yield buffer.name, _on_cpu(value) if offload else value


def _to_kind(value: torch.Tensor, kind: StateKind) -> torch.Tensor:
    if not isinstance(value, DTensor) or kind is StateKind.SHARDED:
        return value
    return gather_full_tensor(value) if kind is StateKind.FULL else local(value)


@outside_inference_mode
def model_state_dict(
    model: nn.Module,
    kind: StateKind | str = StateKind.FULL,
    *,
    offload_to_cpu: bool = False,
    rank0_only: bool = False,
) -> dict[str, Any]:
    """Return a model's state dict, with FQNs in the unsharded model as keys. Collective.

    Args:
        model: Model that is sharded by either front end or torch's `fully_shard`, has DTensors, is replicated, compiled
            or plain; FULL and SHARDED also work under torch's FullyShardedDataParallel.
        kind: FULL: full tensors. SHARDED: a DTensor for each sharded tensor. LOCAL: this rank's shards as stored,
            with the layouts in `_metadata["shardckpt"]`; it can be read without a model or process group.
        offload_to_cpu: Return tensors on the CPU.
        rank0_only: With FULL, return the state on rank 0 only; other ranks get an empty dict.

    Returns:
        Tensors by FQN, in the unsharded model's order. All names of a shared parameter have the same tensor.
        Tensors that are neither gathered nor exchanged alias the model's memory, as in `model.state_dict()`.

    Raises:
        UsageError: The kind is unknown, or `rank0_only` with another kind than FULL; or a parameter is a flat
            parameter's shard, whose wrapper is around the model.
        NameCollisionError: Two tensors have one name without wrapper segments.
        UnsupportedError: FULL, and a parameter that `fully_shard` sharded has a tensor subclass, such as NF4.
    """
    kind = parse_kind_to_take(kind, rank0_only=rank0_only)
    model = unwrap(model)
    if torch_fsdp1.is_foreign(model):
        torch_fsdp1.refuse_local(kind)
        if kind is StateKind.SHARDED:
            return torch_fsdp1.sharded_state(model, offload=offload_to_cpu)
        return torch_fsdp1.full_state(model, offload=offload_to_cpu, first_only=rank0_only)
    reshard_all(model)
    index = index_complete_model(model)
    if kind is StateKind.FULL:
        tensors: dict[str, Any] = dict(_iter_full(index, offload_to_cpu, rank0_only))
        if rank0_only and not index.ranks.is_first:
            return with_metadata(OrderedDict(), kind, index)
    else:
        tensors = _sharded(index) if kind is StateKind.SHARDED else _local(index)
        if offload_to_cpu:
            tensors = {name: _on_cpu(value) for name, value in tensors.items()}
        tensors.update(_buffers(index, kind, offload_to_cpu))
    ordered = _ordered(tensors, index)
    if kind is not StateKind.LOCAL:
        ordered = OrderedDict(module_hooks.run_save_hooks(index, ordered))
    return with_metadata(ordered, kind, index)


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    return value.cpu() if not isinstance(value, DTensor) else value.to("cpu")


def _sharded(index: ModelIndex) -> dict[str, torch.Tensor]:
    """Return DTensors by FQN; a unit's all-to-all overlaps with packing the next unit."""
    stagings = Staging(), Staging()
    tensors: dict[str, torch.Tensor] = {}
    under_way: deque[tuple[ShardingAdapter, Callable[[], list[torch.Tensor]]]] = deque()

    def end_first() -> None:
        adapter, end = under_way.popleft()
        tensors.update({entry.name: value for entry, value in zip(adapter.entries, end(), strict=True)})

    for number, adapter in enumerate(index.adapters):
        under_way.append((adapter, adapter.start_to_sharded(adapter.packed, stagings[number % len(stagings)])))
        if len(under_way) == len(stagings):
            end_first()
    while under_way:
        end_first()
    return tensors


def _local(index: ModelIndex) -> dict[str, torch.Tensor]:
    """Return this rank's shards by FQN; flat parameters without padding."""
    tensors: dict[str, torch.Tensor] = {}
    for adapter in index.adapters:
        if isinstance(adapter, EngineFlatAdapter) and adapter.flat_name is not None:
            tensors[adapter.flat_name] = adapter.packed[: adapter.unpadded_size]
        else:
            parts = adapter.local_parts(adapter.packed)
            tensors.update({entry.name: part for entry, part in zip(adapter.entries, parts, strict=True)})
    return tensors


def _ordered(tensors: Mapping[str, Any], index: ModelIndex) -> OrderedDict[str, Any]:
    """Return tensors under all names, in the unsharded model's order; names that it does not have come first."""
    state: OrderedDict[str, Any] = OrderedDict()
    known = set(index.names)
    state.update({name: value for name, value in tensors.items() if name not in known})
    for name in index.names:
        if name in index.extra:
            state[name] = index.extra[name].get_extra_state()
            continue
        value = tensors.get(index.aliases.get(name, name))
        if value is not None:
            state[name] = value
    return state


def with_metadata(state: OrderedDict[str, Any], kind: StateKind, index: ModelIndex) -> OrderedDict[str, Any]:
    """Set kind and layout in a state's `_metadata`, next to modules' versions."""
    note: dict[str, Any] = {"version": VERSION, "kind": kind.name, "aliases": dict(index.aliases)}
    if kind is StateKind.LOCAL:
        register_with_torch_dcp()  # LOCAL states need it, with either front end
        note |= {**local_metadata(), "names": list(index.names), "units": units_metadata(index)}
    state._metadata = OrderedDict({KEY: note})  # type: ignore[attr-defined]
    return state


def local_metadata() -> dict[str, Any]:
    """Return the metadata that every LOCAL state has: version, kind and rank."""
    group = current_group()
    return {"version": VERSION, "kind": StateKind.LOCAL.name, "rank": group.rank, "world": group.size}


def units_metadata(index: ModelIndex) -> list[dict[str, Any]]:
    """Return a model's layouts as plain JSON values."""
    return [unit_metadata(adapter) for adapter in index.adapters]


def unit_metadata(adapter: ShardingAdapter) -> dict[str, Any]:
    """Return an adapter's layout as plain JSON values."""
    entries = [
        {"name": entry.name, "aliases": list(entry.aliases), "shape": list(entry.shape), "dtype": str(entry.dtype)[6:]}
        for entry in adapter.entries
    ]
    return {"entries": entries, **adapter.layout_metadata()}


def check_kind(note: Mapping[str, Any], kind: StateKind) -> list[str]:
    """Return a problem if a state is LOCAL and should not be, or the reverse."""
    saved_kind = note.get("kind", kind.name)
    if saved_kind == kind.name or StateKind.LOCAL.name not in (saved_kind, kind.name):
        return []
    return [f"kind mismatch: it was taken as {saved_kind}, not as {kind.name}"]


def check_rank(note: Mapping[str, Any]) -> list[str]:
    """Return a problem if another rank saved a LOCAL state."""
    group = current_group()
    if not note or (note.get("world"), note.get("rank")) == (group.size, group.rank):
        return []
    return [
        f"it was taken by rank {note.get('rank')} of {note.get('world')}, this is rank {group.rank} of {group.size}: "
        "take a FULL or SHARDED one, or merge the rank files with `shardckpt consolidate`"
    ]


def check_units(note: Mapping[str, Any], index: ModelIndex) -> list[str]:
    """Return how a LOCAL state's layouts differ from a model's."""
    theirs = note.get("units")
    if theirs is None:
        return []
    mine = units_metadata(index)
    if theirs == mine:
        return []
    ours = _index_layouts(mine)
    if any(ours == _index_layouts(theirs, prefix) for prefix in ("", "module.")):
        return []
    return [
        f"it was taken from {len(theirs)} units that hold {_names(theirs)}, here are {len(ours)} that hold "
        f"{_names(ours.values())}: take a FULL or SHARDED one, or merge the rank files with `shardckpt consolidate`"
    ]


def _index_layouts(units: Iterable[Mapping[str, Any]], prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """Return sharded tensors' layouts by first FQN in the unsharded model."""

    def plain(name: str) -> str:
        return clean(name).removeprefix(prefix)

    layouts: dict[str, Mapping[str, Any]] = {}
    for unit in units:
        entries = [
            {**item, "name": plain(item["name"]), "aliases": sorted(map(plain, item.get("aliases", ())))}
            for item in unit["entries"]
        ]
        if unit.get("layout") is not None:
            flat = unit.get("flat")
            layout = {**unit["layout"], "params": [_without_names(item) for item in unit["layout"]["params"]]}
            layouts[entries[0]["name"]] = {**unit, "layout": layout, "entries": entries, "flat": flat and plain(flat)}
    return layouts


def _without_names(param: Mapping[str, Any]) -> dict[str, Any]:
    """Remove names from a parameter's layout: they are relative to the unit, but entries' names to the model."""
    return {key: value for key, value in param.items() if key not in ("name", "aliases")}


def _names(units: Iterable[Mapping[str, Any]]) -> str:
    return " | ".join("+".join(entry["name"] for entry in unit["entries"]) for unit in units)[:200]
