"""Reuse of the last plan and manifest for a state with other tensors and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from shardckpt.boxes import full_box
from shardckpt.checkpoint.planning.plan_cache import PlanCache
from shardckpt.checkpoint.planning.rank_report import ABOUT
from shardckpt.checkpoint.stateful.flatten import FlattenedState, encoded
from shardckpt.checkpoint.stateful.state_trace import StateTrace
from shardckpt.checkpoint.stateful.tensor_bytes import find_memory
from shardckpt.format.native.manifest_json import ManifestContents
from shardckpt.format.native.payload import PayloadChunk
from shardckpt.format.opened.state_tree import TensorRef
from shardckpt.manifest import Path
from shardckpt.state.local.local_shards import LocalShard, TensorShards


@dataclass(frozen=True)
class ValuePlace:
    """Location of a plain value in the tagged JSON of a state.

    Attributes:
        container: List or object that contains the value.
        key: Position or key of the value in the container.
    """

    container: Any
    key: Any


@dataclass(frozen=True)
class CachedSave:
    """Save of a single rank without its tensors, to repeat for similar states.

    Attributes:
        description: Description of the states that it fits.
        cache: Cached plan.
        contents: Manifest without files; each save replaces the values in it.
        model: Path of the first model; None without a model.
        places: Locations of the values, in the order of the trace.
        positions: Positions of the arrays in the traced tensors.
    """

    description: tuple[object, ...]
    cache: PlanCache
    contents: ManifestContents
    model: Path | None
    places: tuple[ValuePlace, ...]
    positions: Mapping[Path, int]

    def fits(self, trace: StateTrace) -> bool:
        """Return True if a state has the names, layouts and shared memory of this save."""
        return self.description == trace.description

    def build_contents(self, save: str, trace: StateTrace, custom_metadata: Mapping[str, str]) -> ManifestContents:
        """Return the manifest of a state, without its files and pieces.

        Args:
            save: Id of the save.
            trace: Trace of a state that fits.
            custom_metadata: Free text by name.

        Raises:
            UnsupportedError: A value cannot be saved.
        """
        values = [_encode(value, path) for path, value in trace.values]
        for place, value in zip(self.places, values, strict=True):
            place.container[place.key] = value
        return replace(self.contents, save=save, about={**ABOUT, **custom_metadata})


class TracedState:
    """State that fits a cached save, without copies: valid until the state changes.

    Args:
        cached_save: Cached save that the state fits.
        trace: Trace of the state.
    """

    def __init__(self, cached_save: CachedSave, trace: StateTrace) -> None:
        self._cached_save, self._tensors = cached_save, trace.tensors
        self.model = cached_save.model
        self.ties = cached_save.cache.plan.ties

    def views(self, chunks: Sequence[PayloadChunk]) -> Iterable[torch.Tensor]:
        """Return the elements of chunks, each of which is a complete array."""
        tensors, positions = self._tensors, self._cached_save.positions
        return [tensors[positions[chunk.path]] for chunk in chunks]

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the tensors."""
        return {tensor.device for tensor in self._tensors}

    @cached_property
    def arrays(self) -> dict[Path, TensorShards]:
        """Arrays by path, in the order of the state."""
        arrays = {}
        for path, at in self._cached_save.positions.items():
            tensor = self._tensors[at].detach()
            shape = tuple(tensor.shape)
            arrays[path] = TensorShards(shape, tensor.dtype, (LocalShard(full_box(shape), tensor),))
        return arrays


def cache_save(
    trace: StateTrace, flattened: FlattenedState, cache: PlanCache, contents: ManifestContents
) -> CachedSave | None:
    """Return a cached save; None if a trace is not sufficient to save the state again.

    Args:
        trace: Trace of the state.
        flattened: Flattened state.
        cache: Plan of the save.
        contents: Manifest of the save, without files.
    """
    if flattened.per_rank_values or flattened.optional_values or cache.plan.frozen:
        return None
    positions = _find_positions(trace, flattened.arrays)
    places = _find_places(trace, contents.tree)
    if positions is None or places is None:
        return None
    return CachedSave(trace.description, cache, contents, flattened.model, places, positions)


def _find_positions(trace: StateTrace, arrays: Mapping[Path, TensorShards]) -> dict[Path, int] | None:
    """Return the position of each array's tensor; None if one is a view or a copy."""
    known = {find_memory(tensor): at for at, tensor in enumerate(trace.tensors)}
    positions = {}
    for path, array in arrays.items():
        if len(array.shards) != 1 or array.shards[0].box != full_box(array.shape):
            return None
        at = known.get(find_memory(array.shards[0].tensor))
        if at is None:
            return None
        positions[path] = at
    return positions


def _find_places(trace: StateTrace, tree: object) -> tuple[ValuePlace, ...] | None:
    """Return the locations of the values in tagged JSON; None if one is not found."""
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
    def refuse(ref: TensorRef) -> int:
        raise AssertionError(f"{ref} cannot be a value")

    return encoded(value, refuse, path)
