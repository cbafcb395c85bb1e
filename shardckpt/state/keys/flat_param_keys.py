"""Convert a state by FQN to flat parameters and back; pure functions that copy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.errors import UsageError
from shardckpt.layout import FlatLayout, ParamSpec, from_json
from shardckpt.plan.optim.optim_keys import FlatUnit, has_scalars, pack_state, split_groups, split_slots, to_names
from shardckpt.plan.optim.param_groups import match_settings, settings
from shardckpt.state.keys.kinds import KEY, VERSION, get_metadata
from shardckpt.state.keys.slots import OpaqueStateError, copy_value

# Key for data that an optimizer's state by flat parameters would lose: the FQNs in each param group, and the slots that
# some parameters did not have.
ORIGINALS = "originals"


def flat_units(state: Mapping[str, Any]) -> tuple[FlatUnit, ...]:
    """Return the flat parameters in a LOCAL state's metadata.

    Args:
        state: LOCAL state for a model or an optimizer, from any rank.

    Raises:
        UsageError: The metadata does not have flat parameters.
    """
    units = tuple(_unit(unit) for unit in get_metadata(state).get("units", ()) if unit.get("flat"))
    if not units:
        raise UsageError(
            "the state has no metadata on flat parameters",
            expected="a LOCAL state from a model that was wrapped with use_orig_params=False",
        )
    return units


def _unit(note: Mapping[str, Any]) -> FlatUnit:
    layout = from_json(note["layout"])
    assert isinstance(layout, FlatLayout), "flat parameters have a flat layout"
    specs = tuple(
        replace(spec, name=entry["name"], aliases=tuple(entry["aliases"]))
        for spec, entry in zip(layout.specs, note["entries"], strict=True)
    )
    return FlatUnit(note["flat"], replace(layout, specs=specs))


def to_flat_parameters(state: Mapping[str, Any], units: Sequence[FlatUnit], rank: int | None = None) -> dict[str, Any]:
    """Return a state by FQN as a state by flat parameters.

    Other parameters are kept. An optimizer's state keeps, under `ORIGINALS`, the data that flat parameters lose, so
    that `to_original_parameters` can restore it exactly. Its param groups list flat parameters. A rank's shard lists
    FQNs in the unsharded model there, as LOCAL states do.

    Args:
        state: Full tensors by FQN in the unsharded model; or an optimizer's `{"state": ..., "param_groups": ...}`.
        units: The model's flat parameters.
        rank: Rank whose LOCAL state to return, without padding; None for the full state.

    Raises:
        UsageError: Members are missing, have other shapes or several dtypes, or the rank does not exist.
        ConflictError: Members in one flat parameter are in groups with different settings.
        OpaqueStateError: A value is neither shaped like its parameter nor a scalar.
    """
    if rank is not None and not all(0 <= rank < unit.layout.world for unit in units):
        raise UsageError("the rank does not exist", found=rank, expected=f"below {min(u.layout.world for u in units)}")
    flat = _optim_to_flat(state, units, rank) if _is_optimizer(state) else _model_to_flat(state, units, rank)
    return flat if rank is None else _with_local_metadata(flat, units, rank)


def to_original_parameters(
    states: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    units: Sequence[FlatUnit],
    groups: Sequence[Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return a state by flat parameters as a state by FQN in the unsharded model.

    Args:
        states: Full state; or all ranks' states, in order, with or without padding at the end.
        units: The model's flat parameters.
        groups: FQNs in each resulting param group; None for the groups under `ORIGINALS`, or otherwise for groups
            in which each flat parameter is replaced by all its members. Settings follow the FQNs.

    Raises:
        UsageError: A flat parameter has another length than its unit, ranks disagree, or there is not one state
            for each rank.
        ConflictError: A group would have FQNs that were saved with different settings.
        OpaqueStateError: A value neither has its flat parameter's layout nor is a scalar.
    """
    parts = [states] if isinstance(states, Mapping) else list(states)
    is_full = isinstance(states, Mapping)
    for unit in units:
        if not is_full and unit.layout.world != len(parts):
            raise UsageError("the states of some ranks are missing", found=len(parts), expected=unit.layout.world)
    if _is_optimizer(parts[0]):
        return _optim_to_originals(parts, units, is_full, groups)
    return _model_to_originals(parts, units, is_full)


def _is_optimizer(state: Mapping[str, Any]) -> bool:
    return isinstance(state.get("state"), Mapping) and "param_groups" in state


