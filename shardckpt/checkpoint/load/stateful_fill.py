"""Load `Stateful` objects by filling the tensors in their current state.

A checkpoint has full tensors, but an object with a sharded model loads DTensors with its own sharding. Therefore the
tensors that its `state_dict()` returns are filled, each rank with its shard, and passed back in the saved tree.

A tensor is not filled if other saved elements fill its memory, such as a model's parameter that the object refers to
until it has its own values. Then the object gets a new tensor, as from `torch.load`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.load.load_plan import LoadItem, is_same_source
from shardckpt.checkpoint.stateful.flatten import view_as_dtensor
from shardckpt.checkpoint.stateful.stateful import dtype_name, has_memory
from shardckpt.checkpoint.stateful.walk import WITH_STATE, find_kind, require_depth, walk
from shardckpt.encodings.tagged_json import path_key
from shardckpt.manifest import Path, TensorEntry
from shardckpt.plan.subclass_record import find_record
from shardckpt.readers.opened.state_tree import TensorRef, iter_refs
from shardckpt.state.keys.kinds import is_sharded_tensor
from shardckpt.state.keys.slots import is_wrapper_subclass
from shardckpt.state.local.tensor_shards import LocalShard, get_tensor_shards

_MISSING = object()


class Fill(NamedTuple):
    """Tensor in an object's state to fill in place."""

    path: Path
    source: Path  # path in the checkpoint
    tensor: torch.Tensor  # tensor from `state_dict()`


class _Range(NamedTuple):
    """A target's memory: the address of its first byte, and the address after its last."""

    start: int
    end: int


class FilledMemory:
    """Memory that a load fills, with the saved array that fills each part."""

    def __init__(self, items: Iterable[LoadItem]) -> None:
        self._entries = {
            each: item.entry for item in items for shard in item.array.shards if (each := _get_range(shard)) is not None
        }
        self._disjoint = list(_merge(sorted(self._entries)))

    def add(self, tensor: torch.Tensor, entry: TensorEntry) -> bool:
        """Add a target; return False if another saved array fills some of its memory."""
        shards = get_tensor_shards(tensor).shards
        added = [each for shard in shards if (each := _get_range(shard)) is not None]
        added = [each for each in added if not self._is_filled_by(each, entry)]
        if any(self._is_filled(each) for each in added):
            return False
        for each in added:
            self._entries[each] = entry
            self._disjoint.insert(bisect_left(self._disjoint, each), each)
        return True

    def _is_filled_by(self, wanted: _Range, entry: TensorEntry) -> bool:
        known = self._entries.get(wanted)
        return known is not None and is_same_source(known, entry)

    def _is_filled(self, wanted: _Range) -> bool:
        after = bisect_left(self._disjoint, wanted)
        neighbors = self._disjoint[max(after - 1, 0) : after + 1]
        return any(each.start < wanted.end and wanted.start < each.end for each in neighbors)


def _get_range(shard: LocalShard) -> _Range | None:
    """Return a shard's memory range; None if it has no memory."""
    tensor = shard.tensor
    if not shard.box.volume or not (start := tensor.data_ptr()):
        return None
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _Range(start, start + elements * tensor.element_size())


def _merge(ranges: Iterable[_Range]) -> Iterator[_Range]:
    """Yield disjoint ranges that cover sorted ones."""
    merged: _Range | None = None
    for each in ranges:
        if merged is None or each.start >= merged.end:
            if merged is not None:
                yield merged
            merged = each
        else:
            merged = _Range(merged.start, max(merged.end, each.end))
    if merged is not None:
        yield merged


@dataclass
class Handover:
    """State to pass to an object."""

    tree: Any = None  # saved tree, with the object's own tensors where they are filled in place
    fills: list[Fill] = field(default_factory=list)  # tensors to fill in place
    # Paths of DTensors in the object's state that the checkpoint does not have.
    missing: list[Path] = field(default_factory=list)
    # Paths of saved tensors for which an object with DTensors does not have a tensor.
    unplaced: list[Path] = field(default_factory=list)


