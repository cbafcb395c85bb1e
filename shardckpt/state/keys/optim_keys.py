"""Other keys for the same optimizer state: numbers for names, flattened for nested. Pure; nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardckpt.errors import ShardckptError, UsageError
from shardckpt.state.keys.param_groups import NAMES, match_settings, settings


class MixedKeysError(ShardckptError, ValueError):
    """A state has numbers and names for keys, or names twice."""


def get_key_type(state: Mapping[str, Any]) -> type | None:
    """Return whether parameters have numbers (`int`) or names (`str`) in an optimizer state; None in an empty one.

    Raises:
        MixedKeysError: Some have numbers and some have names.
    """
    kinds = {type(key) for key in state.get("state", {})}
    kinds |= {type(key) for group in state.get("param_groups", ()) for key in group["params"]}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise MixedKeysError(
            "the keys of an optimizer state are neither all numbers nor all names",
            found=", ".join(sorted(kind.__name__ for kind in kinds)),
        )
    return next(iter(kinds), None)


def to_names(state: Mapping[str, Any], groups: Sequence[Sequence[str]] | None = None) -> dict[str, Any]:
    """Return an optimizer state with names for keys.

    Args:
        state: `{"state": {number: ...}, "param_groups": [...]}`, or one that has names already.
        groups: The names in each group; None where the groups tell them as `param_names`.

    Raises:
        UsageError: Nobody tells the names, or there are more or fewer than parameters.
    """
    if get_key_type(state) is str:
        return dict(state)
    if groups is not None and len(groups) != len(state["param_groups"]):
        raise UsageError(
            "names are of another number of groups", found=len(groups), expected=len(state["param_groups"])
        )
    names: dict[int, str] = {}
    for index, group in enumerate(state["param_groups"]):
        told = groups[index] if groups is not None else group.get("param_names", ())
        if len(told) != len(group["params"]):
            raise UsageError(
                "the names of a group's parameters are not known",
                where=f"param_groups[{index}]",
                found=f"{len(told)} names",
                expected=f"{len(group['params'])}",
                fix="Pass the names in the order of the groups.",
            )
        names.update(zip(group["params"], told, strict=True))
    return _replace_keys(state, names)


def to_ids(state: Mapping[str, Any], groups: Sequence[Sequence[str]] | None = None) -> dict[str, Any]:
    """Return an optimizer state with numbers for keys, as `torch.optim.Optimizer.state_dict` has them.

    Args:
        state: One with names for keys.
        groups: The names in each group of the optimizer it is for; None to number them as they stand in the state.
            Settings follow the names; a group without names has those of a group without names.

    Raises:
        UsageError: A name of the state is in none of the groups.
        ConflictError: Names of one group were saved with different settings.
    """
    if get_key_type(state) is int:
        return dict(state)
    order = [name for group in (groups or [g["params"] for g in state["param_groups"]]) for name in group]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(order))}
    unknown = [name for name in state["state"] if name not in numbers]
    if unknown:
        raise UsageError("names of a state are in no group of the optimizer", found=", ".join(unknown[:10]))
    if groups is None:
        return _replace_keys(state, numbers)
    saved = state["param_groups"]
    empty = iter([settings(group) for group in saved if not group["params"]])
    changes = [
        change if names else next(empty, {})
        for change, names in zip(match_settings(groups, saved), groups, strict=True)
    ]
    made = [
        {**change, "params": [numbers[name] for name in names]} for change, names in zip(changes, groups, strict=True)
    ]
    return {**state, "state": {numbers[name]: slots for name, slots in state["state"].items()}, "param_groups": made}


def _replace_keys(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    groups = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [keys[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    return {**state, "state": {keys[key]: value for key, value in state["state"].items()}, "param_groups": groups}


def flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer state with one key a value: `state.{name}.{slot}` and `param_groups.{name}.{setting}`.

    Args:
        state: One with names for keys.

    Raises:
        UsageError: It has numbers for keys.
    """
    if get_key_type(state) is int:
        raise UsageError("a state with numbers for keys cannot be flattened", fix="Give it names first: to_names.")
    made = {f"state.{name}.{slot}": value for name, slots in state["state"].items() for slot, value in slots.items()}
    for group in state["param_groups"]:
        for name in group["params"]:
            for setting, value in group.items():
                if setting not in NAMES:
                    made[f"param_groups.{name}.{setting}"] = value
    return made


def nest(flat: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the optimizer state that `flatten` flattened.

    Args:
        flat: Its values.
        groups: The names in each group.

    Raises:
        UsageError: A key is of another form, or a group's parameters have different settings.
    """
    names = sorted({name for group in groups for name in group}, key=len, reverse=True)
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name = next((each for each in names if rest.startswith(f"{each}.")), None)
        if kind not in ("state", "param_groups") or name is None:
            raise UsageError("a key is not one of a flattened optimizer state", found=key)
        slot = rest[len(name) + 1 :]
        if kind == "state":
            state.setdefault(name, {})[slot] = value
        else:
            settings[name][slot] = value
    return {"state": state, "param_groups": [_join_settings(group, settings) for group in groups]}


def _join_settings(group: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    first = settings[group[0]] if group else {}
    odd = [name for name in group if dict(settings[name]) != dict(first)]
    if odd:
        raise UsageError("parameters of one group have different settings", found=", ".join([group[0], *odd[:5]]))
    return {**first, "params": list(group)}