def _with_local_metadata(state: dict[str, Any], units: Sequence[FlatUnit], rank: int) -> dict[str, Any]:
    """Add a LOCAL state's metadata to a rank's shard, for merging and loading."""
    with_metadata = OrderedDict(state)
    worlds = {unit.layout.world for unit in units}
    if len(worlds) == 1:
        aliases = {alias: spec.name for unit in units for spec in unit.layout.specs for alias in spec.aliases}
        note = {"version": VERSION, "kind": "LOCAL", "aliases": aliases, "rank": rank, "world": worlds.pop()}
        note["units"] = [unit.note(rank) for unit in units]
        with_metadata._metadata = OrderedDict({KEY: note})  # type: ignore[attr-defined]
    return with_metadata


# ---------------------------------------------------------------------------------------------------------- tensors


def _pack_flat(unit: FlatUnit, values: Mapping[str, torch.Tensor], rank: int | None) -> torch.Tensor:
    """Concatenate tensors, with zeros for missing ones; return all, or a rank's shard."""
    layout = unit.layout
    for spec in layout.specs:
        if spec.name in values:
            _check(spec, values[spec.name])
    kinds = {value.dtype: name for name, value in values.items()}
    if len(kinds) > 1:
        dtypes = ", ".join(f"{dtype} of {name}" for dtype, name in kinds.items())
        raise UsageError(f"parameters of {unit.name} have several types", found=dtypes)
    [dtype], first = kinds, next(iter(values.values()))
    flat = torch.zeros(layout.numel, dtype=dtype, device=first.device)
    for spec, at in zip(layout.specs, layout.offsets, strict=True):
        if spec.name in values:
            value = values[spec.name].detach()
            flat[at : at + spec.numel] = (value.permute(spec.order) if spec.order else value).reshape(-1)
    if rank is None:
        return flat
    low = rank * layout.chunk
    return flat[low : low + layout.get_unpadded_size(rank)].clone()


def _check(spec: ParamSpec, value: torch.Tensor) -> None:
    if isinstance(value, DTensor):
        raise UsageError(
            "a tensor must be unsharded", where=spec.name, found="a DTensor", fix="Take the state as FULL."
        )
    if tuple(value.shape) != spec.shape:
        raise UsageError("a tensor does not fit its unit", where=spec.name, found=value.shape, expected=spec.shape)


def _unpad(unit: FlatUnit, parts: Sequence[torch.Tensor], is_full: bool, where: str) -> torch.Tensor:
    """Concatenate a flat tensor's shards without their padding."""
    layout = unit.layout
    lengths = [(layout.numel, layout.world * layout.chunk)] if is_full else []
    lengths = lengths or [(layout.get_unpadded_size(rank), layout.chunk) for rank in range(layout.world)]
    for rank, (part, fitting) in enumerate(zip(parts, lengths, strict=True)):
        if part.dim() != 1 or part.numel() not in fitting:
            what = (
                "a flat tensor does not have its unit's length"
                if is_full
                else f"rank {rank}'s shard does not fit its unit"
            )
            raise UsageError(what, where=where, found=tuple(part.shape), expected=(fitting[0],))
    return torch.cat([part.detach()[:owned] for part, (owned, _) in zip(parts, lengths, strict=True)])


