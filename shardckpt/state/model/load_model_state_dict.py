"""Load a model's state: check it on every rank, then copy it adapter by adapter."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.dtensors import gather_full_tensor, local
from shardckpt.core.params.full_params import Staging
from shardckpt.devices import wait_for_deferred_copies
from shardckpt.errors import ShardckptError, StateMismatchError
from shardckpt.ranks.group import Group
from shardckpt.state.adapters import sharded_tensor, torch_fsdp1
from shardckpt.state.adapters.base import ShardingAdapter, are_sharded_as, broadcast_from_rank0
from shardckpt.state.adapters.engine_flat import EngineFlatAdapter
from shardckpt.state.adapters.model_index import (
    Buffer,
    ModelIndex,
    index_complete_model,
    index_model,
    reshard_all,
    unwrap,
)
from shardckpt.state.adapters.name_collision import clean_keys
from shardckpt.state.keys import validation
from shardckpt.state.keys.kinds import StateKind, detect_kind, get_metadata, outside_inference_mode
from shardckpt.state.keys.slots import is_wrapper_subclass
from shardckpt.state.keys.validation import digest, validate_input
from shardckpt.state.model import module_hooks
from shardckpt.state.model.model_state_dict import check_kind, check_rank, check_units
from shardckpt.state.redistribute.rank_grid import Ranks
from shardckpt.torch_features import shard_replicated


@dataclass(frozen=True)
class Keys:
    """Names that only a model or only a state has.

    Attributes:
        missing: Names in the model that the state does not have.
        unexpected: Names in the state that the model does not have.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@outside_inference_mode
def load_model_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], *, kind: StateKind | str | None = None, strict: bool = True
) -> Keys:
    """Load a state dict into a model with any sharding. Collective.

    The model is changed only if the complete state fits.

    Args:
        model: As for `model_state_dict`.
        state_dict: State in any kind, with names from the unsharded or a wrapped model. A FULL state may be on rank 0
            alone; the other ranks then pass an empty dict. It is not changed.
        kind: The state's kind; None to detect it.
        strict: Raise an error for missing or unexpected names; otherwise they are returned and skipped.

    Returns:
        Missing and unexpected names.

    Raises:
        NameCollisionError: Two names in the model, or in the state, become equal without wrapper segments.
        StateMismatchError: The state does not fit; the message lists every name with its problem.
        RankError: The state does not fit on another rank.
    """
    model = unwrap(model)
    wait_for_deferred_copies()
    if torch_fsdp1.is_foreign(model):
        return _load_foreign(model, state_dict, kind, strict=strict)
    reshard_all(model)
    index = index_complete_model(model)
    group = index.ranks.group
    keys = Keys()
    with validate_input(index.ranks, "fit a state to the model", given=bool(state_dict)) as agreed:
        given = _IncomingModelState(state_dict, kind, index)
        if agreed.has_to_check:
            keys = given.check(strict)
            agreed.digest, agreed.broadcast_error = given.digest, given.broadcast_error()
    if agreed.from_rank0:
        keys = _broadcast_keys(keys, group)
    missing = {index.aliases.get(name, name) for name in keys.missing}
    staging = Staging()
    with torch.no_grad():
        for adapter in index.adapters:
            _load(adapter, given, missing, staging, from_rank0=agreed.from_rank0)
    for buffer in index.buffers:
        _load_buffer(buffer, given, missing, index.ranks if agreed.from_rank0 else None)
    extra = _broadcast_extra(given, group) if agreed.from_rank0 and index.extra else given.values
    for name, module in index.extra.items():
        if name in extra:
            module.set_extra_state(extra[name])
    unmanaged = index.describe_unmanaged()
    if unmanaged and index.ranks.is_first:
        warnings.warn(unmanaged, stacklevel=3)
    return keys


