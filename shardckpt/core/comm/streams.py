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
    is_capturing,
    make_stream,
    record_event,
    use_stream,
)


class StorageCounter:
    """Counts the bytes in allocated full buffers, one per process, for tests."""

    def __init__(self) -> None:
        self.held = 0  # bytes that are allocated now
        self.peak = 0  # maximum bytes since the last `reset_peak`

    def add(self, nbytes: int) -> None:
        """Count bytes that were allocated, or freed if negative."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        self.peak = self.held


FULL_BYTES = StorageCounter()


class ResizableStorage:
    """1-D tensor whose storage can be freed and allocated again; its views stay valid."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = numel * dtype.itemsize
        # `alive`: whether the storage is allocated; its content may be undefined.
        self.alive = self._has_memory = True
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
        if getattr(self, "_has_memory", False):
            self._counter.add(-self._nbytes)

    def allocate(self) -> None:
        """Allocate the storage, with undefined content; do nothing if it is allocated."""
        if not self._has_memory:
            self.tensor.untyped_storage().resize_(self._nbytes)
            self._has_memory = True
            self._counter.add(self._nbytes)
        self.alive = True

    def free(self, *, keep_memory: bool = False) -> None:
        """Free the storage; do nothing if it is freed."""
        self.alive = False
        # Kept memory is only marked as freed: the next `allocate` finds it at the same address.
        if self._has_memory and not keep_memory:
            self.tensor.untyped_storage().resize_(0)
            self._has_memory = False
            self._counter.add(-self._nbytes)


class DeviceStreams:
    """The engine's streams on one device; without streams, all operations run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # With streams, a device runs operations asynchronously to the host.
        self.is_async = has_streams(device)
        self._gather_stream: Stream | None = None
        self._reduce_stream: Stream | None = None
        self._all_reduce_stream: Stream | None = None
        # All-gather outputs that were copied out, each with the event after its copies.
        self._copied_outputs: list[tuple[torch.Tensor, Event | None]] = []
        # By length and dtype, each with the event after its kernel, until that is done; never freed.
        self._ones: dict[tuple[int, torch.dtype], tuple[torch.Tensor, Event | None]] = {}

    def get_ones(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return at least this many ones, for the current stream to read."""
        if self.is_async and self.is_capturing:  # a capture writes no values
            return torch.ones(count, dtype=dtype, device=self.device)
        key = 1 << count.bit_length(), dtype
        if key not in self._ones:
            self._ones[key] = torch.ones(key[0], dtype=dtype, device=self.device), self.record_event()
        ones, event = self._ones[key]
        if event is not None and event.query():
            self._ones[key] = ones, None
        elif event is not None:
            get_current_stream(self.device).wait_event(event)
        return ones

    def hold_gather_output(self, output: torch.Tensor) -> None:
        """Keep an output whose copies are queued on the current stream; its memory belongs to the all-gather stream."""
        if self.is_async:
            self._copied_outputs.append((output, self.record_event()))

    def release_gather_outputs(self) -> None:
        """Make later all-gathers wait for queued copies from earlier outputs, and free these outputs."""
        # The source is torch's FSDP2: a unit's output is freed when the next unit copies, so that the all-gather that
        # was started between them does not wait for the computation.
        held, self._copied_outputs = self._copied_outputs, []
        for _, event in held:
            self.make_gathers_wait(event)

    def use_gather_stream(self) -> AbstractContextManager[object]:
        """Return a context with the stream for all all-gathers on the device."""
        return use_stream(self._get_gather_stream(), self.device) if self.is_async else nullcontext()

    def use_current_stream(self) -> AbstractContextManager[object]:
        """Return a context for an all-gather without messages, on the current stream."""
        if self._gather_stream is not None:  # it may have waited for writes on other streams
            get_current_stream(self.device).wait_stream(self._gather_stream)
        return nullcontext()

    def _get_gather_stream(self) -> Stream:
        if self._gather_stream is None:
            self._gather_stream = make_stream(self.device, priority=-1)
        return self._gather_stream

    def make_gathers_wait(self, event: Event | None = None) -> None:
        """Make later all-gathers wait for an event, or else for the queued computation, such as the optimizer's."""
        if not self.is_async:
            return
        # While a graph is captured, the event may be from before it: ignore it.
        if event is not None and not self.is_capturing:
            self._get_gather_stream().wait_event(event)
        else:
            self._get_gather_stream().wait_stream(get_current_stream(self.device))

    @property
    def is_capturing(self) -> bool:
        """Return True if operations are recorded into a graph."""
        return self.is_async and is_capturing(self.device)

    def record_event(self) -> Event | None:
        """Return an event after the work that is queued on the current stream; None without streams."""
        return record_event(self.device) if self.is_async else None

    def use_reduce_stream(self) -> AbstractContextManager[object]:
        """Return a context with the stream for all reductions; the device must have streams."""
        # The reduce stream waits for the work that is queued now on the current stream.
        if self._reduce_stream is None:
            self._reduce_stream = make_stream(self.device, priority=-1)  # before the next kernels of the backward
        self._reduce_stream.wait_stream(get_current_stream(self.device))
        return use_stream(self._reduce_stream, self.device)

    def use_all_reduce_stream(self) -> AbstractContextManager[object]:
        """Return a context with the stream for sums over replicas, which later reduce-scatters do not wait for."""
        assert self._reduce_stream is not None, "a reduce-scatter is queued"
        if self._all_reduce_stream is None:
            self._all_reduce_stream = make_stream(self.device)
        self._all_reduce_stream.wait_stream(self._reduce_stream)
        return use_stream(self._all_reduce_stream, self.device)


_device_streams: dict[torch.device, DeviceStreams] = {}


def get_device_streams(device: torch.device) -> DeviceStreams:
    """Return the engine's streams on a device, which all roots share."""
    streams = _device_streams.get(device)
    if streams is None:
        streams = _device_streams[device] = DeviceStreams(device)
    return streams


class RateLimiter:
    """Limits all-gathers that run ahead of computation (`limit_all_gathers`)."""

    # An all-gather waits while computation is more than two resharded units behind.

    def __init__(self) -> None:
        self.waits = 0  # all-gathers that had to wait
        self._freed: deque[tuple[DeviceStreams, Event | None]] = deque()

    def record_free_event(self, streams: DeviceStreams) -> None:
        """Record that a unit's memory is free after the work that is queued now."""
        event = streams.record_event()
        if event is None or not streams.is_capturing:
            self._freed.append((streams, event))

    def wait(self) -> None:
        """Wait until another all-gather may start; do nothing while a graph is captured."""
        if len(self._freed) < 2:
            return
        streams, event = self._freed[0]
        if event is not None and streams.is_capturing:
            return
        self.waits += 1
        self._freed.popleft()
        if event is not None:
            event.synchronize()

    def clear(self) -> None:
        """Forget recorded events, without waiting for them."""
        self._freed.clear()
