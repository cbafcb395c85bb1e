"""Streams for all-gathers and reductions, their dependencies; resizable storage."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch

from shardckpt.devices import (
    Event,
    Stream,
    get_current_stream,
    has_streams,
    make_stream,
    record_event,
    use_stream,
)


class StorageCounter:
    """Counter of the bytes of allocated full buffers, one per process, for tests.

    Attributes:
        held: Number of bytes that are allocated now.
        peak: Maximum number of bytes since the last `reset_peak`.
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
    """1-D tensor whose storage can be freed and allocated again; its views stay valid.

    Args:
        numel: Number of elements.
        dtype: Dtype of the elements.
        device: Device of the storage.

    Attributes:
        alive: Whether the storage is allocated; its content may be undefined.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = numel * dtype.itemsize
        self.alive = True
        self._counter = FULL_BYTES if device.type != "meta" else StorageCounter()
        self._counter.add(self._nbytes)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> ResizableStorage:
        """Wrap an existing tensor without a copy."""
        storage = cls(0, tensor.dtype, tensor.device)
        storage.tensor = tensor
        storage._nbytes = tensor.nbytes
        storage._counter.add(storage._nbytes)
        return storage

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
            self.tensor.untyped_storage().resize_(0)
            self.alive = False
            self._counter.add(-self._nbytes)


_gather_streams: dict[torch.device, Stream] = {}


def _get_gather_stream(device: torch.device) -> Stream:
    if device not in _gather_streams:
        _gather_streams[device] = make_stream(device, priority=-1)
    return _gather_streams[device]


def use_gather_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context of the stream for all all-gathers of a device."""
    return use_stream(_get_gather_stream(device), device) if has_streams(device) else nullcontext()


def wait_for_gather(device: torch.device, event: Event | None) -> None:
    """Make work that is queued later on the current stream wait for an all-gather.

    It does not wait for later all-gathers.

    Args:
        device: Device of the all-gather.
        event: Event recorded after the all-gather; None without streams.
    """
    if event is not None:
        get_current_stream(device).wait_event(event)


def make_gathers_wait(device: torch.device, event: Event | None = None) -> None:
    """Make later all-gathers wait for the queued computation, such as the optimizer's.

    Args:
        device: Device of the all-gathers.
        event: Event to wait for instead of the queued computation; None without one.
    """
    if not has_streams(device):
        return
    stream = _get_gather_stream(device)
    if event is not None:
        stream.wait_event(event)
    else:
        stream.wait_stream(get_current_stream(device))


_reduce_streams: dict[torch.device, Stream] = {}


def use_reduce_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context of the stream for all reductions of a device.

    The stream waits for the work that is queued now on the current stream.

    Args:
        device: Device with streams.
    """
    if device not in _reduce_streams:
        _reduce_streams[device] = make_stream(device)
    stream = _reduce_streams[device]
    stream.wait_stream(get_current_stream(device))
    return use_stream(stream, device)


def wait_for_reductions(device: torch.device) -> None:
    """Make work that is queued later on the current stream wait for queued reductions.

    Args:
        device: Device with streams.
    """
    if device in _reduce_streams:
        get_current_stream(device).wait_stream(_reduce_streams[device])


class RateLimiter:
    """Limit of all-gathers that run ahead of computation (`limit_all_gathers`).

    An all-gather waits while computation is more than two resharded units behind.

    Attributes:
        waits: Number of all-gathers that had to wait.
    """

    def __init__(self) -> None:
        self.waits = 0
        self._freed: deque[Event | None] = deque()

    def record_free_event(self, device: torch.device) -> None:
        """Record that a unit's memory is free after the work that is queued now."""
        self._freed.append(record_event(device))

    def wait(self) -> None:
        """Wait until another all-gather may start."""
        if len(self._freed) < 2:
            return
        self.waits += 1
        event = self._freed.popleft()
        if event is not None:
            event.synchronize()

    def clear(self) -> None:
        """Forget recorded events, without waiting for them."""
        self._freed.clear()