def _load_foreign(model: nn.Module, state: Mapping[str, Any], kind: StateKind | str | None, *, strict: bool) -> Keys:
    """Load a state that every rank has into a model under torch's own wrapper; rank 0 checks it for all."""
    expected = torch_fsdp1.shapes_at_first(model)
    ranks = torch_fsdp1.get_ranks(model)
    with validate_input(ranks, "fit a state to the model", given=bool(state)) as agreed:
        torch_fsdp1.refuse_local(detect_kind(state) if kind is None else StateKind.parse(kind))
        values = clean_keys(state)
        described = [(name, list(getattr(v, "shape", ())), str(getattr(v, "dtype", ""))) for name, v in values.items()]
        agreed.digest = digest(sorted(described))
        agreed.broadcast_error = StateMismatchError(torch_fsdp1.NEEDS_EVERY_RANK, found="one on rank 0 alone")
        if ranks.is_first:
            _check_foreign(values, expected, strict=strict)
    missing, unexpected = torch_fsdp1.put_state(model, state, strict=strict)
    return Keys(tuple(missing), tuple(unexpected))


def _check_foreign(values: Mapping[str, Any], expected: Mapping[str, Any], *, strict: bool) -> None:
    problems = []
    for name, value in values.items():
        known = expected.get(name)
        if isinstance(known, torch.Tensor):
            problems += _misfit(name, value, tuple(known.shape), known.dtype)
    if strict:
        problems += [f"Missing key: {name}" for name in expected if name not in values]
        problems += [f"Unexpected key: {name}" for name in values if name not in expected]
    if problems:
        raise _mismatch_error(problems)


def _mismatch_error(problems: Sequence[str]) -> StateMismatchError:
    return StateMismatchError(
        f"the state does not fit the model in {len(problems)} places: {'; '.join(problems[:50])}",
        fix="Nothing was changed. Names may be left out with strict=False.",
    )


def _broadcast_extra(given: _IncomingModelState, group: Group) -> dict[str, Any]:
    """Broadcast rank 0's extra state. Collective."""
    data = group.broadcast(given.extra_as_json() if group.rank == 0 else None)
    return given.extra if group.rank == 0 else dict(validation.decode(data))


def _broadcast_keys(keys: Keys, group: Group) -> Keys:
    """Broadcast rank 0's missing and unexpected names. Collective."""
    data = group.broadcast(json.dumps([keys.missing, keys.unexpected]).encode() if group.rank == 0 else None)
    missing, unexpected = json.loads(data)
    return Keys(tuple(missing), tuple(unexpected))


