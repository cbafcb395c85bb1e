"""Pipeline stages: trees of which each rank has a part, merged by name, and names that two stages use differently."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardckpt.boxes import intersect
from shardckpt.checkpoint.planning.rank_report import RankReport, RankSubtree, digest_tree, digest_values
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan
from shardckpt.checkpoint.stateful.flatten import FlattenedState, encoded
from shardckpt.encodings.tagged_json import path_key
from shardckpt.errors import UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.manifest import Path, dotted
from shardckpt.plan.layout.write_plan import NAME_STAGES, LocalTensor
from shardckpt.plan.optim.param_groups import merge_groups, settings
from shardckpt.readers.opened.state_tree import TensorRef, iter_refs

_FIX = f"{NAME_STAGES} To keep each rank's own, use shardckpt.PerRank."


@dataclass(frozen=True)
class MergedState:
    """A state on rank 0 with the parts of all ranks."""

    flattened: FlattenedState
    stages: tuple[int, ...]  # for each rank the lowest one with the same names
    is_like_own: bool  # whether rank 0 has every plain value itself, at the same place


def remove_parts(flattened: FlattenedState) -> FlattenedState:
    """Return a state with an empty dict in place of what ranks may have in part."""
    tree = flattened.tree
    for path in flattened.parts:
        tree = _put(tree, path, {})
    return replace(flattened, tree=tree)


def add_parts(report: RankReport, flattened: FlattenedState) -> RankReport:
    """Return a report whose digest of values leaves out what ranks may have in part, which it has by path."""
    parts = {path: RankSubtree.encode(_at(flattened.tree, path), path) for path in flattened.parts}
    rest = digest_values(remove_parts(flattened))
    return replace(report, values=digest_tree([rest, sorted(map(repr, parts))]), parts=parts)


def merge_parts(
    flattened: FlattenedState, reports: Sequence[RankReport], in_order: Sequence[RankReport]
) -> MergedState:
    """Merge the ranks' parts into rank 0's state, which has the same paths of parts.

    `in_order` has the reports in the order in which the stages follow each other.
    """
    tree, slots, ties = flattened.tree, dict(flattened.slots), dict(flattened.ties)
    is_like_own = True
    for path in flattened.parts:
        parts = [report.parts[path].decode() for report in in_order]
        root = (*path, "state")
        if root in slots:
            groups = _merge_groups([part["param_groups"] for part in parts], path)
            is_like_own &= all(_settings(part["param_groups"]) == _settings(groups) for part in parts)
            slots[root] = tuple(name for group in groups for name in group["params"])
            merged: Any = {
                "state": {},
                "param_groups": [_tie(group, (*path, "param_groups", at), ties) for at, group in enumerate(groups)],
            }
        else:
            _warn_of_subset([set(part) for part in parts], path)
            merged = parts[0]
            for rank, part in enumerate(parts[1:], 1):
                merged = _merge(merged, part, path, rank)
        tree = _put(tree, path, merged)
    stages = _find_stages(reports)
    return MergedState(replace(flattened, tree=tree, slots=slots, ties=ties), stages, is_like_own)


def _warn_of_subset(names: Sequence[set[Any]], path: Path) -> None:
    """Warn if a rank has some of another rank's names and none of its own, as if it had lost a layer."""
    for rank, own in enumerate(names):
        larger = next((other for other, held in enumerate(names) if own and own < held), None)
        if larger is not None:
            lacking = sorted(map(str, names[larger] - own))
            warn_user(
                f"rank {rank} lacks {dotted((*path, lacking[0]))} (one of {len(lacking)} names), and rank {larger} has"
                " all its names: it is saved as a pipeline stage. If this is wrong, build the same model on all ranks."
            )
            return


def _find_stages(reports: Sequence[RankReport]) -> tuple[int, ...]:
    firsts: dict[str, int] = {}
    for rank, report in enumerate(reports):
        firsts.setdefault(_digest_names(report), rank)
    return tuple(firsts[_digest_names(report)] for report in reports)


def _digest_names(report: RankReport) -> str:
    return digest_tree([[list(path), part.json] for path, part in sorted(report.parts.items(), key=repr)])


