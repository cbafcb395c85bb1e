"""An optimizer's shards on this rank by FQN, and targets for a load."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from shardckpt.boxes import Box, Shape, full_box
from shardckpt.core.modules.dtensors import detach, local, wrap_local
from shardckpt.errors import UnsupportedError
from shardckpt.plan.optim.param_groups import match_settings, settings
from shardckpt.plan.subclass_record import SubclassRecord
from shardckpt.state.adapters.base import ReplicatedAdapter
from shardckpt.state.adapters.engine_bucket import EngineBucketAdapter
from shardckpt.state.adapters.model_index import ModelIndex, index_complete_model
from shardckpt.state.keys.kinds import tensors
from shardckpt.state.keys.slots import (
    LARGEST_NOTE,
    OpaqueStateError,
    SlotRule,
    UnequalSteps,
    build_object,
    find_misfit_of_plain,
    find_misfit_of_wrapper,
    find_saved_class,
    find_slot_rule,
    has_own_elements,
    is_placed_as,
    is_wrapper_subclass,
    largest,
    take_attributes,
)
from shardckpt.state.local.local_shards import LocalModel, get_adapter_shards, get_member_shards
from shardckpt.state.local.tensor_shards import (
    LocalShard,
    TensorShards,
    empty_in_order,
    find_order,
    get_tensor_shards,
    repeats_elements,
)
from shardckpt.state.local.tensor_subclasses import build_empty
from shardckpt.state.optim.load_optim_state_dict import put_in_optimizer
from shardckpt.state.optim.optim_state_dict import (
    AdapterParams,
    ForeignParameterError,
    OptimizerLike,
    OptimizerParams,
    map_optimizer_params,
)


@dataclass(frozen=True)
class LocalOptimizer:
    """An optimizer's shards on this rank."""

    arrays: dict[tuple[str, str], TensorShards]  # tensors by FQN and slot
    values: dict[tuple[str, str], Any]  # values that are not tensors, by FQN and slot
    groups: list[dict[str, Any]]  # settings by param group, with FQNs as `params`
    names: tuple[str, ...]  # all FQNs, in the order of the groups


def local_optimizer(index: ModelIndex, optim: OptimizerLike) -> LocalOptimizer:
    """Return an optimizer's shards on this rank, without communication."""
    of = map_optimizer_params(index, optim)
    arrays: dict[tuple[str, str], TensorShards] = {}
    values: dict[tuple[str, str], Any] = {}
    for params in of.by_adapter:
        for position in params.positions:
            if not params.is_saving(position):
                continue
            for slot, value in optim.state.get(params.adapter.exposed[position], {}).items():
                for name, found_value in _kept(params, position, slot, value, find_slot_rule(optim, slot)):
                    if isinstance(found_value, TensorShards):
                        arrays[name, slot] = found_value
                    else:
                        values[name, slot] = found_value
    groups = [
        {**settings(live), "params": list(names)} for live, names in zip(optim.param_groups, of.groups, strict=True)
    ]
    return LocalOptimizer(arrays, values, groups, _list_names(of))


class _Parts(nn.Module):
    """Models and separate parameters, by their paths in a state."""


def find_index(
    models: Mapping[str, tuple[nn.Module, LocalModel]],
    parameters: Mapping[str, nn.Parameter],
    optim: torch.optim.Optimizer,
) -> ModelIndex | None:
    """Return the index for the model that has an optimizer's parameters; None without one."""
    # Several models, or separate parameters, may have them together. Then one index covers all, with their names before
    # FQNs.
    wanted = {id(parameter) for group in optim.param_groups for parameter in group["params"]}
    parts = _Parts()
    for name, (module, model) in models.items():
        if model.index is not None:
            if _has_all(model.index, optim):
                return model.index
            if any(id(parameter) in wanted for adapter in model.index.adapters for parameter in adapter.exposed):
                parts._modules[name] = module
    parts._parameters.update({name: each for name, each in parameters.items() if id(each) in wanted})
    if not parts._modules or len(parts._modules) + len(parts._parameters) == 1:
        return None
    joint = index_complete_model(parts)
    return joint if _has_all(joint, optim) else None