class _IncomingModelState:
    """A model's state to load, by FQN in the unsharded model."""

    def __init__(self, state: Mapping[str, Any], kind: StateKind | str | None, index: ModelIndex) -> None:
        self.kind = detect_kind(state) if kind is None else StateKind.parse(kind)
        self.note = get_metadata(state)
        self._index = index
        values = _clean_names(state, index)
        if self.kind is StateKind.LOCAL:
            self.values = sharded_tensor.to_local_parts(values, index)
        else:
            self.values = module_hooks.run_load_hooks(index, sharded_tensor.to_dtensors(values, index))

    def value(self, name: str, aliases: tuple[str, ...]) -> Any:
        """Return the value under any of an entry's names; None without a value."""
        return next((self.values[key] for key in (name, *aliases) if key in self.values), None)

    @property
    def digest(self) -> bytes:
        """Digest over data that must be equal on all ranks; LOCAL states may differ."""
        if self.kind is StateKind.LOCAL:
            return digest(self.kind.name)
        known = set(self._index.names)
        rows = [
            (name, *((list(v.shape), str(v.dtype), isinstance(v, DTensor)) if isinstance(v, torch.Tensor) else ()))
            for name, v in self.values.items()
            if name in known
        ]
        return digest([self.kind.name, sorted(rows)])

    def broadcast_error(self) -> ShardckptError | None:
        """Return why this state cannot be broadcast from rank 0; None if it can."""
        if self.kind is not StateKind.FULL:
            return StateMismatchError("rank 0 alone has a state", found=self.kind.name, expected="FULL")
        try:
            self.extra_as_json()
        except StateMismatchError as error:
            return error
        return None

    def check(self, strict: bool) -> Keys:
        """Return missing and unexpected names; refuse values that do not fit."""
        problems = check_kind(self.note, self.kind)
        if not problems:
            problems = self._local_problems() if self.kind is StateKind.LOCAL else self._problems()
        problems += self._memory_problems()
        keys = self._keys()
        if strict:
            problems += [f"Missing key: {name}" for name in keys.missing]
            problems += [f"Unexpected key: {name}" for name in keys.unexpected]
        if problems:
            raise _mismatch_error(problems)
        return keys

    @property
    def extra(self) -> dict[str, Any]:
        """Modules' extra state by name."""
        return {name: self.values[name] for name in self._index.extra if name in self.values}

    def extra_as_json(self) -> bytes:
        """Return the extra state as JSON for other ranks; pickled objects are not sent."""
        try:
            return validation.encode(self.extra)
        except (TypeError, ValueError) as error:
            raise StateMismatchError(
                f"extra state on rank 0 alone cannot be sent to the other ranks: {error}",
                where=", ".join(self.extra),
                expected="numbers, strings, tensors, and lists, tuples and dicts with them",
                fix="Give the state to every rank.",
            ) from error

    def _keys(self) -> Keys:
        expected = dict.fromkeys(self._index.names)
        if self.kind is StateKind.LOCAL:
            for adapter in self._index.adapters:
                if isinstance(adapter, EngineFlatAdapter) and adapter.flat_name is not None:
                    expected[adapter.flat_name] = None
                    for entry in adapter.entries:
                        for name in (entry.name, *entry.aliases):
                            expected.pop(name, None)
        ties = self._index.aliases
        has = {ties.get(name, name) for name in self.values}
        missing = [name for name in expected if name not in self.values and ties.get(name, name) not in has]
        known = set(expected) | set(self._index.names)
        return Keys(tuple(missing), tuple(name for name in self.values if name not in known))

    def _problems(self) -> list[str]:
        problems = []
        for entry in self._index.entries.values():
            value = self.value(entry.name, entry.aliases)
            if value is not None:
                problems += _misfit(entry.name, value, entry.shape, entry.dtype)
            problems += self._find_unequal((entry.name, *entry.aliases))
        for buffer in self._index.buffers:
            if buffer.name in self.values:
                problems += _misfit(buffer.name, self.values[buffer.name], tuple(buffer.value.shape), buffer.dtype)
        return [*problems, *self._find_other_classes()]

    def _find_other_classes(self) -> Iterator[str]:
        """Yield values that a wrapper subclass, such as a quantized weight, would not take."""
        for adapter in self._index.adapters:
            pairs = zip(adapter.entries, adapter.exposed, strict=False)  # a flat parameter has none
            for entry, parameter in pairs:
                value = self.value(entry.name, entry.aliases)
                if not isinstance(value, torch.Tensor):
                    continue
                found, own = (type(each) for each in (local(value), local(parameter.detach())))
                has_wrapper = [is_wrapper_subclass(local(each)) for each in (value, parameter.detach())]
                if has_wrapper[0] and found is not own:
                    name = own.__name__ if has_wrapper[1] else "plain tensor"
                    yield f"kind mismatch for {entry.name}: it is a {found.__name__}, and the model has a {name}"
                elif has_wrapper[1] and adapter.is_sharded and self.kind is StateKind.FULL:
                    yield (
                        f"{entry.name}: a FULL state cannot be divided among shards of the class {own.__name__} (take"
                        " the SHARDED state, or use `shardckpt.load`)"
                    )

    def _memory_problems(self) -> list[str]:
        """Return the tensors on the meta device: copies into them have no effect."""
        held = {entry.name: each.packed for each in self._index.adapters for entry in each.entries}
        held.update({buffer.name: buffer.value for buffer in self._index.buffers if buffer.persistent})
        return [
            f"no memory for {name}: it is on the meta device (`to_empty` gives some)"
            for name, tensor in held.items()
            if tensor.is_meta
        ]

    def _find_unequal(self, names: Sequence[str]) -> list[str]:
        """Return a parameter's other names under which the state has other values than under the first."""
        first, *others = [name for name in names if isinstance(self.values.get(name), torch.Tensor)] or [""]
        return [
            f"{first} and {name} are one parameter in this model, and their values differ (leave one of them out)"
            for name in others
            if not _are_alike(self.values[first], self.values[name])
        ]

    def _local_problems(self) -> list[str]:
        """Return differences between layouts, which define a shard's elements."""
        problems = check_rank(self.note)
        if problems:
            return problems
        misfits = check_units(self.note, self._index)
        for adapter in self._index.adapters:
            for name, value, held in _local_values(adapter, self.values):
                misfits += _misfit(name, value, tuple(held.shape), held.dtype)
        return misfits


