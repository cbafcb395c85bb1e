"""Convert optimizer state between flat parameters and their members.

Generic over the values: the caller packs the members' values into one value, or splits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.plan.optim.optim_keys import GROUPS, STATE, Nested
from shardckpt.plan.optim.param_groups import match_settings, settings

STEP = "step"
V = TypeVar("V")
W = TypeVar("W")
Rows = Mapping[str, Mapping[str, V]]  # name to slot to value


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
    slots, missing = pack_slots(state[STATE], units, pack)
    return {**state, STATE: slots, GROUPS: _pack_groups(state[GROUPS], units)}, missing


def pack_slots(
    rows: Rows[V], units: Sequence[FlatUnit], pack: Callable[[FlatUnit, str, dict[str, V]], W]
) -> tuple[dict[str, Mapping[str, V | W]], dict[str, list[str]]]:
    """Pack the members' slots, like `pack_state`."""
    unit_of = {name: unit for unit in units for name in unit.names}
    packed: dict[str, Mapping[str, V | W]] = {}
    missing: dict[str, list[str]] = {}
    for name, slots in rows.items():
        unit = unit_of.get(name)
        if unit is None:
            packed[name] = slots
        elif unit.name not in packed:
            members = {member: rows.get(member, {}) for member in unit.names}
            values = {slot: pick_slot(members, slot) for slot in dict.fromkeys(chain.from_iterable(members.values()))}
            packed[unit.name] = {slot: pack(unit, slot, row) for slot, row in values.items()}
            lacking = {member: [slot for slot in values if slot not in row] for member, row in members.items()}
            missing |= {member: lost for member, lost in lacking.items() if lost}
    return packed, missing


def pick_slot(rows: Rows[V], slot: str) -> dict[str, V]:
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
    rows: Rows[V], units: Iterable[FlatUnit], split: Callable[[FlatUnit, str, V], Mapping[str, W]]
) -> dict[str, dict[str, V | W]]:
    """Split flat parameters' slots for their members; keep other parameters."""
    unit_of = {unit.name: unit for unit in units}
    members: dict[str, dict[str, V | W]] = {}
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
    if slot == STEP or None in shapes.values():
        return True
    # A 0-dim parameter has scalars anyway, so its shape proves nothing.
    return any(spec.shape and not shapes[spec.name] for spec in specs if spec.name in shapes)