def is_saved_as_returned(index: ModelIndex, optim: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer's own `state_dict()` is saved: it has more than slots, and no model is sharded."""
    return all(isinstance(each, ReplicatedAdapter) for each in index.adapters) and bool(find_unsaved_values(optim))


def can_take_ids(index: ModelIndex, optim: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer may take its own `state_dict()`, by ids: also for several unsharded models."""
    is_joint = isinstance(index.root, _Parts) and all(isinstance(each, ReplicatedAdapter) for each in index.adapters)
    return is_joint or is_saved_as_returned(index, optim)


def _has_all(index: ModelIndex, optim: torch.optim.Optimizer) -> bool:
    try:
        map_optimizer_params(index, optim)
    except ForeignParameterError:
        return False
    return True


def find_unsaved_values(optim: torch.optim.Optimizer) -> list[str]:
    """Return what an optimizer has in addition to its groups and its parameters' state."""
    # Torch allows other keys than parameters in its state. Its class, or a hook, may add entries to `state_dict()`.
    others = [f"state.{key}" for key in optim.state if not isinstance(key, torch.Tensor)]
    hooks = getattr(optim, "_optimizer_state_dict_post_hooks", None)  # wrappers may lack it
    if type(optim).state_dict is not torch.optim.Optimizer.state_dict or hooks:
        with suppress(Exception):  # it may need to be gathered first; what is saved does not depend on it
            others += [str(key) for key in optim.state_dict() if key not in ("state", "param_groups")]
    return others


def parameter_names(index: ModelIndex, optim: OptimizerLike) -> list[list[str]]:
    """Return the FQNs in each param group, in the unsharded model's order."""
    of = map_optimizer_params(index, optim)
    places = {name: at for at, name in enumerate(index.names)}
    flat = {
        name
        for params in of.by_adapter
        if params.is_flat
        for position in params.positions
        for name in params.names(position)
    }
    return [sorted(names, key=places.__getitem__) if flat.issuperset(names) else list(names) for names in of.groups]


def _list_names(of: OptimizerParams) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in of.groups for name in names))


def _kept(
    params: AdapterParams, position: int, slot: str, value: Any, rule: SlotRule | None
) -> Iterator[tuple[str, Any]]:
    """Yield an optimizer value's FQNs, each with its shards or the plain value."""
    adapter, names = params.adapter, params.names(position)
    parameter = adapter.exposed[position]
    if rule == "rebuilt":
        return
    if _is_object(value) or (isinstance(rule, type) and isinstance(value, rule)):
        yield names[0], _take_object(params, value, rule, f"state.{names[0]}.{slot}")
        return
    if isinstance(value, torch.Tensor) and not _is_dense(local(value)) and not _is_wrapper(params, value):
        raise OpaqueStateError(
            "a tensor in the optimizer's state must be dense",
            where=f"state.{names[0]}.{slot}",
            found=f"class {type(local(value)).__name__}, layout {value.layout}",
            fix="Save dense tensors in its place, and build it from them after a load.",
        )
    if isinstance(value, torch.Tensor) and _is_shaped(parameter, value):
        yield from _shaped(params, position, detach(value))
    elif rule is not None and not params.is_flat and not (isinstance(value, torch.Tensor) and value.dim() == 0):
        own = local(value.detach()) if isinstance(value, torch.Tensor) else None
        yield names[0], value if own is None else _place_by_rule(params, position, slot, rule, own)
    elif isinstance(value, torch.Tensor) and value.dim() == 0:
        own = local(value.detach())
        yield from ((name, TensorShards((), own.dtype, (LocalShard(Box((), ()), own),))) for name in names)
    elif isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and not adapter.is_sharded):
        try:
            array = get_tensor_shards(value)
        except UnsupportedError as error:
            where = f"state.{names[0]}.{slot}"
            raise OpaqueStateError(error.what, where=where, found=error.found, fix=error.fix) from error
        yield from ((name, array) for name in names)
    elif not isinstance(value, torch.Tensor) and (isinstance(value, _PLAIN) or not adapter.is_sharded):
        yield from ((name, value) for name in names)
    else:
        raise OpaqueStateError(
            "state is neither shaped like its parameter nor a number nor a DTensor, and state_layout did not return "
            "how it is sharded",
            where=f"state.{names[0]}.{slot}",
            found=tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__,
            expected=tuple(parameter.shape),
            fix="Call `shardckpt.register_slot(optimizer class, slot, rule)` first; or keep it as a DTensor; or save "
            "`optim_state_dict(model, optim, state_layout=...)` in its place, for `load_optim_state_dict`.",
        )


