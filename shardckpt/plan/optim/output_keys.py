"""Convert optimizer keys in output files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shardckpt.errors import UsageError
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.manifest import Path, TensorEntry
from shardckpt.plan.layout.copy_plan import permute
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.optim.optim_keys import (
    GROUPS,
    STATE,
    FlatUnit,
    Key,
    flatten,
    has_scalars,
    number_names,
    pack_state,
    rename_params,
    to_paths,
)

Keys = Literal["names", "ids", "flat", "flat-parameters"]
# Entries in `param_groups.json`: the kind of parameter keys (by default names), values that are not tensors, a
# flattened state, and the keys of nested slots.
KEYS, VALUES, FLATTENED, NESTED = "keys", "non_tensor_state", "flattened", "nested"

Units = Mapping[str, FlatLayout]  # by flat parameter, with names in the unsharded model


def rekey_state(
    tensors: Sequence[OutputTensor],
    content: Mapping[str, Any],
    keys: Keys,
    numbers: Mapping[int, str] | None = None,
    units: Units | None = None,
) -> tuple[tuple[OutputTensor, ...], dict[str, Any]]:
    """Convert an optimizer's tensors and the content of its group file to other keys."""
    state = {STATE: content[VALUES], GROUPS: content[GROUPS]}
    if keys == "names":
        return tuple(tensors), dict(content)
    if keys == "flat-parameters":
        return _to_flat_params(tensors, content, units or {})
    if keys == "flat":
        renamed = _rename(tensors, lambda name, slot: f"{STATE}.{name}.{slot}")
        # The groups stay: flattened settings do not show which parameters share a group.
        return renamed, {**content, KEYS: keys, FLATTENED: flatten(state)}
    ids = _number_names(tensors, content, numbers)
    by_id = rename_params(state, ids)
    groups = [
        {**group, "param_names": list(named["params"])}
        for group, named in zip(by_id[GROUPS], content[GROUPS], strict=True)
    ]
    values = {str(key): slots for key, slots in by_id[STATE].items()}
    renamed = _rename(tensors, lambda name, slot: f"{ids[name]}/{slot}")
    return renamed, {**content, KEYS: keys, GROUPS: groups, VALUES: values}


def to_state_paths(
    tensors: Iterable[OutputTensor], content: Mapping[str, Any]
) -> tuple[dict[Path, OutputTensor], dict[Path, object]]:
    """Return tensors, in their order, and values by their paths below the optimizer."""
    # By names and by ids: `("state", parameter, slot)`, a nested slot with all its keys, and
    # `("param_groups",)`, a list of dicts. Flattened: one key each, `("state.<parameter>.<slot>",)` and
    # `("param_groups.<parameter>.<setting>",)`.
    keys = content.get(KEYS, "names")
    if keys == "flat":
        return {(tensor.name,): tensor for tensor in tensors}, {(k,): v for k, v in content[FLATTENED].items()}
    if keys == "flat-parameters":
        raise UsageError("only safetensors folders keep flat parameters' layouts", fix="Choose names or ids.")

    def key(name: str) -> Key:
        return int(name) if keys == "ids" else name

    nested: Mapping[str, Sequence[str | int]] = content.get(NESTED, {})
    by_path: dict[Path, OutputTensor] = {}
    for tensor in tensors:
        name, _, slot = tensor.name.rpartition("/")
        path: Path = (STATE, key(name), *nested.get(slot, (slot,)))
        by_path[path] = tensor
    values = {key(name): slots for name, slots in content[VALUES].items()}
    value_by_path = to_paths({STATE: values, GROUPS: content[GROUPS]})
    for path in {path[:3] for path in by_path if len(path) > 3} & value_by_path.keys():
        value_by_path |= _list_leaves(value_by_path.pop(path), path)
    if by_path:
        value_by_path.pop((STATE,), None)
    return by_path, value_by_path


