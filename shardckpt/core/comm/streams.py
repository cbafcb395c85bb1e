"""What devices differ in: storage given and taken back and counted, the stream that gathers, pinned memory."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


class StorageCounter:
    """Bytes that full buffers hold at the moment, for tests and reports; one for the process.

    Attributes:
        held: Bytes held now.
        peak: Most bytes held at once since the last `reset_peak`.
    """

    def __init__(self) -> None:
        self.held = 0
        self.peak = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were allocated, or freed if negative."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        self.peak = self.held


FULL_BYTES = StorageCounter()


class ResizableStorage:
    """A 1-D tensor whose storage can be freed and allocated again while views of it live on.

    Args:
        numel: Number of elements.
        dtype: Element type.
        device: Device of the storage.

    Attributes:
        alive: Whether the storage is allocated; its content may be undefined.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = numel * dtype.itemsize
        self.alive = True
        self._has_streams = device.type not in ("cpu", "meta")
        self._counter = FULL_BYTES if device.type != "meta" else StorageCounter()
        self._counter.add(self._nbytes)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> ResizableStorage:
        """Wrap a tensor that exists; nothing is copied."""
        made = cls(0, tensor.dtype, tensor.device)
        made.tensor = tensor
        made._nbytes = tensor.nbytes
        made._counter.add(made._nbytes)
        return made

    def __del__(self) -> None:
        if getattr(self, "alive", False):
            self._counter.add(-self._nbytes)

    def allocate(self) -> None:
        """Allocate the storage, with undefined content; do nothing if it is allocated."""
        if not self.alive:
            self.tensor.untyped_storage().resize_(self._nbytes)
            self.alive = True
            self._counter.add(self._nbytes)

    def free(self) -> None:
        """Free the storage; do nothing if it is freed."""
        if self.alive:
            if self._has_streams:
                in_use(self.tensor)
            self.tensor.untyped_storage().resize_(0)
            self.alive = False
            self._counter.add(-self._nbytes)


def in_use(tensor: torch.Tensor) -> None:
    """Record, before it is freed, that the current stream uses a tensor of the all-gather stream."""
    if tensor.device.type not in ("cpu", "meta"):
        tensor.record_stream(_module(tensor.device).current_stream(tensor.device))


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


@cache
def _gathering_stream(device: torch.device) -> Any:
    return _module(device).Stream(device, priority=-1)


def gathering(device: torch.device) -> AbstractContextManager[object]:
    """Return a context of the stream that all gathers of a device share, which runs beside the computation."""
    if device.type in ("cpu", "meta"):
        return nullcontext()
    context: AbstractContextManager[object] = _module(device).stream(_gathering_stream(device))
    return context


def await_gather(device: torch.device) -> None:
    """Make computation that is queued from now on wait for the gathers that are queued."""
    if device.type not in ("cpu", "meta"):
        _module(device).current_stream(device).wait_stream(_gathering_stream(device))


def gathers_await(device: torch.device, event: Any = None) -> None:
    """Make gathers from now on wait for the computation that is queued: the optimizer's.

    Args:
        device: Where.
        event: Wait for this instead.
    """
    if device.type not in ("cpu", "meta"):
        stream = _gathering_stream(device)
        if event is not None:
            stream.wait_event(event)
        else:
            stream.wait_stream(_module(device).current_stream(device))


def pinned(tensor: torch.Tensor, wanted: bool = True) -> torch.Tensor:
    """Return a CPU tensor in pinned memory; the same tensor without CUDA."""
    if not wanted or not torch.cuda.is_available() or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


class RateLimiter:
    """Limits all-gathers while the computation is more than two resharded units behind (`limit_all_gathers`).

    Attributes:
        waits: How often an all-gather had to wait.
    """

    def __init__(self) -> None:
        self.waits = 0
        self._freed: deque[Any] = deque()

    def record_free_event(self, device: torch.device) -> None:
        """Note that a unit's memory is free once what is queued now has run."""
        event = None
        if device.type not in ("cpu", "meta"):
            event = _module(device).Event()
            event.record()
        self._freed.append(event)

    def wait(self) -> None:
        """Wait until another all-gather may begin."""
        if len(self._freed) < 2:
            return
        self.waits += 1
        event = self._freed.popleft()
        if event is not None:
            event.synchronize()

    def clear(self) -> None:
        """Forget what was freed: nothing of it is waited for."""
        self._freed.clear()
