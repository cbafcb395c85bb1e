"""Tensors inside tuples, lists, dicts, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a value, in a fixed order; sets and unknown containers are not traversed."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name, None))


def find_grad_tensors(value: Any, grad_tensors: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Return the tensors in a value that require gradients, in the order of `tensors`."""
    grad_tensors = [] if grad_tensors is None else grad_tensors
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            grad_tensors.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            find_grad_tensors(item, grad_tensors)
    elif isinstance(value, Mapping):
        for item in value.values():
            find_grad_tensors(item, grad_tensors)
    else:
        grad_tensors.extend(tensor for tensor in tensors(value) if tensor.requires_grad)
    return grad_tensors


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors replaced; a container is copied only if one of its tensors was replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change)
    if isinstance(value, Mapping):
        return _mapping(value, change) if value else value
    if isinstance(value, PackedSequence):
        return _packed_sequence(value, change)
    if isinstance(value, (tuple, list)):
        items, is_changed = [], False
        for item in value:
            items.append(mapped(item, change))
            is_changed |= items[-1] is not item
        if not is_changed:
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _packed_sequence(value: PackedSequence, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedSequence:
    """Replace the data only: the batch sizes have to stay on the CPU."""
    data, indices = change(value.data), (value.sorted_indices, value.unsorted_indices)
    changed = [None if tensor is None else change(tensor) for tensor in indices]
    if data is value.data and all(after is before for after, before in zip(changed, indices, strict=True)):
        return value
    return PackedSequence(data, value.batch_sizes, *changed)


def _mapping(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    copied = None
    for key, before in tuple(value.items()):
        after = mapped(before, change)
        if after is not before:
            copied = copy.copy(value) if copied is None else copied
            copied[key] = after
    return value if copied is None else copied


def _dataclass(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    copied = None
    for field in dataclasses.fields(value):
        before = getattr(value, field.name, None)
        after = mapped(before, change)
        if after is not before:
            copied = copy.copy(value) if copied is None else copied
            object.__setattr__(copied, field.name, after)
            if isinstance(copied, dict) and field.name in copied:
                copied[field.name] = after
    return value if copied is None else copied