def _is_object(value: Any) -> bool:
    """Return True for an object that has attributes, or a dict in the form in which objects are saved."""
    is_data = isinstance(value, (torch.Tensor, Mapping, Sequence, Set, io.BytesIO))
    return find_saved_class(value) is not None or (not is_data and hasattr(value, "__dict__"))


def _take_object(params: AdapterParams, value: Any, rule: SlotRule | None, where: str) -> dict[str, Any]:
    if params.is_flat:
        raise UnsupportedError("an object in a flat parameter's state cannot be saved", where=where, found=type(value))
    return take_attributes(value, rule, where)


def _place_by_rule(params: AdapterParams, position: int, slot: str, rule: SlotRule, own: torch.Tensor) -> TensorShards:
    """Return a slot's shard by its registered rule."""
    full, box = _find_slot_box(params, position, rule, tuple(own.shape))
    if 0 in box.size and 0 in own.shape:
        return TensorShards(full, own.dtype, ())
    if box.size != tuple(own.shape):
        raise OpaqueStateError(
            f"a slot with the rule {rule} must have the length of its parameter's shard there",
            where=f"state.{params.names(position)[0]}.{slot}",
            found=list(own.shape),
            expected=list(box.size),
        )
    return TensorShards(full, own.dtype, (LocalShard(box, own),))


def _find_slot_box(params: AdapterParams, position: int, rule: SlotRule, shape: Shape) -> tuple[Shape, Box]:
    """Return a slot's full shape and this rank's box, by its rule, for a full or local shape."""
    if not isinstance(rule, int):
        return shape, full_box(shape)
    ((_, like),) = _shaped(params, position, detach(params.adapter.exposed[position]))
    lengths, offset, full = list(shape), [0] * len(shape), list(shape)
    here = local(params.adapter.exposed[position]).shape
    if not like.shards and rule < len(shape) and 0 in here and len(here) == len(like.shape):  # an empty shard
        length = like.shape[here.index(0)]
        lengths[rule], offset[rule], full[rule] = 0, length, length
    for shard in like.shards:
        splits = [dim for dim, length in enumerate(like.shape) if shard.box.size[dim] != length]
        if len(splits) > 1 or len(like.shards) > 1 or rule >= len(shape):
            raise OpaqueStateError(
                f"a slot with the rule {rule} must have this dimension, and its parameter one sharded dimension",
                where=f"state.{params.names(position)[0]}",
                found=f"a slot of {list(shape)} for a shard of {list(shard.box.size)}",
                fix="Keep it as a DTensor.",
            )
        if splits:
            lengths[rule], offset[rule] = shard.box.size[splits[0]], shard.box.offset[splits[0]]
            full[rule] = like.shape[splits[0]]
    return tuple(full), Box(tuple(offset), tuple(lengths))


_PLAIN = (bool, int, float, str, type(None))


def _is_dense(own: torch.Tensor) -> bool:
    """Return True if a tensor is strided, not quantized and not a wrapper subclass."""
    return has_own_elements(own) and own.layout is torch.strided and not own.is_quantized


def _is_wrapper(params: AdapterParams, value: torch.Tensor) -> bool:
    """Return True for a wrapper subclass; a flat parameter's cannot be split among its members."""
    return is_wrapper_subclass(local(value)) and not params.is_flat


