"""Param groups: parameters keep the settings with which they were saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from shardckpt.errors import UsageError

NAMES = frozenset({"params", "param_names"})  # a group's entries other than settings


class ConflictError(UsageError):
    """Parameters in one group were saved with different settings."""


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group's settings."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in NAMES}


def match_settings(live: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved settings for each live group; empty if no parameter was saved."""
    group_of = {name: at for at, group in enumerate(saved) for name in group["params"]}
    matches = []
    for names in live:
        sources: dict[int, list[str]] = {}
        for name in names:
            if name in group_of:
                sources.setdefault(group_of[name], []).append(name)
        _require_equal(sources, saved)
        matches.append(settings(saved[next(iter(sources))]) if sources else {})
    return matches


def group_by_settings(hypers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group parameters by equal settings, in the order of first members."""
    groups: dict[str, dict[str, Any]] = {}
    for name, values in hypers.items():
        groups.setdefault(repr(sorted(values.items())), {**values, "params": []})["params"].append(name)
    return list(groups.values())


def merge_groups(lists: Sequence[object]) -> list[dict[str, Any]] | None:
    """Merge several ranks' groups, such as pipeline stages'; None if they have ids or contradict each other."""
    merged: list[dict[str, Any]] = []
    for groups in lists:
        if not isinstance(groups, list | tuple) or not all(map(_has_names, groups)):
            return None  # ids count one rank's parameters
        known = dict(enumerate(merged))
        for index, group in enumerate(groups):
            # A group with the same index comes first, then any with the same settings.
            order = [at for at in (index, *known) if at in known]
            same = next((at for at in order if settings(known[at]) == settings(group)), None)
            if same is None:
                merged.append({**settings(group), "params": list(group["params"])})
            else:
                target = known.pop(same)
                target["params"] = list(dict.fromkeys([*target["params"], *group["params"]]))
    names = [name for group in merged for name in group["params"]]
    return merged if len(set(names)) == len(names) else None


def _has_names(group: object) -> bool:
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list | tuple) and all(isinstance(name, str) for name in params)


def read_param_names(groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return names by id, from groups that list them."""
    names: dict[int, str] = {}
    for group in groups:
        params, stored = group.get("params"), group.get("param_names")
        if isinstance(params, (list, tuple)) and isinstance(stored, (list, tuple)) and len(params) == len(stored):
            names |= {p: n for p, n in zip(params, stored, strict=True) if type(p) is int and isinstance(n, str)}
    return names


def _require_equal(sources: Mapping[int, Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> None:
    sides = [(names, settings(saved[at])) for at, names in sources.items()]
    for names, theirs in sides[1:]:
        first_names, first = sides[0]
        keys = [key for key in dict.fromkeys([*first, *theirs]) if not _is_equal(first.get(key), theirs.get(key))]
        if keys:
            raise ConflictError(
                "parameters of one group were saved with different settings",
                found="; ".join(
                    f"{key}={side.get(key)!r} of {_format_names(side_names)}"
                    for key in keys
                    for side_names, side in ((first_names, first), (names, theirs))
                ),
                fix="Group the optimizer's parameters as they were, or make the saved settings equal.",
            )


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_equal(one: Any, other: Any) -> bool:
    """Return True if two settings are equal; the learning rate may be a tensor."""
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
