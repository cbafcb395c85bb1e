"""Convert optimizer state between forms: by names, by ids, flattened, by paths.

Generic over the values, which are not copied. The nested form is torch's: `{"state": {key: {slot: value}},
"param_groups": [{..., "params": [key, ...]}, ...]}`, whose keys are FQNs or ids. In the flattened form, each value has
one key: `state.{name}.{slot}` or `param_groups.{name}.{setting}`. By paths, each value has a path in the nested form.
Values may be anything: tensors, manifest entries, numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from shardckpt.errors import FormatError, NameCollisionError, ShardckptError, UsageError
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.manifest import Path, dotted, unflatten
from shardckpt.plan.optim.param_groups import NAMES, match_settings, settings

STATE, GROUPS = "state", "param_groups"

Key = str | int
Nested = dict[str, Any]  # the nested form; other entries are kept

V = TypeVar("V")

_MAX_DIGITS = 18


class MixedKeysError(ShardckptError, ValueError):
    """Keys are both ids and names."""


def get_key_type(state: Mapping[str, Any]) -> type | None:
    """Return the keys' type: `int` for ids, `str` for names, None for an empty state."""
    kinds = {type(key) for key in (*state.get(STATE, {}), *_iter_params(state.get(GROUPS, ())))}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise MixedKeysError(
            "keys of an optimizer state must be all ids or all names",
            found=", ".join(sorted(kind.__name__ for kind in kinds)),
        )
    return next(iter(kinds), None)


def to_names(state: Mapping[str, Any], groups: Sequence[Sequence[str]] | None = None) -> Nested:
    """Return an optimizer state by names.

    Args:
        state: State by ids or by names.
        groups: Names in each group; None if the groups contain them as `param_names`.

    Raises:
        UsageError: Names are unknown, or there are more or fewer names than parameters.
    """
    if get_key_type(state) is str:
        return dict(state)
    saved = state[GROUPS]
    if groups is not None and len(groups) != len(saved):
        raise UsageError("names must be given for each group", found=len(groups), expected=len(saved))
    names: dict[Key, str] = {}
    for index, group in enumerate(saved):
        group_names = groups[index] if groups is not None else group.get("param_names", ())
        if len(group_names) != len(group["params"]):
            raise UsageError(
                "the names in a group are not known",
                where=f"param_groups[{index}]",
                found=f"{len(group_names)} names",
                expected=f"{len(group['params'])}",
                fix="Pass names for each group, in the same order.",
            )
        names.update(zip(group["params"], group_names, strict=True))
    return rename_params(state, names)


def to_ids(state: Mapping[str, Any], groups: Sequence[Sequence[str]] | None = None) -> Nested:
    """Return an optimizer state by ids, as `torch.optim.Optimizer` has it.

    Args:
        state: State by names or by ids.
        groups: Names in each group of the target optimizer; None to number them in the state's order. Settings follow
            the names. A group without names gets the settings from a saved group without names.

    Raises:
        UsageError: A name in the state is in no group.
        ConflictError: Names in one group were saved with different settings.
    """
    if get_key_type(state) is int:
        return dict(state)
    saved = state[GROUPS]
    numbers = number_names(name for group in groups or [g["params"] for g in saved] for name in group)
    unknown = [name for name in state[STATE] if name not in numbers]
    if unknown:
        raise UsageError("names in the state are in no group of the optimizer", found=", ".join(unknown[:10]))
    if groups is not None:
        empty = iter([settings(group) for group in saved if not group["params"]])
        changes = [
            change if names else next(empty, {})
            for change, names in zip(match_settings(groups, saved), groups, strict=True)
        ]
        saved = [{**change, "params": names} for change, names in zip(changes, groups, strict=True)]
    return rename_params({**state, GROUPS: saved}, numbers)


def rename_params(state: Mapping[str, Any], names: Mapping[Any, Key]) -> Nested:
    """Replace every key of a nested state."""
    slots: dict[Key, Mapping[str, Any]] = {}
    for key, row in state[STATE].items():
        name = names[key]
        for slot in row.keys() & slots.get(name, {}).keys():
            raise NameCollisionError(f"two optimizer entries would both be named {f'{name}/{slot}'!r}", where=key)
        slots[name] = {**slots[name], **row} if name in slots else row
    groups = [
        {
            **{k: v for k, v in group.items() if k not in NAMES},
            "params": [names[key] for key in group.get("params", ())],
        }
        for group in state[GROUPS]
    ]
    return {**state, STATE: slots, GROUPS: groups}


