"""Tensors inside tuples, lists, dicts, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a value, in a fixed order.

    Sets and unknown containers are not traversed.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from tensors(getattr(value, each.name, None))


def find_grad_tensors(value: Any, found: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Return the tensors in a value that require gradients, in the order of `tensors`."""
    found = [] if found is None else found
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            find_grad_tensors(each, found)
    elif isinstance(value, Mapping):
        for each in value.values():
            find_grad_tensors(each, found)
    else:
        found.extend(each for each in tensors(value) if each.requires_grad)
    return found


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors replaced.

    Containers are copied only if one of their tensors was replaced.

    Args:
        value: Tensor, container of tensors, or any other object.
        change: Returns the replacement of a tensor, or the same tensor.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change)
    if isinstance(value, Mapping):
        return _mapping(value, change)
    if isinstance(value, PackedSequence):
        return _packed_sequence(value, change)
    if isinstance(value, (tuple, list)):
        items, is_changed = [], False
        for each in value:
            items.append(mapped(each, change))
            is_changed |= items[-1] is not each
        if not is_changed:
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _packed_sequence(value: PackedSequence, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedSequence:
    """Replace the data only: the batch sizes have to stay on the CPU."""
    data, indices = change(value.data), (value.sorted_indices, value.unsorted_indices)
    changed = [None if each is None else change(each) for each in indices]
    if data is value.data and all(after is before for after, before in zip(changed, indices, strict=True)):
        return value
    return PackedSequence(data, value.batch_sizes, *changed)


def _mapping(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    made = None
    for key, before in tuple(value.items()):
        after = mapped(before, change)
        if after is not before:
            made = copy.copy(value) if made is None else made
            made[key] = after
    return value if made is None else made


def _dataclass(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    made = None
    for each in dataclasses.fields(value):
        before = getattr(value, each.name, None)
        after = mapped(before, change)
        if after is not before:
            made = copy.copy(value) if made is None else made
            object.__setattr__(made, each.name, after)
            if isinstance(made, dict) and each.name in made:
                made[each.name] = after
    return value if made is None else made