def _members(unit: FlatUnit, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a new tensor for each member, in its shape and memory order."""
    members = {}
    for spec, at in zip(unit.layout.specs, unit.layout.offsets, strict=True):
        value = flat[at : at + spec.numel].view(spec.memory_shape)
        if spec.order:
            value = value.permute([spec.order.index(dim) for dim in range(len(spec.order))])
        members[spec.name] = value.clone()
    return members


# ----------------------------------------------------------------------------------------------------------- models


def _model_to_flat(state: Mapping[str, Any], units: Sequence[FlatUnit], rank: int | None) -> dict[str, Any]:
    missing = [name for unit in units for name in unit.names if name not in state]
    if missing:
        raise UsageError("the state lacks flat parameters' members", found=", ".join(missing[:8]))
    unit_of = {name: unit for unit in units for spec in unit.layout.specs for name in (spec.name, *spec.aliases)}
    flat: dict[str, Any] = {}
    for name, value in state.items():
        unit = unit_of.get(name)
        if unit is None:
            flat[name] = value
        elif unit.name not in flat:
            flat[unit.name] = _pack_flat(unit, {member: state[member] for member in unit.names}, rank)
    return flat


def _model_to_originals(parts: Sequence[Mapping[str, Any]], units: Sequence[FlatUnit], is_full: bool) -> dict[str, Any]:
    missing = [unit.name for unit in units if not all(unit.name in part for part in parts)]
    if missing:
        raise UsageError("the state lacks flat parameters", found=", ".join(missing[:8]))
    unit_of = {unit.name: unit for unit in units}
    originals: dict[str, Any] = {}
    for name, value in parts[0].items():
        if name not in unit_of:
            originals[name] = value
            continue
        unit = unit_of[name]
        values = _members(unit, _unpad(unit, [part[name] for part in parts], is_full, name))
        for spec in unit.layout.specs:
            originals.update(dict.fromkeys((spec.name, *spec.aliases), values[spec.name]))
    return originals


# ------------------------------------------------------------------------------------------------------- optimizers


def _optim_to_flat(given: Mapping[str, Any], units: Sequence[FlatUnit], rank: int | None) -> dict[str, Any]:
    def pack(unit: FlatUnit, slot: str, values: dict[str, Any]) -> Any:
        return _pack_slot(unit, slot, values, rank)

    state = to_names(given)
    packed, missing = pack_state(state, units, pack)
    if rank is not None:
        return {**packed, "param_groups": state["param_groups"], ORIGINALS: {"missing": missing}}
    originals = {"groups": [list(group["params"]) for group in state["param_groups"]], "missing": missing}
    return {**packed, ORIGINALS: originals}


def _pack_slot(unit: FlatUnit, slot: str, values: dict[str, Any], rank: int | None) -> Any:
    shapes = {name: value.shape if isinstance(value, torch.Tensor) else None for name, value in values.items()}
    if has_scalars(unit.layout.specs, slot, shapes):
        return _require_equal(values, f"{slot} differs among parameters of {unit.name}")
    for spec in unit.layout.specs:
        if spec.name in values and shapes[spec.name] != spec.shape:
            raise _opaque_error(f"{spec.name}/{slot}", values[spec.name], spec.shape)
    return _pack_flat(unit, values, rank)


def _opaque_error(where: str, value: Any, expected: object) -> OpaqueStateError:
    return OpaqueStateError(
        "a slot must have its parameter's shape, or be a scalar",
        where=where,
        found=tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__,
        expected=expected,
    )


def _require_equal(values: Mapping[str, Any], what: str) -> Any:
    """Return a copy of the scalar that all members have; refuse different scalars."""
    names: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.dim():
            raise _opaque_error(name, value, ())
        names.setdefault(f"{value.dtype}: {value.item()}" if isinstance(value, torch.Tensor) else repr(value), name)
    if len(names) > 1:
        raise UsageError(what, found=", ".join(f"{value} of {name}" for value, name in names.items()))
    return copy_value(next(iter(values.values())))


def _optim_to_originals(
    parts: Sequence[Mapping[str, Any]],
    units: Sequence[FlatUnit],
    is_full: bool,
    groups: Sequence[Sequence[str]] | None,
) -> dict[str, Any]:
    first = parts[0]
    originals = first.get(ORIGINALS, {})
    missing = originals.get("missing", {})

    def split(unit: FlatUnit, slot: str, _: Any) -> dict[str, Any]:
        values = _split_slot(unit, slot, [part["state"].get(unit.name, {}) for part in parts], is_full)
        return {name: value for name, value in values.items() if slot not in missing.get(name, ())}

    state = split_slots(first["state"], units, split)
    param_groups = _original_groups(split_groups(first["param_groups"], units), groups, originals.get("groups"))
    if groups is not None:
        chosen = set(chain.from_iterable(groups))
        state = {name: slots for name, slots in state.items() if name in chosen}
    rest = {key: value for key, value in first.items() if key not in ("state", "param_groups", ORIGINALS)}
    return {**rest, "state": state, "param_groups": param_groups}


def _original_groups(
    flats: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[str]] | None, kept: Sequence[Sequence[str]] | None
) -> list[dict[str, Any]]:
    if groups is not None:
        changes = match_settings(groups, flats)
        return [{**change, "params": list(names)} for change, names in zip(changes, groups, strict=True)]
    names = [group["params"] for group in flats] if kept is None else kept
    return [{**settings(group), "params": list(params)} for group, params in zip(flats, names, strict=True)]


def _split_slot(unit: FlatUnit, slot: str, rows: Sequence[Mapping[str, Any]], is_full: bool) -> dict[str, Any]:
    """Split a slot's values on all ranks into each member's value."""
    where = f"{unit.name}/{slot}"
    lacking = [rank for rank, row in enumerate(rows) if slot not in row]
    if lacking:
        raise UsageError(f"rank {lacking[0]} has fewer slots for a flat parameter than rank 0", where=where)
    values = [row[slot] for row in rows]
    if isinstance(values[0], torch.Tensor) and values[0].dim():
        return _members(unit, _unpad(unit, values, is_full, where))
    by_rank = {f"rank {rank}": value for rank, value in enumerate(values)}
    scalar = _require_equal(by_rank, f"{where} differs among ranks")
    return {name: copy_value(scalar) for name in unit.names}
