"""From what all ranks told to the one nest that the manifest holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardckpt.checkpoint.planning.rank_report import Report, sort_keys
from shardckpt.checkpoint.planning.save_plan import Plan
from shardckpt.checkpoint.stateful.flatten import ArrayAt, Captured, encoded
from shardckpt.errors import UsageError
from shardckpt.format.native.manifest_json import ManifestContents
from shardckpt.format.native.payload import canonical
from shardckpt.format.native.records import ArrayRecord
from shardckpt.manifest import Path, dotted

ABOUT = {"writer": "shardckpt"}


def contents_of(
    save: str, captured: Captured, plan: Plan, reports: Sequence[Report], about: Mapping[str, str]
) -> ManifestContents:
    """Return the manifest of a save, without its files and pieces.

    Args:
        save: The save's id.
        captured: The first rank's; its nest is changed.
        plan: Who writes what.
        reports: What each rank told.
        about: Free text.

    Raises:
        UsageError: Ranks told different values of one thing.
        UnsupportedError: A value that cannot be saved.
    """
    nest = captured.nest
    states = {root: _at(nest, root) for root in captured.slots}
    for root, names in captured.slots.items():
        states[root].update({name: {} for name in names})
    for path in (*plan.order, *plan.ties):
        if path[:-2] in states:
            states[path[:-2]][path[-2]][path[-1]] = ArrayAt(path)
    for path, value in _loose(reports).items():
        states[path[:-2]][path[-2]][path[-1]] = value
    for state in states.values():
        for name in [name for name, slots in state.items() if not slots]:
            del state[name]
    for rank, report in enumerate(reports):
        for path, each in report.own.items():
            _at(nest, path)[rank] = each.nest()
    numbers = {path: at for at, path in enumerate(plan.order)}
    ties = {path: numbers[first] for path, first in plan.ties.items()}
    index = {**numbers, **ties}
    return ManifestContents(
        save,
        (),
        tuple(ArrayRecord(path, "", (), array("q")) for path in plan.order),
        encoded(nest, lambda each: index[each.path]),
        ties,
        {"world_size": len(reports)},
        {**ABOUT, **about},
        variants=dict(captured.variants),
    )


def _at(nest: Any, path: Path) -> Any:
    for key in path:
        nest = nest[key]
    return nest


def _loose(reports: Iterable[Report]) -> dict[Path, Any]:
    """Return what ranks told that others may lack; those that have it have the same."""
    found: dict[Path, Any] = {}
    told: dict[Path, tuple[int, bytes]] = {}
    for rank, report in enumerate(reports):
        for path, each in report.loose.items():
            data = canonical([sort_keys(each.json), [list(p) for p in each.arrays]])
            first, known = told.setdefault(path, (rank, data))
            if known != data:
                raise UsageError(
                    f"`{dotted(path)}` differs between rank {first} and rank {rank}, which keep it of one parameter",
                    fix="Let all ranks step their optimizers alike, or load the same checkpoint on all.",
                )
            if path not in found:
                found[path] = each.nest()
    return found