def _merge_groups(lists: Sequence[Any], path: Path) -> list[dict[str, Any]]:
    if any(iter_refs(list(lists))):
        # Groups with tensors stay at their index, where a rank has these; others follow behind all ranks' indices.
        longest: list[Any] = []
        for groups in lists:
            longest += ({**group, "params": []} for group in groups[len(longest) :])
        lists = [longest, *lists]
    merged = merge_groups(lists)
    if merged is None:
        raise UsageError(
            "optimizers of different ranks have one parameter with different settings",
            where=dotted((*path, "param_groups")),
            fix=_FIX,
        )
    return merged


def _tie(group: dict[str, Any], place: Path, ties: dict[Path, Path]) -> dict[str, Any]:
    """Return a group for another index; its tensors are tied to what a rank has at its own index."""
    for ref in [*iter_refs(group)]:
        rest = ref.path[len(place) :]
        moved = (*place, *rest)
        if moved != ref.path:
            ties[moved] = ref.path
            group = _put(group, rest, TensorRef(moved, ref.kind))
    return group


def _settings(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [settings(group) for group in groups]


def _merge(one: Any, other: Any, path: Path, rank: int) -> Any:
    """Return the union of two trees by name."""
    if isinstance(one, dict) and type(one) is type(other):
        merged = copy.copy(one)
        for key, value in other.items():
            merged[key] = _merge(one[key], value, (*path, key), rank) if key in one else value
        return merged
    if digest_tree(_encode(one, path)) != digest_tree(_encode(other, path)):
        raise UsageError(
            "ranks have different values under one name", where=dotted(path), found=f"on rank {rank}", fix=_FIX
        )
    return one


def _encode(tree: Any, path: Path) -> object:
    return encoded(tree, lambda _: 0, path)


def require_comparable(local_plans: Sequence[LocalSavePlan], merged: MergedState, *, checksums: bool) -> bool:
    """Require that arrays of several stages can be compared: they have one shape and equal shards.

    Returns:
        Whether there are such arrays.
    """
    found: dict[Path, dict[int, tuple[int, LocalTensor]]] = {}
    roots = set(merged.flattened.parts)
    for rank, (stage, plan) in enumerate(zip(merged.stages, local_plans, strict=True)):
        for tensor in plan.arrays:
            if any(tensor.path[:n] in roots for n in range(len(tensor.path))):
                _require_same(found.setdefault(tensor.path, {}), stage, rank, tensor, checksums=checksums)
    return any(len(stages) > 1 for stages in found.values())


def _require_same(
    known: dict[int, tuple[int, LocalTensor]], stage: int, rank: int, tensor: LocalTensor, *, checksums: bool
) -> None:
    """Compare a rank's shards of an array with other stages' shards."""
    for at, (first, other) in known.items():
        if at == stage:
            continue
        overlaps = {intersect(one, two) for one in tensor.boxes for two in other.boxes} - {None}
        is_alike = tensor[1:3] == other[1:3] and overlaps <= {*tensor.boxes} & {*other.boxes}
        if not is_alike or (overlaps and not checksums):
            found = [f"rank {n}: {each.dtype} {list(each.shape)}" for n, each in ((first, other), (rank, tensor))]
            raise UsageError(
                "stages on different ranks have tensors of one name"
                + ("" if not is_alike else ", which only a save with checksums=True compares"),
                where=dotted(tensor.path),
                found="; ".join(found),
                fix=_FIX,
            )
    known.setdefault(stage, (rank, tensor))


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[_find_key(tree, part)]
    return tree


def _put(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of a tree with another value at a path."""
    if not path:
        return value
    items = list(tree) if isinstance(tree, tuple) else copy.copy(tree)
    key = _find_key(items, path[0])
    items[key] = _put(items[key], path[1:], value)
    return tuple(items) if isinstance(tree, tuple) else items


def _find_key(tree: Any, part: str | int) -> Any:
    """Return a container's key for a part of a path."""
    return next(key for key in tree if path_key(key) == part) if isinstance(tree, dict) else part
