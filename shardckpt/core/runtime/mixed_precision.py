"""Casts of inputs, outputs and buffers of units; moves of inputs to the compute device."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardckpt.core.modules.pytree import mapped
from shardckpt.devices import Event, has_streams, record_event

FULL_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""Set to 1, this environment variable lets units that are in eval mode compute in the stored types."""


def has_full_precision_eval() -> bool:
    """Return True if units in eval mode compute in the stored types."""
    return os.environ.get(FULL_IN_EVAL, "") == "1"


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors anywhere in a value."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return mapped(value, change)


def move_tensors(value: Any, device: torch.device) -> tuple[Any, Event | None]:
    """Move the tensors anywhere in a value to a device with streams; do nothing if it has none.

    Returns:
        The value; the event to wait for before the pinned memory of tensors is written again, None if there is none.
    """
    if not has_streams(device):
        return value, None
    is_pinned = False

    def move(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal is_pinned
        if tensor.device.type == "cpu" != device.type:
            is_pinned = is_pinned or type(tensor) is not torch.Tensor or tensor.is_pinned()
        return tensor.to(device, non_blocking=True)

    moved = mapped(value, move)
    return moved, record_event(device) if is_pinned else None


class Buffers:
    """Buffers of some modules in a type to compute with, and the types they had.

    Args:
        modules: The modules; their own buffers only.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._original: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffers:
        """Return the buffers of the copied modules."""
        copied = memo[id(self)] = Buffers(copy.deepcopy(self._modules, memo))
        for module, types in self._original.items():
            copied._original[copy.deepcopy(module, memo)] = dict(types)
        return copied

    def cast(self, dtype: torch.dtype) -> None:
        """Cast floating buffers; the types they have at the first call are the original ones."""
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    self._original.setdefault(module, {}).setdefault(name, buffer.dtype)
                    module._buffers[name] = buffer.to(dtype)

    def get_original_dtype(self, module: nn.Module, name: str) -> torch.dtype | None:
        """Return the type a buffer had before it was cast; None where it never was."""
        return self._original.get(module, {}).get(name)

    def restore(self) -> None:
        """Cast buffers back to the types they had."""
        for module, types in self._original.items():
            for name, dtype in types.items():
                buffer = module._buffers.get(name)
                if buffer is not None:
                    module._buffers[name] = buffer.to(dtype)
