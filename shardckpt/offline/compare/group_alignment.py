"""Align the param groups in two optimizers by parameter names, to compare settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardckpt.manifest import Path

_GROUPS, _PARAMS = "param_groups", "params"


@dataclass(frozen=True, slots=True)
class Groups:
    """One optimizer's param groups."""

    settings: Sequence[Mapping[str, object]]  # without `params`
    members: Sequence[Sequence[str]]  # parameter names
    are_stored: bool = True  # False: parameters with equal settings form a group


def index_groups(groups: Sequence[Mapping[str, object]], *, are_stored: bool) -> Groups:
    """Separate names and settings in an optimizer's groups."""
    settings = [{key: value for key, value in group.items() if key != _PARAMS} for group in groups]
    members = [group.get(_PARAMS, ()) for group in groups]
    return Groups(settings, [m if isinstance(m, (list, tuple)) else () for m in members], are_stored)


NO_GROUPS = Groups((), (), are_stored=False)


def align(a: Groups, b: Groups) -> tuple[dict[Path, object], dict[Path, object]]:
    """Return the settings of both under common paths for the same parameters."""
    # A cell is a set of parameters that share a group in both; the order in a group does not count.
    in_a, in_b = _home(a), _home(b)
    cells: dict[tuple[int | None, int | None], str] = {}
    for name in (*in_a, *in_b):
        cells.setdefault((in_a.get(name), in_b.get(name)), name)
    empty = [[i for i, members in enumerate(side.members) if not members] for side in (a, b)]
    for place in range(max(map(len, empty))):
        pair = tuple(row[place] if place < len(row) else None for row in empty)
        cells[pair[0], pair[1]] = ""
    # With equal groups the key is the number in `a`, else the first parameter in the cell.
    are_alike = all(_are_different([cell[side] for cell in cells]) for side in (0, 1))
    made: tuple[dict[Path, object], dict[Path, object]] = ({}, {})
    for (i, j), first in cells.items():
        key = (i if i is not None else j) if are_alike or not first else first
        assert key is not None, "a cell belongs to at least one group"
        for number, side, out in ((i, a, made[0]), (j, b, made[1])):
            if number is not None:
                out.update({(_GROUPS, key, name): value for name, value in side.settings[number].items()})
    if not are_alike and a.are_stored and b.are_stored:
        for side, out in zip((a, b), made, strict=True):
            out[_GROUPS, "members"] = sorted(", ".join(sorted(members)) for members in side.members)
    return made


def _home(groups: Groups) -> dict[str, int]:
    return {name: number for number, members in enumerate(groups.members) for name in members}


def _are_different(numbers: Sequence[int | None]) -> bool:
    known = [number for number in numbers if number is not None]
    return len(set(known)) == len(known)