def number_names(names: Iterable[str]) -> dict[str, int]:
    """Return an id for each name, in their order."""
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer state with one key per value.

    The keys are `state.{name}.{slot}` and `param_groups.{name}.{setting}`.

    Args:
        state: State by names.

    Raises:
        UsageError: The state has ids.
    """
    if get_key_type(state) is int:
        raise UsageError("a state with ids for keys cannot be flattened", fix="Call to_names first.")
    flat = {f"{STATE}.{name}.{slot}": value for name, slots in state[STATE].items() for slot, value in slots.items()}
    for group in state[GROUPS]:
        hypers = {key: value for key, value in group.items() if key not in NAMES}
        flat |= {f"{GROUPS}.{name}.{key}": value for name in group["params"] for key, value in hypers.items()}
    return flat


def nest(flat: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> Nested:
    """Unflatten an optimizer state.

    Args:
        flat: Values by flattened keys.
        groups: Names in each group.

    Raises:
        UsageError: A key has another form, or a group's parameters have different settings.
    """
    names = {name for group in groups for name in group}
    slots, hypers = split_keys(flat, names.__contains__)
    unknown = [name for name in (*slots, *hypers) if name not in names]
    if unknown:
        raise UsageError("a key does not fit a flattened optimizer state", found=unknown[0])
    return {STATE: slots, GROUPS: [_join_settings(group, hypers) for group in groups]}


def _join_settings(group: Sequence[str], hypers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    first = hypers.get(group[0], {}) if group else {}
    odd = [name for name in group if hypers.get(name, {}) != first]
    if odd:
        raise UsageError("parameters of one group have different settings", found=", ".join([group[0], *odd[:5]]))
    return {**first, "params": list(group)}


def is_flattened(keys: Iterable[Hashable]) -> bool:
    """Return True if all keys, and at least one, have the flattened form."""
    kinds = {str(key).partition(".")[:2] for key in keys}
    return bool(kinds) and kinds <= {(STATE, "."), (GROUPS, ".")}


def split_keys(
    flat: Mapping[str, V], is_param: Callable[[str], bool]
) -> tuple[dict[str, dict[str, V]], dict[str, dict[str, V]]]:
    """Split a flattened state into slots and settings, by name."""
    parts: dict[str, dict[str, dict[str, V]]] = {STATE: {}, GROUPS: {}}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        if kind not in parts:
            raise UsageError("a key does not fit a flattened optimizer state", found=key)
        name, slot = split_key(rest, is_param)
        parts[kind].setdefault(name, {})[slot] = value
    return parts[STATE], parts[GROUPS]


def split_key(key: str, is_param: Callable[[str], bool]) -> tuple[str, str]:
    """Split `{name}.{slot}` after the longest known parameter name, else at the last dot."""
    at = len(key)
    while (at := key.rfind(".", 0, at)) > 0:
        if is_param(key[:at]):
            return key[:at], key[at + 1 :]
    name, _, slot = key.rpartition(".")
    return name, slot


def to_paths(state: Mapping[str, Any]) -> dict[Path, Any]:
    """Return a nested state by paths; the groups stay one list."""
    paths: dict[Path, Any] = {(STATE, key, slot): v for key, row in state[STATE].items() for slot, v in row.items()}
    return {**(paths or {(STATE,): {}}), (GROUPS,): state[GROUPS]}


def from_paths(tensors: Mapping[Path, V], values: Mapping[Path, object], *, has_lists: bool = False) -> Nested:
    """Return the nested state for values by paths."""
    slots: dict[Key, dict[str, Any]] = {}
    nested = unflatten({path[1:]: value for path, value in values.items() if path[:1] == (STATE,)})
    for key, row in nested.items() if isinstance(nested, dict) else ():
        for slot, value in row.items() if isinstance(row, dict) else ():
            slots.setdefault(key, {})[str(slot)] = value
    for path, tensor in tensors.items():
        if path[:1] == (STATE,) and len(path) >= 3:
            # Nested tensors become one slot each, with dots in its name.
            row, slot = slots.setdefault(path[1], {}), dotted(path[2:])
            if slot in row:
                raise FormatError("two values of an optimizer would get one name", where=dotted(path))
            row[slot] = tensor
        elif path[:1] != (GROUPS,):
            raise FormatError("not a place for optimizer state", where=dotted(path), expected="state.<name>.<slot>")
    groups = _list_groups({path[1:]: v for path, v in values.items() if path[:1] == (GROUPS,)}, has_lists=has_lists)
    params = list(_iter_params(groups))
    require_keys(slots, STATE)
    # torch's planner stores ids as text.
    if any(type(key) is int for key in params) and all(map(_is_digits, slots)):
        slots = {int(key): row for key, row in slots.items()}
    return {STATE: slots, GROUPS: groups}


def _list_groups(values: Mapping[Path, object], *, has_lists: bool) -> list[dict[str, Any]]:
    groups = unflatten(values, has_lists=has_lists)
    if isinstance(groups, dict):
        require_keys(groups, GROUPS)
        groups = [groups[key] for key in sorted(groups, key=lambda k: (isinstance(k, str), k))]
    if groups is not None and not (isinstance(groups, (list, tuple)) and all(isinstance(g, dict) for g in groups)):
        raise FormatError("`param_groups` must be a list of dicts", found=type(groups).__name__)
    for group in groups or ():
        params = group.get("params", [])
        if not isinstance(params, (list, tuple)) or not all(type(p) in (int, str) for p in params):
            raise FormatError("`params` of a param group must be a list of names or ids", found=params)
    return [dict(group) for group in groups or ()]


def require_keys(keys: Iterable[object], where: str) -> None:
    """Require that every key is a name or an id."""
    for key in keys:
        if type(key) not in (int, str):
            raise FormatError(f"a key in `{where}` must be a name or an id", found=key)


def _iter_params(groups: Iterable[Mapping[str, Any]]) -> Iterable[Key]:
    return (key for group in groups for key in group.get("params", ()))


def _is_digits(key: Key) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _MAX_DIGITS


_STEP = "step"

_W = TypeVar("_W")
_Rows = Mapping[str, Mapping[str, V]]  # name to slot to value


@dataclass(frozen=True)
class FlatUnit:
    """A flat parameter with its members.

    Attributes:
        name: The flat parameter's name.
        layout: Its members' layout over ranks, with their names in the unsharded model.
    """

    name: str
    layout: FlatLayout

    @property
    def names(self) -> list[str]:
        """The members' first names."""
        return [spec.name for spec in self.layout.specs]

    def note(self, rank: int) -> dict[str, Any]:
        """Return the unit's entry for the metadata in a rank's LOCAL state."""
        entries = [
            {"name": s.name, "aliases": list(s.aliases), "shape": list(s.shape), "dtype": s.dtype}
            for s in self.layout.specs
        ]
        return {"entries": entries, "layout": self.layout.to_json(), "place": rank, "flat": self.name}

    def resized(self, world: int) -> FlatUnit:
        """Return the unit for another number of ranks."""
        return replace(self, layout=self.layout.with_world(world))


