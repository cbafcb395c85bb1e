"""Build the manifest of a save from the reports of all ranks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardckpt.checkpoint.planning.rank_report import RankReport, sort_keys
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan
from shardckpt.checkpoint.stateful.flatten import FlattenedState, TensorRef, encoded
from shardckpt.errors import UsageError
from shardckpt.format.native.manifest_json import ManifestContents
from shardckpt.format.native.payload import encode_canonical
from shardckpt.format.native.records import ArrayRecord
from shardckpt.manifest import Path, dotted

ABOUT = {"writer": "shardckpt"}


def build_contents(
    save: str,
    flattened: FlattenedState,
    plan: GlobalSavePlan,
    reports: Sequence[RankReport],
    custom_metadata: Mapping[str, str],
) -> ManifestContents:
    """Return the manifest of a save, without its files and pieces.

    Args:
        save: The save's id.
        flattened: Rank 0's state; its tree is changed.
        plan: Which rank writes which chunks.
        reports: One for each rank.
        custom_metadata: Free text by name.

    Raises:
        UsageError: Ranks have different values of one thing.
        UnsupportedError: A value that cannot be saved.
    """
    tree = flattened.tree
    states = {root: _at(tree, root) for root in flattened.slots}
    for root, names in flattened.slots.items():
        states[root].update({name: {} for name in names})
    for path in (*plan.order, *plan.ties):
        if path[:-2] in states:
            states[path[:-2]][path[-2]][path[-1]] = TensorRef(path)
    for path, value in _merge_optional_values(reports).items():
        states[path[:-2]][path[-2]][path[-1]] = value
    for state in states.values():
        for name in [name for name, slots in state.items() if not slots]:
            del state[name]
    for rank, report in enumerate(reports):
        for path, each in report.per_rank_values.items():
            _at(tree, path)[rank] = each.decode()
    numbers = {path: at for at, path in enumerate(plan.order)}
    ties = {path: numbers[first] for path, first in plan.ties.items()}
    index = {**numbers, **ties}
    return ManifestContents(
        save,
        (),
        tuple(ArrayRecord(path, "", (), array("q")) for path in plan.order),
        encoded(tree, lambda each: index[each.path]),
        ties,
        {"world_size": len(reports)},
        {**ABOUT, **custom_metadata},
        variants=dict(flattened.variants),
    )


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _merge_optional_values(reports: Iterable[RankReport]) -> dict[Path, Any]:
    """Merge the values that a rank may lack; ranks that have one have the same."""
    found: dict[Path, Any] = {}
    seen: dict[Path, tuple[int, bytes]] = {}
    for rank, report in enumerate(reports):
        for path, each in report.optional_values.items():
            data = encode_canonical([sort_keys(each.json), [list(p) for p in each.arrays]])
            first, known = seen.setdefault(path, (rank, data))
            if known != data:
                raise UsageError(
                    f"`{dotted(path)}` differs between rank {first} and rank {rank}, which keep it of one parameter",
                    fix="Let all ranks step their optimizers alike, or load the same checkpoint on all.",
                )
            if path not in found:
                found[path] = each.decode()
    return found
