"""Check whether values fit together for tensors that share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardckpt.state.local.tensor_shards import end_address


class SharedBytes:
    """A CPU copy of memory, from the first to the last byte of some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._start = min(tensor.data_ptr() for tensor in tensors)
        size = max(end_address(tensor) for tensor in tensors) - self._start
        self._is_taken = torch.zeros(size, dtype=torch.bool)
        self._values = torch.empty(size, dtype=torch.uint8)

    def take(self, tensor: torch.Tensor) -> bool:
        """Take a tensor's bytes. Return True if some were taken before."""
        place = self._view(self._is_taken, tensor)
        was_taken = bool(place.any())
        place.fill_(True)
        return was_taken

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        """Take a tensor's bytes for values. Return False if some were taken for other bytes."""
        taken, place = self._view(self._is_taken, tensor), self._view(self._values, tensor)
        new = values.to(tensor.dtype).contiguous().reshape(-1).view(torch.uint8).reshape(place.shape)
        fits = not bool((taken & (place != new)).any())
        taken.fill_(True)
        place.copy_(new)
        return fits

    def _view(self, memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        steps = [step * size for step in tensor.stride()]
        return memory.as_strided((*tensor.shape, size), (*steps, 1), tensor.data_ptr() - self._start)


def share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have bytes in common."""
    memory = SharedBytes([one, other])
    return not memory.take(one) and memory.take(other)
