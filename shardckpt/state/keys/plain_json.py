"""Encode plain values as JSON that keeps their types; rank 0 sends them to ranks without a state."""

from __future__ import annotations

import json
from typing import Any

import torch

_TUPLE, _DICT, _TENSOR = "tuple", "dict", "tensor"


def encode(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(_to_json(value)).encode()


def decode(data: bytes) -> Any:
    """Invert `encode`, with tensors on the CPU."""
    return _from_json(json.loads(data))


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item) for item in value]}
    if isinstance(value, dict):
        return {_DICT: [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        return {_TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise TypeError(f"an object with class {type(value).__name__} is not a plain value")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_from_json(item) for item in value[_TUPLE])
    if _TENSOR in value:
        return torch.tensor(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
    return {_from_json(key): _from_json(item) for key, item in value[_DICT]}
