"""Tensors inside arguments and results: tuples, lists, dicts, named tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a value, in a fixed order; sets and unknown containers are not opened."""
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


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with its tensors changed; containers are copied only where something in them was changed.

    Args:
        value: What to look into.
        change: Returns another tensor, or the same.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, change)
    if isinstance(value, Mapping):
        return _mapping(value, change)
    if isinstance(value, (tuple, list)):
        items = [mapped(each, change) for each in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _mapping(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    items = {key: mapped(each, change) for key, each in value.items()}
    if all(items[key] is value[key] for key in items):
        return value
    made = copy.copy(value)
    for key, each in items.items():
        made[key] = each
    return made


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
