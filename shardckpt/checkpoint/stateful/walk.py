"""One walk over a user's state: its leaves in one order, each with its path and its kind.

Every part of a save, a load and a witness that looks into a state does so here. So the classes of objects that a state
may hold are listed once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shardckpt.checkpoint.stateful.stateful import PLAIN_TENSORS, PerRank, Stateful
from shardckpt.checkpoint.stateful.variant import Variant
from shardckpt.encodings.tagged_json import MAX_DEPTH, path_key
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Path, dotted
from shardckpt.state.local.tensor_shards import TensorShards


class LeafKind(Enum):
    """Kind of a leaf in a state."""

    VALUE = "value"  # a plain value, or an object of an unknown class
    TENSOR = "tensor"
    MODULE = "module"
    VARIANT = "variant"
    OPTIMIZER = "optimizer"
    PER_RANK = "per-rank value"
    STATEFUL = "stateful"
    ARRAY = "array"  # of NumPy
    SHARDS = "shards"  # `TensorShards`, which a stream saves
    CONTAINER = "container"  # a dict, list or tuple; a leaf only if `enter` says so


WITH_STATE = frozenset({LeafKind.OPTIMIZER, LeafKind.PER_RANK, LeafKind.STATEFUL})  # kinds with a `state_dict`


class Leaf(NamedTuple):
    """Object in a state."""

    path: Path
    kind: LeafKind
    value: Any


Enter = Callable[[Any, Path], bool]  # whether to look into a container; otherwise it is a leaf

# The order matters: an object has the first kind that fits. A module is never a Stateful, although it has the methods.
_CLASSES: tuple[tuple[type, LeafKind], ...] = (
    (torch.Tensor, LeafKind.TENSOR),
    (nn.Module, LeafKind.MODULE),
    (Variant, LeafKind.VARIANT),
    (torch.optim.Optimizer, LeafKind.OPTIMIZER),
    (PerRank, LeafKind.PER_RANK),
    (Stateful, LeafKind.STATEFUL),
    (np.ndarray, LeafKind.ARRAY),
    (TensorShards, LeafKind.SHARDS),
)

# Nearly all values have one of these classes, so that no further look is needed.
_EXACT: Mapping[type, LeafKind] = {
    **dict.fromkeys((bool, int, float, complex, str, bytes, type(None)), LeafKind.VALUE),
    **dict.fromkeys((dict, OrderedDict, list, tuple), LeafKind.CONTAINER),
    **dict.fromkeys(PLAIN_TENSORS, LeafKind.TENSOR),
}


def find_kind(value: object) -> LeafKind:
    """Return an object's kind."""
    kind = _EXACT.get(type(value))
    if kind is not None:
        return kind
    if isinstance(value, type):  # a class has the methods of its instances
        return LeafKind.VALUE
    return next((kind for known, kind in _CLASSES if isinstance(value, known)), LeafKind.VALUE)


def _enter_all(_value: Any, _path: Path) -> bool:
    return True


def walk(state: Any, path: Path = (), enter: Enter = _enter_all) -> Iterator[Leaf]:
    """Yield a state's leaves in order."""
    waiting = [(path, state)]
    while waiting:
        path, value = waiting.pop()
        kind = find_kind(value)
        if kind is LeafKind.CONTAINER:
            require_depth(path)
            if enter(value, path):
                waiting.extend(reversed([((*path, path_key(key)), item) for key, item in iter_items(value)]))
                continue
        yield Leaf(path, kind, value)


def map_leaves(state: Any, take: Callable[[Leaf], Any], path: Path = (), enter: Enter = _enter_all) -> Any:
    """Return a state with `take(leaf)` in place of each leaf."""
    kind = find_kind(state)
    if kind is LeafKind.CONTAINER:
        require_depth(path)
        if enter(state, path):
            items = ((key, map_leaves(item, take, (*path, path_key(key)), enter)) for key, item in iter_items(state))
            return type(state)(items if isinstance(state, dict) else (item for _, item in items))
    return take(Leaf(path, kind, state))


def iter_items(container: Any) -> Iterable[tuple[Any, Any]]:
    """Return a container's keys or positions, with their items."""
    return container.items() if isinstance(container, dict) else enumerate(container)


def is_column(container: Any, classes: Set[type] = PLAIN_TENSORS) -> bool:
    """Return True for a dict with tensors alone, which is faster as one leaf."""
    return isinstance(container, dict) and classes >= set(map(type, container.values()))


def require_depth(path: Path) -> None:
    """Refuse a container that is nested too deep."""
    if len(path) > MAX_DEPTH:
        raise UnsupportedError("nested too deep, or holds itself", where=dotted(path[:8]))
