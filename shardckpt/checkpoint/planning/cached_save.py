"""Reuse the plan and manifest of a committed save for a state with other tensors and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.boxes import Box, Shape
from shardckpt.checkpoint.planning.rank_report import ABOUT, RankReport, digest_tree
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, LocalSavePlan, RankSavePlan
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.checkpoint.stateful.state_trace import StateTrace, StructureKey
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
class CachedManifest:
    """A save's manifest, whose values each later save replaces."""

    contents: ManifestContents  # without files
    places: tuple[ValuePlace, ...]  # locations of the values, in the order of the trace

    def build_contents(self, save: str, trace: StateTrace, custom_metadata: Mapping[str, str]) -> ManifestContents:
        """Return a state's manifest, without files and pieces."""
        values = [_encode(value, path) for path, value in trace.values]
        for place, value in zip(self.places, values, strict=True):
            place.container[place.key] = value
        return replace(self.contents, save=save, about={**ABOUT, **custom_metadata})


@dataclass(frozen=True)
class CachedSave:
    """Committed save without its tensors, on one rank, to repeat for similar states."""

    save: str  # id, which is the same on all ranks
    key: StructureKey | LocalSavePlan  # structure of the states that it fits; those without a trace have a plan alone
    local_plan: LocalSavePlan
    rank_plan: RankSavePlan
    plan: GlobalSavePlan | None  # on rank 0
    model: Path | None = None  # path of the first model; None without a model
    arrays: Mapping[Path, CachedArray] = field(default_factory=dict)  # locations of the arrays in a trace
    manifest: CachedManifest | None = None  # on rank 0, for states with a trace


def digest_traced_values(trace: StateTrace) -> str:
    """Return a digest of a trace's values, independent of dict and set order."""
    # Ranks whose traces fit one save have equal values if and only if they have equal digests.
    rows = [[list(path), _encode(value, path)] for path, value in trace.values]
    return digest_tree(sorted(rows, key=lambda row: encode_canonical(row[0])))


class TracedState:
    """State that fits a cached save, without copies: valid until the state changes."""

    def __init__(self, cached_save: CachedSave, trace: StateTrace) -> None:
        self.cached_save, self.trace, self._tensors = cached_save, trace, trace.local_tensors
        self.model, self.ties = cached_save.model, cached_save.local_plan.ties

    def views(self, chunks: Sequence[PayloadChunk]) -> Iterable[torch.Tensor]:
        """Return the elements of chunks, as views of this rank's tensors."""
        tensors, arrays = self._tensors, self.cached_save.arrays
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
        for path, (shape, dtype, position, box) in self.cached_save.arrays.items():
            if position is None or box is None:
                arrays[path] = TensorShards(shape, dtype, ())
            else:
                arrays[path] = TensorShards(shape, dtype, (LocalShard(box, self._tensors[position].detach()),))
        return arrays


def add_trace(
    cached: CachedSave, trace: StateTrace | None, flattened: FlattenedState, contents: ManifestContents | None
) -> CachedSave:
    """Return a save that fits all states with a trace's key, if the trace is sufficient to save them."""
    # In a state with a trace every rank has all values, and all parameters are written.
    if trace is None or (arrays := _find_arrays(trace, flattened.arrays)) is None:
        return cached
    cached = replace(cached, key=trace.key, model=flattened.model, arrays=arrays)
    if contents is None:
        return cached
    places = _find_places(trace, contents.tree)
    if places is None:
        return replace(cached, key=cached.local_plan)
    return replace(cached, manifest=CachedManifest(contents, places))


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


def find_cached(reports: Sequence[RankReport], saves: Iterable[CachedSave]) -> CachedSave | None:
    """Return the save whose plan every rank has cached; None if some rank has other arrays."""
    ids = {report.cached for report in reports}
    return next((each for each in saves if ids == {each.save}), None)


def collect_local_plans(reports: Sequence[RankReport], saves: Iterable[CachedSave]) -> tuple[LocalSavePlan, ...] | None:
    """Return all ranks' local plans, received or cached; None if one is neither."""
    plans = {each.save: each.plan for each in saves}
    local_plans = []
    for rank, report in enumerate(reports):
        plan = plans.get(report.cached)
        if report.local_plan:
            local_plans.append(LocalSavePlan.decode(report.local_plan))
        elif plan is not None:
            local_plans.append(plan.local_plans[rank])
        else:
            return None
    return tuple(local_plans)