def refuse_other_layout(note: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a LOCAL state from another rank or other units."""
    problems = check_rank(note) or check_units(note, index_model(model))
    if problems:
        raise StateMismatchError(f"the state does not fit the model: {problems[0]}", fix="Nothing was changed.")


def _clean_names(state: Mapping[str, Any], index: ModelIndex) -> dict[str, Any]:
    """Return a state with FQNs in the unsharded model, without wrapper segments."""
    cleaned = clean_keys(state)
    if index.names and not any(name in cleaned for name in index.names):
        stripped = {name.removeprefix("module."): value for name, value in cleaned.items()}
        if any(name in stripped for name in index.names):
            return stripped
    return cleaned


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True unless two tensors differ on this rank; tensors with different placements are not compared."""
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        is_same = isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements == other.placements
        return one.shape == other.shape and (not is_same or _are_alike(local(one), local(other)))
    if one is other or (one.is_meta or other.is_meta):
        return True
    return one.shape == other.shape and torch.allclose(
        one.detach().cpu(), other.detach().to("cpu", one.dtype), rtol=0, atol=0, equal_nan=True
    )


def _misfit(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    if not isinstance(value, torch.Tensor):
        return [f"{name} must be a tensor, got {type(value).__name__}"]
    if tuple(value.shape) != shape:
        return [f"size mismatch for {name}: found {tuple(value.shape)}, expected {shape}"]
    if value.dtype != dtype:
        return [f"dtype mismatch for {name}: found {value.dtype}, expected {dtype}"]
    return []


def _local_values(adapter: ShardingAdapter, values: Mapping[str, Any]) -> list[tuple[str, Any, torch.Tensor]]:
    """Return name, given value and current tensor for an adapter's values."""
    if isinstance(adapter, EngineFlatAdapter) and adapter.flat_name is not None:
        held = adapter.packed[: adapter.unpadded_size]
        return [(adapter.flat_name, values[adapter.flat_name], held)] if adapter.flat_name in values else []
    parts = adapter.local_parts(adapter.packed)
    return [
        (entry.name, values[entry.name], part)
        for entry, part in zip(adapter.entries, parts, strict=True)
        if entry.name in values
    ]


def _load(
    adapter: ShardingAdapter, given: _IncomingModelState, missing: set[str], staging: Staging, *, from_rank0: bool
) -> None:
    """Load the given values into an adapter; other entries keep theirs. Collective."""
    if given.kind is StateKind.LOCAL:
        for _, value, held in _local_values(adapter, given.values):
            held.copy_(value)
        return
    is_given = [entry.name not in missing for entry in adapter.entries]
    if not any(is_given):
        return
    places = [place if on else None for place, on in zip(adapter.part_views(adapter.packed), is_given, strict=True)]
    if from_rank0:
        values = _values(adapter, given, is_given) if given.values else None
        adapter.from_rank0(values, places, adapter.entries[0].dtype, staging)
    else:
        values = _values(adapter, given, is_given)
        if given.kind is StateKind.SHARDED and are_sharded_as(adapter, values):
            adapter.from_sharded(values, places, staging)
        else:
            adapter.from_full([None if value is None else _to_full(value) for value in values], places)
    adapter.mark_written()


def _values(
    adapter: ShardingAdapter, given: _IncomingModelState, is_given: Sequence[bool]
) -> list[torch.Tensor | None]:
    return [
        given.value(entry.name, entry.aliases).detach() if on else None
        for entry, on in zip(adapter.entries, is_given, strict=True)
    ]


def _to_full(value: torch.Tensor) -> torch.Tensor:
    return gather_full_tensor(value) if isinstance(value, DTensor) else value


def _load_buffer(buffer: Buffer, given: _IncomingModelState, missing: set[str], first_of: Ranks | None) -> None:
    """Copy the given value to a buffer, in its compute dtype. Collective if only rank 0 of `first_of` has the value."""
    if not buffer.persistent or buffer.name in missing or (first_of is None and buffer.name not in given.values):
        return
    held = buffer.value
    value = given.values.get(buffer.name)
    if first_of is not None:
        value = broadcast_from_rank0(first_of, held.shape, buffer.dtype, held.device, value)
    assert value is not None
    full = _to_full(value).to(held.device)
    if isinstance(held, DTensor):
        full = shard_replicated(full, held.device_mesh, held.placements)
    held.copy_(full)
