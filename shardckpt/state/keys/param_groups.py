"""Hyper-parameters by name: a group's settings follow its parameters, whatever group they are in now."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardckpt.errors import ShardckptError

NAMES = frozenset({"params", "param_names"})
"""What of a group is not a setting."""


class ConflictError(ShardckptError, ValueError):
    """Parameters that are in one group now were in groups with different settings."""


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's settings."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in NAMES}


def match_settings(live: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each live group, the settings that its parameters were saved with; empty where none was saved.

    Args:
        live: The names in each live group.
        saved: Groups with `params` as names.

    Raises:
        ConflictError: A live group draws from groups that disagree.
    """
    group_of = {name: at for at, group in enumerate(saved) for name in group["params"]}
    found = []
    for names in live:
        drawn: dict[int, list[str]] = {}
        for name in names:
            if name in group_of:
                drawn.setdefault(group_of[name], []).append(name)
        _agree(drawn, saved)
        found.append(settings(saved[next(iter(drawn))]) if drawn else {})
    return found


def _agree(drawn: Mapping[int, Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> None:
    sides = [(names, settings(saved[at])) for at, names in drawn.items()]
    for names, theirs in sides[1:]:
        first_names, first = sides[0]
        keys = [key for key in dict.fromkeys([*first, *theirs]) if not _equal(first.get(key), theirs.get(key))]
        if keys:
            raise ConflictError(
                "parameters of one group were saved with different settings",
                found="; ".join(
                    f"{key}={side.get(key)!r} of {_few(of)}"
                    for key in keys
                    for of, side in ((first_names, first), (names, theirs))
                ),
                fix="Group the optimizer's parameters as they were, or make the saved settings equal.",
            )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            bool(torch.as_tensor(one).eq(torch.as_tensor(other)).all())
            if one is not None and other is not None
            else False
        )
    return bool(one == other)
