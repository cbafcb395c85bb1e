"""The tensors of a model by their names in the stream."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, LocalSavePlan
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.stateful import as_root
from shardckpt.errors import NameCollisionError, UnsupportedError, UsageError
from shardckpt.manifest import Path, dotted
from shardckpt.plan.subclass_record import SUBCLASS
from shardckpt.readers.opened.state_tree import TensorRef
from shardckpt.stream.format.anchor import ROOT
from shardckpt.stream.format.stream_records import StreamTensor

__all__ = ["TensorNames", "find_others", "flatten_weights"]

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


class TensorNames:
    """Names and dtypes in the stream."""

    def __init__(self, dtype: str | None, key_map: Sequence[tuple[re.Pattern[str], str]]) -> None:
        self._dtype, self._key_map = dtype, key_map

    def rename(self, path: Path) -> str:
        """Return a tensor's name in the stream."""
        name = dotted(path[1:])
        for pattern, new in self._key_map:
            name = pattern.sub(new, name)
        return name

    def describe(self, local_plans: Sequence[LocalSavePlan], plan: GlobalSavePlan) -> dict[str, StreamTensor]:
        """Return all ranks' tensors by name. Raises NameCollisionError, UsageError."""
        tensors: dict[str, StreamTensor] = {}
        owners: dict[str, Path] = {}
        arrays = {array.path: array for local_plan in local_plans for array in local_plan.arrays}
        for path in plan.order:
            name, array = self.rename(path), arrays[path]
            if name in tensors:
                raise NameCollisionError(
                    "two tensors get one name in the stream",
                    where=name,
                    found=f"{dotted(owners[name][1:])} and {dotted(path[1:])}",
                    fix="Change `key_map`.",
                )
            if array.dtype == "complex128":
                raise UnsupportedError(
                    "a stream has no complex128", where=name, fix="Publish its real and imaginary part."
                )
            owners[name] = path
            dtype = self._dtype if self._dtype is not None and array.dtype in _FLOATS else array.dtype
            tensors[name] = StreamTensor(dtype, array.shape)
        if not tensors:
            raise UsageError("the model must have tensors to publish")
        return tensors

    def describe_ties(self, plan: GlobalSavePlan) -> dict[str, str]:
        """Return further names of tensors, each with the first one."""
        ties = {self.rename(path): self.rename(first) for path, first in plan.ties.items()}
        named = {self.rename(path) for path in plan.order}
        taken = next((name for name, first in ties.items() if name in named and name != first), None)
        if taken is not None:
            raise NameCollisionError(
                "a further name of a tensor is another tensor's in the stream", where=taken, fix="Change `key_map`."
            )
        return {name: first for name, first in ties.items() if name != first}


def flatten_weights(model: Any, rank: int, size: int) -> FlattenedState:
    """Return this rank's part of a model or a dict of tensors. Raises UsageError, UnsupportedError."""
    if not isinstance(model, (torch.nn.Module, Mapping)):
        raise UsageError("`model` must be a module or a dict of tensors", found=type(model).__name__)
    flattened = flatten_state({ROOT: as_root(model)}, rank, size)
    for name, value in _iter_named(flattened.tree[ROOT]):
        if isinstance(value, dict):
            raise UnsupportedError(
                "a tensor of this class cannot be published",
                where=name,
                fix="Publish a dict with the tensors that the server loads.",
            )
    return flattened


def find_others(flattened: FlattenedState) -> list[str]:
    """Return the names of values that are not tensors."""
    return [name for name, value in _iter_named(flattened.tree[ROOT]) if not isinstance(value, (TensorRef, dict))]


def _iter_named(tree: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[str, Any]]:
    """Yield the values in a state's tree by name; a tensor subclass is one dict."""
    for key, value in tree.items():
        if isinstance(value, dict) and SUBCLASS not in value:
            yield from _iter_named(value, (*path, key))
        else:
            yield dotted((*path, key)), value