def hand_over(saved: Any, own: Any, path: Path, arrays: Mapping[Path, TensorEntry], filled: FilledMemory) -> Handover:
    """Match an object's saved state with its current `state_dict()`, without changes."""
    match = _Match(arrays, filled)
    handover = match.made
    own = _expanded(own, path)
    handover.tree = match.visit(saved, own, path)
    dtensors = [at for at, _, each in walk(own, path) if isinstance(each, DTensor) or is_sharded_tensor(each)]
    placed = {fill.path for fill in handover.fills}
    handover.missing = [place for place in dtensors if place not in placed]
    if not dtensors:
        handover.unplaced.clear()
    return handover


class _Match:
    def __init__(self, arrays: Mapping[Path, TensorEntry], filled: FilledMemory) -> None:
        self._arrays, self._filled = arrays, filled
        self.made = Handover()

    def visit(self, saved: Any, own: Any, path: Path) -> Any:
        """Return the value to pass to the object for a subtree."""
        if isinstance(saved, TensorRef):
            return self._array(saved, own, path)
        if isinstance(own, torch.Tensor) and find_record(saved) is not None:
            source = next(iter_refs(saved)).path[:-1]
            self.made.fills.append(Fill(path, source, own))
            return own
        if isinstance(saved, dict):
            return type(saved)(
                {key: self.visit(item, _member(own, key), (*path, path_key(key))) for key, item in saved.items()}
            )
        if type(saved) in (list, tuple):
            theirs = own if isinstance(own, list) and len(own) == len(saved) else [_MISSING] * len(saved)
            pairs = enumerate(zip(saved, theirs, strict=True))
            return type(saved)(self.visit(item, its, (*path, at)) for at, (item, its) in pairs)
        return saved

    def _array(self, saved: TensorRef, own: Any, path: Path) -> Any:
        entry = self._arrays[saved.path]
        if is_sharded_tensor(own):
            self.made.fills.append(Fill(path, saved.path, view_as_dtensor(own, path)))
            return own
        if isinstance(own, torch.Tensor) and is_wrapper_subclass(own):
            self.made.fills.append(Fill(path, saved.path, own))
            return own
        if isinstance(own, DTensor):
            target = own if self._filled.add(own, entry) else torch.empty_like(own)
            self.made.fills.append(Fill(path, saved.path, target))
            return target
        if isinstance(own, torch.Tensor) and _can_be_filled(own, entry):
            if not self._filled.add(own, entry):
                return saved
            self.made.fills.append(Fill(path, saved.path, own))
            return own
        if entry.shape and not isinstance(own, torch.Tensor):
            self.made.unplaced.append(path)
        return saved


def _expanded(own: Any, path: Path) -> Any:
    """Return a tree with objects replaced by their states."""
    require_depth(path)
    if find_kind(own) in WITH_STATE:
        own = own.state_dict()
    if isinstance(own, Mapping):  # of any class: nothing but its items is needed
        return {key: _expanded(item, (*path, path_key(key))) for key, item in own.items()}
    if isinstance(own, (list, tuple)):
        return [_expanded(item, (*path, at)) for at, item in enumerate(own)]
    return own


def _member(own: Any, key: Any) -> Any:
    """Return a mapping's value for a key, which another format may store as text."""
    if not isinstance(own, dict):
        return _MISSING
    if key in own:
        return own[key]
    return next((member for other, member in own.items() if str(other) == str(key)), _MISSING)


def _can_be_filled(own: torch.Tensor, entry: TensorEntry) -> bool:
    """Return True if a plain tensor can be filled; if not, the object gets a new one."""
    return (
        tuple(own.shape) == entry.shape
        and dtype_name(own.dtype) == entry.dtype
        and own.layout is torch.strided
        and own.is_contiguous()
        and not (own.is_meta or own.is_inference() or own.is_quantized)
        and has_memory(own)
    )
