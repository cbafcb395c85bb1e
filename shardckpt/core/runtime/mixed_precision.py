"""Mixed precision: cast inputs, outputs and buffers; move inputs."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardckpt.core.modules.pytree import mapped
from shardckpt.devices import Event, is_capturing, record_event

# Environment variable; if it is 1, units in eval mode compute in the stored dtypes.
FULL_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"


def has_full_precision_eval() -> bool:
    """Return True if units in eval mode compute in the stored dtypes."""
    return os.environ.get(FULL_IN_EVAL, "") == "1"


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Cast all floating tensors in a value."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return mapped(value, change)


def move_tensors(value: Any, device: torch.device) -> tuple[Any, Event | None]:
    """Move all tensors in a value to a device with streams; also return an event."""
    # The event shows when pinned inputs may be written again. It is None without pinned inputs, and while a graph is
    # captured, whose replays read that memory again.
    is_pinned = False

    def move(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal is_pinned
        if tensor.device.type == "cpu" != device.type:
            is_pinned = is_pinned or type(tensor) is not torch.Tensor or tensor.is_pinned()
        return tensor.to(device, non_blocking=True)

    moved = mapped(value, move)
    return moved, record_event(device) if is_pinned and not is_capturing(device) else None


class Buffers:
    """Module buffers in their compute dtype, with their original dtypes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._original: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffers:
        """Return the copied modules' buffers."""
        copied = memo[id(self)] = Buffers(copy.deepcopy(self._modules, memo))
        for module, types in self._original.items():
            copied._original[copy.deepcopy(module, memo)] = dict(types)
        return copied

    def cast(self, dtype: torch.dtype) -> None:
        """Cast floating buffers; the first call records their original dtypes."""
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    self._original.setdefault(module, {}).setdefault(name, buffer.dtype)
                    module._buffers[name] = buffer.to(dtype)

    def get_original_dtype(self, module: nn.Module, name: str) -> torch.dtype | None:
        """Return a buffer's original dtype; None if it was never cast."""
        return self._original.get(module, {}).get(name)

    def restore(self) -> None:
        """Cast buffers back to their original dtypes."""
        for module, types in self._original.items():
            for name, dtype in types.items():
                buffer = module._buffers.get(name)
                if buffer is not None:
                    module._buffers[name] = buffer.to(dtype)
