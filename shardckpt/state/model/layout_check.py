"""Check that a LOCAL state belongs to this rank and to the same units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.state.adapters.model_index import ModelIndex
from shardckpt.state.keys.kinds import StateKind
from shardckpt.state.model.model_state_dict import units_metadata, world


def check_kind(note: Mapping[str, Any], kind: StateKind) -> list[str]:
    """Return a problem if a state is LOCAL and should not be, or the reverse."""
    saved_kind = note.get("kind", kind.name)
    if saved_kind == kind.name or StateKind.LOCAL.name not in (saved_kind, kind.name):
        return []
    return [f"kind mismatch: it was taken as {saved_kind}, not as {kind.name}"]


def check_rank(note: Mapping[str, Any]) -> list[str]:
    """Return a problem if another rank saved a LOCAL state."""
    group = world()
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
