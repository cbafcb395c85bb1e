"""Reuse the last plan and manifest for a state with other tensors and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.boxes import Box, Shape
from shardckpt.checkpoint.planning.rank_report import ABOUT, RankReport, digest_tree
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, LocalSavePlan, RankSavePlan
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.checkpoint.stateful.state_trace import StateTrace
from shardckpt.checkpoint.stateful.stateful import to_named_value
from shardckpt.checkpoint.stateful.tensor_bytes import find_memory, view_box
from shardckpt.encodings.tagged_json import encode
from shardckpt.manifest import Path
from shardckpt.native.manifest_json import ManifestContents
from shardckpt.native.payload import PayloadChunk, encode_canonical
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards, get_tensor_shards


@dataclass(frozen=True)
class ValuePlace:
    """A plain value's location in a state's tagged JSON."""

    container: Any  # list or object that contains the value
    key: Any  # position or key of the value in the container


class CachedArray(NamedTuple):
    """An array's location in the traced tensors."""

    shape: Shape
    dtype: torch.dtype  # dtype of the elements
    position: int | None  # position of the tensor; None if this rank has no elements
    box: Box | None  # box of the array that the local tensor has; None if this rank has no elements


@dataclass(frozen=True)
class CachedSave:
    """Save without its tensors, on one rank, to repeat for similar states."""

    description: tuple[object, ...]  # description of the states that it fits
    rank: RankPlanCache  # plan of this rank, with the id of the save, which is the same on all ranks
    model: Path | None  # path of the first model; None without a model
    arrays: Mapping[Path, CachedArray]  # locations of the arrays
    manifest: CachedManifest | None  # plan of all ranks and manifest, on rank 0; None on other ranks

    def fits(self, trace: StateTrace) -> bool:
        """Return True if a state has this save's names, layouts and shared memory."""
        return self.description == trace.description


@dataclass(frozen=True)
class CachedManifest:
    """A save's manifest and plan."""

    cache: PlanCache  # plan of all ranks
    contents: ManifestContents  # manifest without files; each save replaces the values in it
    places: tuple[ValuePlace, ...]  # locations of the values, in the order of the trace

    def build_contents(self, save: str, trace: StateTrace, custom_metadata: Mapping[str, str]) -> ManifestContents:
        """Return a state's manifest, without files and pieces."""
        values = [_encode(value, path) for path, value in trace.values]
        for place, value in zip(self.places, values, strict=True):
            place.container[place.key] = value
        return replace(self.contents, save=save, about={**ABOUT, **custom_metadata})


def digest_traced_values(trace: StateTrace) -> str:
    """Return a digest of a trace's values, independent of dict and set order."""
    # Ranks whose traces fit one save have equal values if and only if they have equal digests.
    rows = [[list(path), _encode(value, path)] for path, value in trace.values]
    return digest_tree(sorted(rows, key=lambda row: encode_canonical(row[0])))


class TracedState:
    """State that fits a cached save, without copies: valid until the state changes."""

    def __init__(self, cached_save: CachedSave, trace: StateTrace) -> None:
        self._cached_save, self._tensors = cached_save, trace.local_tensors
        self.model = cached_save.model
        self.rank_plan = cached_save.rank.rank_plan
        self.ties = cached_save.rank.local_plan.ties

    def views(self, chunks: Sequence[PayloadChunk]) -> Iterable[torch.Tensor]:
        """Return the elements of chunks, as views of this rank's tensors."""
        tensors, arrays = self._tensors, self._cached_save.arrays
        views = []
        for chunk in chunks:
            _, _, position, box = arrays[chunk.path]
            if position is not None and box == chunk.box:
                views.append(tensors[position])
            else:
                views.append(view_box(self.arrays[chunk.path], chunk.box))
        return views

    @property
    def devices(self) -> set[torch.device]:
        """The tensors' devices."""
        return {tensor.device for tensor in self._tensors}

    @cached_property
    def arrays(self) -> dict[Path, TensorShards]:
        """Arrays by path, in state order."""
        arrays = {}
        for path, (shape, dtype, position, box) in self._cached_save.arrays.items():
            if position is None or box is None:
                arrays[path] = TensorShards(shape, dtype, ())
            else:
                arrays[path] = TensorShards(shape, dtype, (LocalShard(box, self._tensors[position].detach()),))
        return arrays


