"""Load of `Stateful` objects by filling the tensors of their current state.

A checkpoint has full tensors, but an object with a sharded model loads DTensors with its own sharding. Therefore the
tensors that its `state_dict()` returns are filled, each rank with its shard, and passed back in the saved tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.load.load_plan import require_depth
from shardckpt.checkpoint.stateful.flatten import view_as_dtensor
from shardckpt.checkpoint.stateful.stateful import dtype_name, has_memory, is_optimizer, is_stateful
from shardckpt.format.encodings.tagged_json import path_key
from shardckpt.format.opened.state_tree import TensorRef
from shardckpt.manifest import Path, TensorEntry
from shardckpt.state.keys.kinds import is_sharded_tensor

_MISSING = object()


class Fill(NamedTuple):
    """Tensor of an object's state to fill in place.

    Attributes:
        path: Path in the state.
        source: Path in the checkpoint.
        tensor: Tensor from `state_dict()`.
    """

    path: Path
    source: Path
    tensor: torch.Tensor


@dataclass
class Handover:
    """State to pass to an object.

    Attributes:
        tree: Saved tree, with the object's own tensors where they are filled in place.
        fills: Tensors to fill in place.
        missing: Paths of DTensors in the object's state that the checkpoint does not have.
        unplaced: Paths of saved tensors for which an object with DTensors does not have a tensor.
    """

    tree: Any = None
    fills: list[Fill] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    unplaced: list[Path] = field(default_factory=list)


def hand_over(saved: Any, own: Any, path: Path, arrays: Mapping[Path, TensorEntry]) -> Handover:
    """Match an object's saved state with its current `state_dict()`, without changes.

    Args:
        saved: Saved tree of the object, with arrays as `TensorRef`.
        own: Result of the object's `state_dict()`.
        path: Path of the object in the state.
        arrays: Entries of the checkpoint's arrays by path.
    """
    match = _Match(arrays)
    handover = match.made
    own = _expanded(own, path)
    handover.tree = match.visit(saved, own, path)
    dtensors = list(_dtensors(own, path))
    filled = {fill.path for fill in handover.fills}
    handover.missing = [place for place in dtensors if place not in filled]
    if not dtensors:
        handover.unplaced.clear()
    return handover


class _Match:
    def __init__(self, arrays: Mapping[Path, TensorEntry]) -> None:
        self._arrays = arrays
        self.made = Handover()

    def visit(self, saved: Any, own: Any, path: Path) -> Any:
        """Return the value to pass to the object for a part of the tree."""
        if isinstance(saved, TensorRef):
            return self._array(saved, own, path)
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
        if isinstance(own, DTensor) or (isinstance(own, torch.Tensor) and _can_be_filled(own, entry)):
            self.made.fills.append(Fill(path, saved.path, own))
            return own
        if entry.shape and not isinstance(own, torch.Tensor):
            self.made.unplaced.append(path)
        return saved


def _expanded(own: Any, path: Path) -> Any:
    """Return a tree with objects replaced by their states."""
    if is_optimizer(own) or is_stateful(own):
        own = own.state_dict()
    require_depth(path)
    if isinstance(own, Mapping):
        return {key: _expanded(item, (*path, path_key(key))) for key, item in own.items()}
    if isinstance(own, (list, tuple)):
        return [_expanded(item, (*path, at)) for at, item in enumerate(own)]
    return own


def _member(own: Any, key: Any) -> Any:
    """Return a mapping's value of a key, which another format may store as text."""
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
        and type(own).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and own.layout is torch.strided
        and own.is_contiguous()
        and not (own.is_meta or own.is_inference() or own.is_quantized)
        and has_memory(own)
    )


def _dtensors(own: Any, path: Path) -> Iterator[Path]:
    """Yield the paths of DTensors in an object's state."""
    if isinstance(own, DTensor) or is_sharded_tensor(own):
        yield path
    elif isinstance(own, dict):
        for key, item in own.items():
            yield from _dtensors(item, (*path, path_key(key)))
    elif isinstance(own, list):
        for at, item in enumerate(own):
            yield from _dtensors(item, (*path, at))
