"""Take tensors out of plain values: the rest can be encoded as JSON."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from shardckpt.checkpoint.stateful.numpy_arrays import tensor_from_numpy
from shardckpt.checkpoint.stateful.stateful import check_tensor
from shardckpt.format.encodings.tagged_json import MAX_DEPTH, path_key
from shardckpt.format.opened.state_tree import TensorRef
from shardckpt.manifest import Path


def take_tensors(value: Any, path: Path, tensors: dict[Path, torch.Tensor]) -> Any:
    """Return a value with its tensors and arrays as `TensorRef`, also inside dicts, lists and tuples."""
    is_array = isinstance(value, np.ndarray)
    if is_array or isinstance(value, torch.Tensor):
        tensors[path] = tensor_from_numpy(value, path) if is_array else value
        check_tensor(tensors[path], path)
        return TensorRef(path, "numpy" if is_array else "tensor")
    if len(path) > MAX_DEPTH:  # or a container that contains itself; `encode` refuses it
        return value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, take_tensors(item, (*path, path_key(key)), tensors)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(take_tensors(item, (*path, at), tensors) for at, item in enumerate(value))
    return value
