"""What a receiver applies a version to: a module, a dict of tensors, or an adapter of an engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from shardckpt.boxes import Box, Shape
from shardckpt.errors import MismatchError, UsageError
from shardckpt.state.local.local_shards import local_model
from shardckpt.state.local.tensor_shards import TensorShards, get_tensor_shards, repeats_elements

__all__ = ["TensorChange", "TensorTarget", "WeightTarget", "as_target", "get_target_key"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes

Place = tuple[str, Shape, str, Box]  # a held box: name, shape of the full tensor, dtype in the stream, box


class TensorChange(NamedTuple):
    """New elements of a tensor.

    Attributes:
        name: Name in the stream.
        shape: Shape of the full tensor.
        dtype: Dtype in the stream, in torch's spelling.
        box: The worker's box; the full tensor without a `layout`.
        indices: Flat positions of the new elements in the box, int64, ascending; None for every element.
        values: The new elements, flat; do not change them, the receiver keeps them.
    """

    name: str
    shape: Shape
    dtype: str
    box: Box
    indices: torch.Tensor | None
    values: torch.Tensor


@runtime_checkable
class WeightTarget(Protocol):
    """An engine that takes changes."""

    def apply(self, changes: Iterable[TensorChange]) -> object:
        """Write the changes. If this raises, the engine's weights count as damaged."""


class TensorTarget:
    """Tensors by name, or the shards of a module."""

    def __init__(self, into: nn.Module | Mapping[str, torch.Tensor]) -> None:
        self._finish: Callable[[], object] = lambda: None
        if isinstance(into, nn.Module):
            model = local_model(into)
            self._arrays: Mapping[str, TensorShards] = model.arrays
            self._finish = model.finish
        else:
            self._arrays = {name: get_tensor_shards(value) for name, value in into.items()}

    def list_boxes(self) -> dict[str, Sequence[Box]]:
        """Return this process's boxes by name."""
        return {name: [shard.box for shard in array.shards] for name, array in self._arrays.items()}

    def check(self, places: Iterable[Place], names: Iterable[str]) -> None:
        """Require that the tensors are the stream's, before anything is written. Raises MismatchError."""
        names = frozenset(names)
        self._drop_aliases(names)
        problems = [f"{name}: the stream has no such tensor" for name in self._arrays.keys() - names]
        problems += self._find_bad_memory()
        for name, shape, dtype, box in places:
            array = self._arrays.get(name)
            if array is None:
                problems.append(f"{name}: only the stream has it")
                continue
            if array.shape != shape:
                problems.append(f"{name}: shape {list(array.shape)}, the stream has {list(shape)}")
            elif not _has_all_values(array.dtype, getattr(torch, dtype)):
                problems.append(f"{name}: dtype {str(array.dtype)[6:]} would round the stream's {dtype}")
            elif all(shard.box != box for shard in array.shards):
                problems.append(f"{name}: the receiver's layout has {box}, the target has other boxes")
        if problems:
            raise MismatchError.on_other_rank(
                f"the target does not fit the stream: {'; '.join(sorted(problems)[:8])}. Nothing was changed."
            )

    def _drop_aliases(self, names: Collection[str]) -> None:
        """Drop further names of tensors that the stream has under another one: they are the same memory."""
        known = {_locate(array) for name, array in self._arrays.items() if name in names}
        self._arrays = {
            name: array for name, array in self._arrays.items() if name in names or _locate(array) not in known
        }

    def _find_bad_memory(self) -> Iterator[str]:
        """Yield what is wrong with tensors that cannot be written one by one."""
        owners: dict[int, str] = {}
        for name, array in self._arrays.items():
            for _, tensor in array.shards:
                if tensor.is_meta or repeats_elements(tensor):
                    yield f"{name}: it has no memory of its own for each element"
                elif tensor.numel() and owners.setdefault(tensor.data_ptr(), name) != name:
                    yield f"{name}: it shares memory with {owners[tensor.data_ptr()]}"

    @property
    def key(self) -> tuple[tuple[str, int], ...]:
        """Where these tensors are, which differs from any others'."""
        return tuple((name, shard.tensor.data_ptr()) for name, array in self._arrays.items() for shard in array.shards)

    def apply(self, changes: Iterable[TensorChange]) -> None:
        """Write the changes."""
        with torch.no_grad():
            for change in changes:
                shards = self._arrays[change.name].shards
                tensor = next(shard.tensor for shard in shards if shard.box == change.box)
                _write(tensor, change)
        self._finish()


def _locate(array: TensorShards) -> object:
    """Return where a tensor's shards are; a new object for a tensor without elements."""
    places = tuple((box, each.data_ptr(), each.dtype, each.stride()) for box, each in array.shards if each.numel())
    return places or object()


def _has_all_values(dtype: torch.dtype, of: torch.dtype) -> bool:
    """Return True if a dtype has every value of another one."""
    is_alike = dtype.is_floating_point and of.is_floating_point
    return dtype == of or (is_alike and torch.promote_types(dtype, of) == dtype)


def _write(tensor: torch.Tensor, change: TensorChange) -> None:
    values = change.values.to(tensor.device, tensor.dtype)
    if not tensor.is_complex() and tensor.element_size() in _INTEGERS:  # an index writes into common dtypes alone
        integer = _INTEGERS[tensor.element_size()]
        tensor, values = tensor.view(integer), values.view(integer)
    if change.indices is None:
        tensor.copy_(values.view(change.box.size))
        return
    at = change.indices.to(tensor.device)
    if tensor.is_contiguous():
        tensor.view(-1)[at] = values
    else:
        tensor[torch.unravel_index(at, tuple(tensor.shape))] = values


def get_target_key(target: WeightTarget) -> object:
    """Return a key of a target: its memory, or the engine's object."""
    if isinstance(target, TensorTarget):
        return target.key
    try:
        return weakref.ref(target)
    except TypeError:
        return id(target)


def as_target(into: Any) -> WeightTarget:
    """Return the target for what a caller passes. Raises UsageError."""
    if isinstance(into, nn.Module) or (
        isinstance(into, Mapping) and all(isinstance(value, torch.Tensor) for value in into.values())
    ):
        return TensorTarget(into)
    if isinstance(into, WeightTarget):
        return into
    raise UsageError("`into` must be a module, a dict of tensors, or have `apply(changes)`", found=type(into).__name__)