def _list_leaves(value: object, path: Path) -> dict[Path, object]:
    """Return the values in nested dicts by path."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {at: leaf for key, inner in value.items() for at, leaf in _list_leaves(inner, (*path, key)).items()}


def _group_tensors(tensors: Iterable[OutputTensor]) -> dict[str, dict[str, OutputTensor]]:
    rows: dict[str, dict[str, OutputTensor]] = {}
    for tensor in tensors:
        name, _, slot = tensor.name.rpartition("/")
        rows.setdefault(name, {})[slot] = tensor
    return rows


def _rename(tensors: Iterable[OutputTensor], rename: Callable[[str, str], str]) -> tuple[OutputTensor, ...]:
    parts = [(tensor, tensor.name.rpartition("/")) for tensor in tensors]
    return tuple(replace(tensor, name=rename(name, slot)) for tensor, (name, _, slot) in parts)


def _number_names(
    tensors: Iterable[OutputTensor], content: Mapping[str, Any], given: Mapping[int, str] | None
) -> dict[str, int]:
    names = number_names(name for group in content[GROUPS] for name in group["params"])
    ids = names if given is None else {name: number for number, name in sorted(given.items())}
    if given is not None and len(ids) < len(given):
        raise UsageError("--param-names has a name twice", found=f"{len(given)} ids, {len(ids)} names")
    unknown = [name for name in dict.fromkeys((*names, *_group_tensors(tensors), *content[VALUES])) if name not in ids]
    if unknown:
        raise UsageError(
            f"{len(unknown)} optimizer parameters have no number",
            found=", ".join(unknown[:8]),
            fix="Give --param-names FILE with the names in the optimizer's order.",
        )
    return ids


# --------------------------------------------------------------------------------------------------- flat parameters


def _to_flat_params(
    tensors: Sequence[OutputTensor], content: Mapping[str, Any], units: Units
) -> tuple[tuple[OutputTensor, ...], dict[str, Any]]:
    if not units:
        raise UsageError(
            "the flat parameters' layouts are not known",
            expected="rank files with LOCAL states from a model that was wrapped with use_orig_params=False",
        )
    rows: dict[str, dict[str, Any]] = {name: dict(slots) for name, slots in _group_tensors(tensors).items()}
    for name, slots in content[VALUES].items():
        rows.setdefault(name, {}).update(slots)
    flat_units = [FlatUnit(name, layout) for name, layout in units.items()]
    packed, _ = pack_state({STATE: rows, GROUPS: content[GROUPS]}, flat_units, _pack_slot)
    outputs: list[OutputTensor] = []
    values: dict[str, dict[str, Any]] = {}
    for name, slots in packed[STATE].items():
        for slot, value in slots.items():
            if isinstance(value, OutputTensor):
                outputs.append(value)
            else:
                values.setdefault(name, {})[slot] = value
    return tuple(outputs), {
        **content,
        KEYS: "flat-parameters",
        GROUPS: packed[GROUPS],
        VALUES: values,
        "units": [{"flat": flat, "layout": layout.to_json()} for flat, layout in units.items()],
        "originals": [list(group["params"]) for group in content[GROUPS]],
    }


def _pack_slot(unit: FlatUnit, slot: str, values: Mapping[str, Any]) -> Any:
    """Pack the values of all members into their flat parameter's value."""
    where, specs = f"{unit.name}/{slot}", unit.layout.specs
    missing = [name for name in unit.names if name not in values]
    tensors = {name: value for name, value in values.items() if isinstance(value, OutputTensor)}
    if missing and tensors:
        raise UsageError("a flat parameter would have holes", where=where, found=f"nothing of {', '.join(missing[:5])}")
    if missing or len(tensors) < len(specs):
        _require_equal(where, {name: values.get(name) for name in unit.names})
        return next(iter(values.values()))
    first = tensors[unit.names[0]]
    if has_scalars(specs, slot, {name: tensor.shape for name, tensor in tensors.items()}):
        _require_equal(where, {tensor.name: tensor.entry.pieces for tensor in tensors.values()})
        return replace(first, name=where)
    for spec in specs:
        tensor = tensors[spec.name]
        if tensor.shape != spec.shape:
            raise UsageError(
                "a value must have its parameter's shape",
                where=tensor.name,
                found=tensor.shape,
                expected=spec.shape,
            )
    _require_equal(where, {tensor.name: tensor.dtype for tensor in tensors.values()})
    if unit.layout.numel != sum(spec.numel for spec in specs):
        raise UsageError("a flat parameter would have holes", where=where, found=f"alignment {unit.layout.alignment}")
    entry = TensorEntry((where,), (unit.layout.numel,), first.entry.stored, (), first.entry.delivered)
    members = tuple(
        replace(tensors[spec.name], entry=_in_memory_order(tensors[spec.name].entry, spec)) for spec in specs
    )
    return OutputTensor(where, entry, first.dtype, members)


def _require_equal(where: str, values: Mapping[str, object]) -> None:
    [first, *others] = values
    odd = [name for name in others if values[name] != values[first]]
    if odd:
        raise UsageError("members of one flat parameter differ", where=where, found=f"{first} and {odd[0]}")


def _in_memory_order(entry: TensorEntry, spec: ParamSpec) -> TensorEntry:
    """Return an entry with its dimensions in memory order, slowest first."""
    if not spec.order:
        return entry
    return entry._replace(shape=spec.memory_shape, pieces=tuple(permute(entry.pieces, spec.order)))