def _is_shaped(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Return True if a value has its parameter's shape and placements."""
    is_placed = is_placed_as(parameter, value)
    return value.shape == parameter.shape and is_placed and (isinstance(value, DTensor) or value.dim() > 0)


def _make_zeros(parameter: nn.Parameter, dtype: torch.dtype, order: tuple[int, ...]) -> torch.Tensor:
    """Return zeros with a parameter's shape and placements, and its memory order unless another is known."""
    # `torch.zeros_like` of a DTensor would note the dtype of an earlier result, not of this one, in torch 2.6.
    zeros = torch.zeros_like(local(parameter.detach()), dtype=dtype)
    if len(order) == zeros.dim():
        zeros = empty_in_order(zeros.shape, order, dtype, zeros.device).zero_()
    if not isinstance(parameter, DTensor):
        return zeros
    return wrap_local(zeros, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def _build_wrapper(params: AdapterParams, position: int, slot: str, saved: SavedSlot) -> torch.Tensor | None:
    """Return a new wrapper subclass with a parameter's placements; None if its class is unknown."""
    parameter = detach(params.adapter.exposed[position])
    ((name, like),) = _shaped(params, position, parameter)
    box = like.shards[0].box if like.shards else Box((0,) * len(like.shape), (0,) * len(like.shape))
    assert saved.record is not None
    made = build_empty(saved.record, saved.inner, box, local(parameter).device, f"state.{name}.{slot}")
    if made is None or not isinstance(parameter, DTensor):
        return made
    return wrap_local(made, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def _has_order(own: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Return False if a tensor has another memory order than was saved for it."""
    held = local(own)
    return len(order) != held.dim() or not order or find_order(held) == order


def _shaped(params: AdapterParams, position: int, value: torch.Tensor) -> Iterator[tuple[str, TensorShards]]:
    """Yield the FQNs in an exposed parameter, with shards from a value that has its layout."""
    adapter = params.adapter
    if params.is_flat:
        shards = get_adapter_shards(adapter, local(value))
        for entry, shard in zip(adapter.entries, shards, strict=True):
            yield entry.name, TensorShards(entry.shape, value.dtype, shard)
        return
    entry = adapter.entries[position]
    if isinstance(adapter, EngineBucketAdapter):
        yield entry.name, TensorShards(entry.shape, value.dtype, get_member_shards(adapter, position, local(value)))
    else:
        placed = get_tensor_shards(value, adapter.exposed[position])
        yield entry.name, TensorShards(entry.shape, value.dtype, placed.shards)


class SavedSlot(NamedTuple):
    """An optimizer slot's saved tensor."""

    shape: tuple[int, ...]  # saved shape, in elements
    dtype: torch.dtype
    # Dimensions from slowest to fastest in the saved memory; empty if row-major or unknown.
    order: tuple[int, ...] = ()
    # Of a wrapper subclass: its record, and the shapes and dtypes of its inner tensors.
    record: SubclassRecord | None = None
    inner: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = MappingProxyType({})


@dataclass(frozen=True)
class OptimTargets:
    """Targets into which a saved optimizer state is read."""

    # FQN, slot and destination: the optimizer's own memory if it fits, otherwise new memory.
    arrays: list[tuple[str, str, TensorShards]]
    state: dict[nn.Parameter, dict[str, Any]]  # by parameter, complete once the arrays are filled
    changes: list[dict[str, Any]]  # new settings by param group; empty for a group without saved parameters
    problems: list[str]  # mismatches, one sentence each, starting with the dotted name

    def put(self, optim: OptimizerLike) -> None:
        """Set the optimizer's state and settings."""
        put_in_optimizer(optim, self.state, self.changes)


def plan_optim_targets(
    model_index: ModelIndex,
    optim: OptimizerLike,
    slots: Mapping[str, Mapping[str, SavedSlot]],
    values: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    *,
    keeps_rest: bool = False,
    unequal_steps: UnequalSteps = "error",
) -> OptimTargets:
    """Plan targets for a saved optimizer state; an optimizer that never stepped gets new tensors."""
    of = map_optimizer_params(model_index, optim)
    targets = OptimTargets([], {}, match_settings(of.groups, groups), [])
    scalars = _scalars(model_index, slots)
    for index, names in enumerate(of.groups):
        flags = {**optim.param_groups[index], **targets.changes[index]}
        on_device = bool(flags.get("capturable") or flags.get("fused"))
        builder = _TargetBuilder(
            optim, targets.changes[index], targets, slots, values, scalars, on_device, keeps_rest, unequal_steps
        )
        for params, position in _find_params(of, set(names)):
            builder.add_targets(params, position)
    return targets


def _find_params(of: OptimizerParams, names: set[str]) -> Iterator[tuple[AdapterParams, int]]:
    return ((params, p) for params in of.by_adapter for p in params.positions if params.names(p)[0] in names)


def _scalars(index: ModelIndex, slots: Mapping[str, Mapping[str, SavedSlot]]) -> set[str]:
    """Return the slots that are scalars, also for 0-dim parameters."""
    entries = index.entries
    numbers = {"step"}
    for name, kept in slots.items():
        if name in entries and entries[name].shape:
            numbers |= {slot for slot, saved_slot in kept.items() if not saved_slot.shape}
    return numbers


@dataclass(frozen=True)
class _TargetBuilder:
    """Builds targets, one parameter at a time."""

    optim: OptimizerLike
    settings: Mapping[str, Any]  # that the load sets in the parameters' group
    targets: OptimTargets
    slots: Mapping[str, Mapping[str, SavedSlot]]
    values: Mapping[str, Mapping[str, Any]]
    scalars: set[str]
    on_device: bool
    keeps_rest: bool
    unequal_steps: UnequalSteps

    def add_targets(self, params: AdapterParams, position: int) -> None:
        """Add one exposed parameter's targets."""
        parameter, names = params.adapter.exposed[position], params.names(position)
        entries = params.adapter.entries if params.is_flat else [params.adapter.entries[position]]
        kept = dict(self.optim.state.get(parameter, {}))
        has_part = params.has_part(position)
        state: dict[str, Any] = dict(kept) if self.keeps_rest else {}
        for slot in dict.fromkeys(slot for name in names for slot in self.slots.get(name, ())):
            if not has_part and slot not in kept:
                continue  # an optimizer that is never given a gradient of it has no state, unless it made some at first
            saved = {e.name: self.slots[e.name][slot] for e in entries if slot in self.slots.get(e.name, ())}
            rule = find_slot_rule(self.optim, slot)
            if rule == "rebuilt":  # registered after the save
                continue
            if rule is not None and not params.is_flat and any(each.shape for each in saved.values()):
                state[slot] = self._by_rule(params, position, slot, rule, saved, kept.get(slot))
                continue
            shapes = {e.name: e.shape for e in entries}
            if all(saved_slot.shape == shapes[name] for name, saved_slot in saved.items()) and not (
                slot in self.scalars and all(not saved_slot.shape for saved_slot in saved.values())
            ):
                state[slot] = self._shaped(params, position, slot, saved, kept.get(slot))
            elif all(not saved_slot.shape for saved_slot in saved.values()):
                state[slot] = self._scalar(parameter, slot, saved, kept.get(slot))
            else:
                state[slot] = self._other(params, parameter, slot, saved, kept.get(slot))
        plain = self._build_objects(self._plain_values(names), names[0], parameter)
        values = {slot: _on_device(value, parameter.device) for slot, value in plain.items()}
        state.update(values if has_part else {slot: value for slot, value in values.items() if slot in kept})
        self.targets.state[parameter] = state

    def _plain_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Return saved values other than tensors; all members share them."""
        values_by_name: dict[str, Any] = {}
        for slot in dict.fromkeys(slot for name in names for slot in self.values.get(name, ())):
            by_name = {name: self.values[name][slot] for name in names if slot in self.values.get(name, ())}
            values = list(by_name.values())
            top = largest(values)
            values_by_name[slot] = values[0] if top is None else top
            if not all(_are_alike(other, values[0]) for other in values[1:]) and (
                top is None or self.unequal_steps == "error"
            ):
                firsts = {str(value): name for name, value in reversed(by_name.items())}
                text = ", ".join(f"{value} of {name}" for value, name in list(firsts.items())[:4])
                end = LARGEST_NOTE if top is not None else ""
                self.targets.problems.append(f"{slot} differs among one flat parameter's members: {text}{end}")
        return values_by_name

    def _build_objects(self, values: dict[str, Any], name: str, parameter: nn.Parameter) -> dict[str, Any]:
        """Build the saved objects again, from the classes that are registered; leave out what is rebuilt."""
        made = {}
        for slot, value in values.items():
            rule, kind = find_slot_rule(self.optim, slot), find_saved_class(value)
            if rule == "rebuilt":
                continue
            made[slot] = value if kind is None else build_object(value, rule, parameter)
            if made[slot] is None and kind is not None:
                call = f"`shardckpt.register_slot({type(self.optim).__name__}, {slot!r}, class)`"
                self.targets.problems.append(f"{name}/{slot}: it was saved as {kind}, whose class needs {call}")
        return made

    def _shaped(self, params: AdapterParams, position: int, slot: str, saved: Mapping[str, SavedSlot], own: Any) -> Any:
        parameter = params.adapter.exposed[position]
        if any(each.record is not None for each in saved.values()):
            return self._wrapped(params, position, slot, saved, own)
        if (misfit := find_misfit_of_plain(self.optim, self.settings)) is not None:
            self.targets.problems.append(f"{next(iter(saved))}/{slot}: {misfit}")
            return own
        if isinstance(own, torch.Tensor) and is_wrapper_subclass(local(own)):
            own = None  # the saved form is loaded
        dtype = self._one_type(slot, saved)
        order = next(iter(saved.values())).order if len(saved) == 1 else ()
        if isinstance(own, DTensor) and own.shape == parameter.shape and own.dtype == dtype:
            if not _is_shaped(parameter, own):  # the optimizer shards this tensor in another way
                self.targets.arrays.append((next(iter(saved)), slot, get_tensor_shards(own)))
                return own
        elif not (isinstance(own, torch.Tensor) and _is_shaped(parameter, own) and own.dtype == dtype):
            own = _make_zeros(parameter, dtype, order)
        if not _has_order(own, order) or repeats_elements(local(own)):
            own = _make_zeros(parameter, dtype, order)
        elif len(saved) < len(params.names(position)) and not self.keeps_rest:
            own = own.detach().clone().zero_()
        for name, array in _shaped(params, position, own.detach()):
            if name in saved:
                self.targets.arrays.append((name, slot, array))
        return own

    def _by_rule(
        self,
        params: AdapterParams,
        position: int,
        slot: str,
        rule: SlotRule,
        saved: Mapping[str, SavedSlot],
        own: Any,
    ) -> Any:
        """Return the target for a slot with a registered rule: the existing one, or a new one."""
        ((name, found),) = saved.items()
        full, box = _find_slot_box(params, position, rule, found.shape)
        if full != found.shape:
            self.targets.problems.append(f"{name}/{slot}: size mismatch: found {found.shape}, expected {full}")
            return own
        fits = isinstance(own, torch.Tensor) and tuple(own.shape) == box.size and own.dtype == found.dtype
        fits = fits and not repeats_elements(local(own))
        if not fits:
            own = torch.zeros(box.size, dtype=found.dtype, device=params.adapter.exposed[position].device)
        shards = () if 0 in box.size else (LocalShard(box, own),)
        self.targets.arrays.append((name, slot, TensorShards(full, found.dtype, shards)))
        return own

    def _wrapped(
        self, params: AdapterParams, position: int, slot: str, saved: Mapping[str, SavedSlot], own: Any
    ) -> Any:
        """Return the target for a wrapper subclass: the existing one, or a new one."""
        ((name, found),) = saved.items() if len(saved) == 1 else ((next(iter(saved)), None),)
        if found is None or found.record is None or params.is_flat:
            self.targets.problems.append(f"{name}/{slot}: it was saved as a wrapper subclass, and this slot is flat")
            return own
        parameter = params.adapter.exposed[position]
        if not (isinstance(own, torch.Tensor) and _is_shaped(parameter, own) and is_wrapper_subclass(local(own))):
            if (misfit := find_misfit_of_wrapper(self.optim, parameter, found.record.name)) is not None:
                self.targets.problems.append(f"{name}/{slot}: {misfit}")
                return own
            own = _build_wrapper(params, position, slot, found)
        if own is None:
            self.targets.problems.append(
                f"{name}/{slot}: it was saved as {found.record.name}, which cannot be built here (install"
                f" {found.record.package}, or make one step before the load)"
            )
        else:
            self.targets.arrays.extend((name, slot, array) for _, array in _shaped(params, position, own))
        return own

    def _scalar(self, parameter: nn.Parameter, slot: str, saved: Mapping[str, SavedSlot], own: Any) -> Any:
        dtype = self._one_type(slot, saved)
        if not (isinstance(own, torch.Tensor) and own.dim() == 0 and own.dtype == dtype):
            own = torch.zeros((), dtype=dtype, device=parameter.device if self.on_device else "cpu")
        for name in saved:  # a flat parameter has several members; the caller checks that their values are equal
            self.targets.arrays.append((name, slot, TensorShards((), dtype, (LocalShard(Box((), ()), local(own)),))))
        return own

    def _other(
        self, params: AdapterParams, parameter: nn.Parameter, slot: str, saved: Mapping[str, SavedSlot], own: Any
    ) -> Any:
        """Return the target for a tensor with another shape than its parameter: the existing one, or a new one."""
        name, first = next(iter(saved.items()))
        fits = isinstance(own, torch.Tensor) and tuple(own.shape) == first.shape and own.dtype == first.dtype
        if fits and _has_order(own, first.order) and not repeats_elements(local(own)):
            self.targets.arrays.append((name, slot, get_tensor_shards(own)))
            return own
        if isinstance(parameter, DTensor):
            target = _beside(parameter, first)
            self.targets.arrays.append((name, slot, get_tensor_shards(target)))
            return target
        if params.adapter.is_sharded or len(saved) > 1:
            self.targets.problems.append(
                f"{name}/{slot}: size mismatch: found {first.shape}, expected {tuple(parameter.shape)}"
            )
            return None
        plain = empty_in_order(first.shape, first.order, first.dtype, parameter.device).zero_()
        self.targets.arrays.append((name, slot, get_tensor_shards(plain)))
        return plain

    def _one_type(self, slot: str, saved: Mapping[str, SavedSlot]) -> torch.dtype:
        types = {saved_slot.dtype: name for name, saved_slot in saved.items()}
        if len(types) > 1:
            dtypes = ", ".join(f"{dtype} of {name}" for dtype, name in types.items())
            self.targets.problems.append(f"{slot} differs among one flat parameter's members: {dtypes}")
        return next(iter(types))


def _are_alike(one: Any, other: Any) -> bool:
    """Return True if two values are equal; compare only the tensors in them if there are any."""
    held = tensors(one), tensors(other)
    return bool(one == other) if held == ([], []) else len(held[0]) == len(held[1]) and all(map(torch.equal, *held))


def _on_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in a value's lists, tuples and dicts to a device; single numbers stay on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if value.dim() else value
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    if _is_object(value):
        vars(value).update(_on_device(vars(value), device))
    return type(value)(_on_device(item, device) for item in value) if type(value) in (list, tuple) else value


def _beside(parameter: DTensor, slot: SavedSlot) -> DTensor:
    """Return a target for a saved tensor with another shape than its DTensor parameter."""
    # The target is sharded like the parameter in dimensions with equal length, and replicated in others. Any placements
    # would be correct; these need little memory.
    mesh, placements = parameter.device_mesh, list(parameter.placements)
    if len(slot.shape) != parameter.dim() or any(type(placement) not in (Shard, Replicate) for placement in placements):
        placements = [Replicate()] * mesh.ndim
    like_parameter = [
        p if isinstance(p, Shard) and slot.shape[p.dim] == parameter.shape[p.dim] else Replicate() for p in placements
    ]
    target = zeros(*slot.shape, dtype=slot.dtype, device_mesh=mesh, placements=like_parameter)
    if not slot.order:
        return target
    own = local(target)
    held = empty_in_order(own.shape, slot.order, slot.dtype, own.device).zero_()
    return wrap_local(held, mesh, like_parameter, target.shape, target.stride())