def pack_state(
    state: Mapping[str, Any], units: Sequence[FlatUnit], pack: Callable[[FlatUnit, str, dict[str, Any]], Any]
) -> tuple[Nested, dict[str, list[str]]]:
    """Convert a nested state to flat parameters; also return the slots that some members lack."""
    match_settings([unit.names for unit in units], state[GROUPS])
    slots, missing = _pack_slots(state[STATE], units, pack)
    return {**state, STATE: slots, GROUPS: _pack_groups(state[GROUPS], units)}, missing


def _pack_slots(
    rows: _Rows[V], units: Sequence[FlatUnit], pack: Callable[[FlatUnit, str, dict[str, V]], _W]
) -> tuple[dict[str, Mapping[str, V | _W]], dict[str, list[str]]]:
    """Pack the members' slots, like `pack_state`."""
    unit_of = {name: unit for unit in units for name in unit.names}
    packed: dict[str, Mapping[str, V | _W]] = {}
    missing: dict[str, list[str]] = {}
    for name, slots in rows.items():
        unit = unit_of.get(name)
        if unit is None:
            packed[name] = slots
        elif unit.name not in packed:
            members = {member: rows.get(member, {}) for member in unit.names}
            values = {slot: _pick_slot(members, slot) for slot in dict.fromkeys(chain.from_iterable(members.values()))}
            packed[unit.name] = {slot: pack(unit, slot, row) for slot, row in values.items()}
            lacking = {member: [slot for slot in values if slot not in row] for member, row in members.items()}
            missing |= {member: lost for member, lost in lacking.items() if lost}
    return packed, missing


def _pick_slot(rows: _Rows[V], slot: str) -> dict[str, V]:
    """Return one slot's values, by name."""
    return {name: row[slot] for name, row in rows.items() if slot in row}


def _pack_groups(groups: Sequence[Mapping[str, Any]], units: Sequence[FlatUnit]) -> list[dict[str, Any]]:
    # A flat parameter is in the first group that has a member.
    flat_of = {name: unit.name for unit in units for name in unit.names}
    seen: set[str] = set()
    packed = []
    for group in groups:
        names = dict.fromkeys(flat_of.get(name, name) for name in group["params"])
        packed.append({**settings(group), "params": [name for name in names if name not in seen]})
        seen |= set(names)
    return packed


def split_slots(
    rows: _Rows[V], units: Iterable[FlatUnit], split: Callable[[FlatUnit, str, V], Mapping[str, _W]]
) -> dict[str, dict[str, V | _W]]:
    """Split flat parameters' slots for their members; keep other parameters."""
    unit_of = {unit.name: unit for unit in units}
    members: dict[str, dict[str, V | _W]] = {}
    for name, slots in rows.items():
        if name not in unit_of:
            members[name] = dict(slots)
            continue
        for slot, value in slots.items():
            for member, part in split(unit_of[name], slot, value).items():
                members.setdefault(member, {})[slot] = part
    return members


def split_groups(groups: Sequence[Mapping[str, Any]], units: Sequence[FlatUnit]) -> list[dict[str, Any]]:
    """Replace each flat parameter in groups by its members."""
    names = {unit.name: unit.names for unit in units}
    return [{**g, "params": [member for name in g["params"] for member in names.get(name, [name])]} for g in groups]


def has_scalars(specs: Sequence[ParamSpec], slot: str, shapes: Mapping[str, Sequence[int] | None]) -> bool:
    """Return True if a slot holds scalars."""
    if slot == _STEP or None in shapes.values():
        return True
    # A 0-dim parameter has scalars anyway, so its shape proves nothing.
    return any(spec.shape and not shapes[spec.name] for spec in specs if spec.name in shapes)
