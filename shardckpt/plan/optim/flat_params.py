"""An optimizer's tensors laid end to end as its flat parameters have them, and what a file has to say to undo it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardckpt.errors import UsageError
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.manifest import TensorEntry
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.layout.piece_views import permute

Units = Mapping[str, FlatLayout]
"""Names of flat parameters to where in each its members lie, by the names of the unsharded model."""

_STEP = "step"
_NAMES = frozenset({"params", "param_names"})


def to_flat_params(
    tensors: Sequence[OutputTensor], content: Mapping[str, Any], units: Units
) -> tuple[tuple[OutputTensor, ...], dict[str, Any]]:
    """Convert an optimizer's tensors and group file to flat parameters.

    Args:
        tensors: Named `<parameter>/<slot>`.
        content: What `param_groups.json` holds, by names.
        units: The flat parameters; what is in none of them stays as it is.

    Raises:
        UsageError: A flat parameter would have holes, or its members differ in what one can have only once.
    """
    flat_of = {spec.name: flat for flat, layout in units.items() for spec in layout.specs}
    rows: dict[str, dict[str, OutputTensor]] = {}
    for tensor in tensors:
        name, _, slot = tensor.name.rpartition("/")
        rows.setdefault(name, {})[slot] = tensor
    made: dict[str, OutputTensor] = {}
    for name, row in rows.items():
        flat = flat_of.get(name)
        for slot, tensor in row.items():
            if flat is None:
                made[tensor.name] = tensor
            elif f"{flat}/{slot}" not in made:
                made[f"{flat}/{slot}"] = _flat_tensor(f"{flat}/{slot}", slot, units[flat], rows)
    groups = content["param_groups"]
    said = {
        **content,
        "param_groups": _flat_groups(groups, flat_of),
        "non_tensor_state": _flat_values(content["non_tensor_state"], units, flat_of),
        "units": [{"flat": flat, "layout": layout.to_json()} for flat, layout in units.items()],
        "originals": [list(group["params"]) for group in groups],
    }
    return tuple(made.values()), said


def _flat_tensor(
    name: str, slot: str, layout: FlatLayout, rows: Mapping[str, Mapping[str, OutputTensor]]
) -> OutputTensor:
    found = [rows.get(spec.name, {}).get(slot) for spec in layout.specs]
    lacking = [spec.name for spec, tensor in zip(layout.specs, found, strict=True) if tensor is None]
    if lacking:
        raise UsageError("a flat parameter would have holes", where=name, found=f"nothing of {', '.join(lacking[:5])}")
    members = [tensor for tensor in found if tensor is not None]
    first = members[0]
    if slot == _STEP or any(spec.shape and not each.shape for spec, each in zip(layout.specs, members, strict=True)):
        _same(name, {each.name: each.entry.pieces for each in members})
        return replace(first, name=name)
    for spec, tensor in zip(layout.specs, members, strict=True):
        if tensor.shape != spec.shape:
            raise UsageError("a value is not shaped like its parameter", where=tensor.name, found=tensor.shape)
    _same(name, {each.name: each.dtype for each in members})
    if layout.numel != sum(spec.numel for spec in layout.specs):
        raise UsageError("a flat parameter would have holes", where=name, found=f"alignment {layout.alignment}")
    whole = TensorEntry((name,), (layout.numel,), first.entry.stored, (), first.entry.delivered)
    lying = [
        replace(tensor, entry=_in_memory_order(tensor.entry, spec))
        for spec, tensor in zip(layout.specs, members, strict=True)
    ]
    return OutputTensor(name, whole, first.dtype, tuple(lying))


def _same(name: str, values: Mapping[str, object]) -> None:
    """Refuse what members of one flat parameter have to have in common."""
    [first, *others] = values
    odd = [each for each in others if values[each] != values[first]]
    if odd:
        raise UsageError("members of one flat parameter differ", where=name, found=f"{first} and {odd[0]}")


def _in_memory_order(entry: TensorEntry, spec: ParamSpec) -> TensorEntry:
    """Return an array with its dimensions from the slowest to the fastest of its parameter's memory."""
    if not spec.order:
        return entry
    return entry._replace(shape=spec.memory_shape, pieces=tuple(permute(entry.pieces, spec.order)))


def _flat_groups(groups: Sequence[Mapping[str, Any]], flat_of: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return groups of flat parameters: each is in the first group that has one of its members."""
    home: dict[str, int] = {}
    made = []
    for index, group in enumerate(groups):
        mine = []
        for name in group["params"]:
            flat = flat_of.get(name, name)
            other = groups[home.setdefault(flat, index)]
            odd = [key for key in {**group, **other} if key not in _NAMES and group.get(key) != other.get(key)]
            if odd:
                found = f"{odd[0]}={other.get(odd[0])!r} and {odd[0]}={group.get(odd[0])!r}"
                raise UsageError("members of one flat parameter are in groups that differ", where=flat, found=found)
            if home[flat] == index and flat not in mine:
                mine.append(flat)
        made.append({**group, "params": mine})
    return made


def _flat_values(
    values: Mapping[str, Mapping[str, Any]], units: Units, flat_of: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}
    for name, slots in values.items():
        if name not in flat_of:
            made[name] = dict(slots)
    for flat, layout in units.items():
        rows = {spec.name: dict(values.get(spec.name, {})) for spec in layout.specs}
        _same(flat, rows)
        if rows[layout.specs[0].name]:
            made[flat] = rows[layout.specs[0].name]
    return made