def cache_save(
    rank: RankPlanCache,
    trace: StateTrace,
    flattened: FlattenedState,
    cache: PlanCache | None,
    contents: ManifestContents | None,
) -> CachedSave | None:
    """Return a cached save; None if a trace is not sufficient to save the state again."""
    # In a state with a trace every rank has all values, and all parameters are written.
    arrays = _find_arrays(trace, flattened.arrays)
    if arrays is None:
        return None
    manifest = None
    if cache is not None and contents is not None:
        places = _find_places(trace, contents.tree)
        if places is None:
            return None
        manifest = CachedManifest(cache, contents, places)
    return CachedSave(trace.description, rank, flattened.model, arrays, manifest)


def _find_arrays(trace: StateTrace, arrays: Mapping[Path, TensorShards]) -> dict[Path, CachedArray] | None:
    """Return where each array is; None if one is not exactly a traced tensor with the same layout."""
    known = {find_memory(tensor): at for at, tensor in enumerate(trace.local_tensors)}
    sharded = {(tuple(tensor.shape), tensor.dtype) for tensor in trace.tensors if type(tensor) is DTensor}
    found = {}
    for path, (shape, dtype, shards) in arrays.items():
        if not shards and (shape, dtype) in sharded:
            found[path] = CachedArray(shape, dtype, None, None)
            continue
        at = known.get(find_memory(shards[0].tensor)) if len(shards) == 1 else None
        if at is None or not _is_same_layout(get_tensor_shards(trace.tensors[at]), shape, dtype, shards[0].box):
            return None
        found[path] = CachedArray(shape, dtype, at, shards[0].box)
    return found


def _is_same_layout(traced: TensorShards, shape: Shape, dtype: torch.dtype, box: Box) -> bool:
    return (traced.shape, traced.dtype, [shard.box for shard in traced.shards]) == (shape, dtype, [box])


def _find_places(trace: StateTrace, tree: object) -> tuple[ValuePlace, ...] | None:
    """Return where the values are in tagged JSON; None if one is not found."""
    places = []
    for path, value in trace.values:
        place = _find_place(tree, path)
        if place is None or place.container[place.key] != _encode(value, path):
            return None
        places.append(place)
    return tuple(places)


def _find_place(tree: Any, path: Path) -> ValuePlace | None:
    place = None
    for key in path:
        if place is not None:
            tree = place.container[place.key]
        if type(tree) is dict and len(tree) == 1 and next(iter(tree)).startswith("$"):
            ((tag, tree),) = tree.items()
            if tag in ("$dict", "$ordered"):
                pair = next((pair for pair in tree if pair[0] == key), None)
                if pair is None:
                    return None
                place = ValuePlace(pair, 1)
                continue
            if tag != "$tuple":
                return None
        place = ValuePlace(tree, key)
    return place


def _encode(value: object, path: Path) -> object:
    return encode(value, path, lambda value, _: to_named_value(value))


@dataclass(frozen=True)
class RankPlanCache:
    """One rank's last committed plan."""

    save: str  # id of the save with this plan
    local_plan: LocalSavePlan  # arrays of this rank in that save
    rank_plan: RankSavePlan  # chunks that this rank wrote


@dataclass(frozen=True)
class PlanCache:
    """The last committed plan for all ranks, on rank 0."""

    save: str  # id of the save with this plan
    local_plans: tuple[LocalSavePlan, ...]  # arrays of each rank in that save, in rank order
    plan: GlobalSavePlan  # chunks that each rank wrote


def is_cached(reports: Sequence[RankReport], cache: PlanCache | None) -> bool:
    """Return True if every rank has the cached plan's arrays, and its own part cached."""
    return cache is not None and all(not report.local_plan and report.cached == cache.save for report in reports)


def collect_local_plans(reports: Sequence[RankReport], cache: PlanCache | None) -> tuple[LocalSavePlan, ...] | None:
    """Return all ranks' local plans, received or cached; None if one is neither."""
    local_plans = []
    for rank, report in enumerate(reports):
        if report.local_plan:
            local_plans.append(LocalSavePlan.decode(report.local_plan))
        elif cache is not None and report.cached == cache.save:
            local_plans.append(cache.local_plans[rank])
        else:
            return None
    return tuple(local_plans)
