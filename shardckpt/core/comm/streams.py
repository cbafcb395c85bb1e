"""The streams that gather and reduce, and what waits for what; storage that is freed and allocated again."""

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
            self.tensor.untyped_storage().resize_(0)
            self.alive = False
            self._counter.add(-self._nbytes)


_gather_streams: dict[torch.device, Stream] = {}


def _get_gather_stream(device: torch.device) -> Stream:
    if device not in _gather_streams:
        _gather_streams[device] = make_stream(device, priority=-1)
    return _gather_streams[device]


def use_gather_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context of the stream that all gathers of a device share, which runs beside the computation."""
    return use_stream(_get_gather_stream(device), device) if has_streams(device) else nullcontext()


def wait_for_gather(device: torch.device, event: Event | None) -> None:
    """Make computation that is queued from now on wait for a gather, not for those behind it.

    Args:
        device: Where.
        event: Recorded behind the gather; None without streams.
    """
    if event is not None:
        get_current_stream(device).wait_event(event)


def make_gathers_wait(device: torch.device, event: Event | None = None) -> None:
    """Make gathers from now on wait for the computation that is queued: the optimizer's.

    Args:
        device: Where.
        event: Wait for this instead.
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
    """Return a context of the stream that all reductions of a device share; it waits for what is queued now.

    Args:
        device: One that has streams.
    """
    if device not in _reduce_streams:
        _reduce_streams[device] = make_stream(device)
    stream = _reduce_streams[device]
    stream.wait_stream(get_current_stream(device))
    return use_stream(stream, device)


def wait_for_reductions(device: torch.device) -> None:
    """Make computation that is queued from now on wait for all that reductions have queued.

    Args:
        device: One that has streams.
    """
    if device in _reduce_streams:
        get_current_stream(device).wait_stream(_reduce_streams[device])


class RateLimiter:
    """Limits all-gathers while the computation is more than two resharded units behind (`limit_all_gathers`).

    Attributes:
        waits: How often an all-gather had to wait.
    """

    def __init__(self) -> None:
        self.waits = 0
        self._freed: deque[Event | None] = deque()

    def record_free_event(self, device: torch.device) -> None:
        """Note that a unit's memory is free once what is queued now has run."""
        self._freed.append(record_event(device))

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
