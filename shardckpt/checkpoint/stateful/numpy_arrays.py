"""NumPy arrays in a user's state: check them, and convert them to and from tensors with the same elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardckpt import dtypes
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Path, dotted

# Types of the same bits for elements of `ml_dtypes`, by their bytes: `torch.from_numpy` refuses those.
_INTEGERS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16)}


def check_array(value: np.ndarray[Any, Any], path: Path) -> None:
    """Refuse array classes with additional data, such as `MaskedArray`."""
    if type(value) not in (np.ndarray, np.memmap):
        raise UnsupportedError(
            f"an array of the class {type(value).__name__} can be neither saved nor filled",
            where=dotted(path),
            expected="a numpy.ndarray",
            fix="Save its parts: `numpy.asarray(it)`, and a MaskedArray's mask next to it.",
        )


def has_torch_dtype(value: np.ndarray[Any, Any]) -> bool:
    """Return True if torch has a dtype with these elements, in any byte order."""
    name = value.dtype.name
    return dtypes.is_known(name) and dtypes.bits(name) == 8 * value.dtype.itemsize and hasattr(torch, name)


def has_torch_strides(value: np.ndarray[Any, Any]) -> bool:
    """Return True if a tensor can use an array's memory: not if it is reversed, or a field in records."""
    return all(stride >= 0 and stride % value.dtype.itemsize == 0 for stride in value.strides)


def tensor_from_numpy(value: np.ndarray[Any, Any], path: Path) -> torch.Tensor:
    """Return a numpy array as a tensor with the same elements."""
    check_array(value, path)
    if not has_torch_dtype(value):
        raise UnsupportedError(f"a numpy array of type {value.dtype} cannot be saved", where=dotted(path))
    native = value.astype(value.dtype.newbyteorder("="), copy=False)  # torch supports native byte order only
    dense = np.ascontiguousarray(native).reshape(value.shape)
    return share_memory(dense if dense.flags.writeable else dense.copy())


def share_memory(value: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor over an array's memory; the array has native byte order and a dtype that torch has."""
    if not _is_of_ml_dtypes(value.dtype):
        return torch.from_numpy(value)
    integer, _ = _INTEGERS[value.dtype.itemsize]
    return torch.from_numpy(value.view(integer)).view(getattr(torch, value.dtype.name))


def array_from_tensor(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return an array over a tensor's memory, with a dtype from `ml_dtypes` if NumPy itself lacks it."""
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = numpy_dtype(name)
    if not _is_of_ml_dtypes(dtype):
        return tensor.numpy()
    _, integer = _INTEGERS[dtype.itemsize]
    return tensor.view(integer).numpy().view(dtype)


def _is_of_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    return dtype.type.__module__ == "ml_dtypes"
