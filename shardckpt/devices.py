"""Streams, events, pinned memory and device errors.

No other module in the package uses torch's functions for them. The terms are torch's: a stream runs its queued
operations in order; an event is a position in a stream, for which another stream or the host can wait. The CPU has no
streams: for it the functions do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from threading import get_ident
from typing import Any, Protocol

import torch

from shardckpt.torch_features import find_accelerator

__all__ = [
    "CurrentStreams",
    "Event",
    "Stream",
    "TorchStreams",
    "copy_to_pinned",
    "defer_wait",
    "find_generators",
    "get_current_stream",
    "has_deferred_waits",
    "has_float64",
    "has_pinned_copies",
    "has_pinned_memory",
    "has_streams",
    "is_capturing",
    "is_device_error",
    "is_gpu_used",
    "is_out_of_memory",
    "make_stream",
    "pinned",
    "record_event",
    "record_stream",
    "use_stream",
    "wait_for_deferred_copies",
]


class Event(Protocol):
    """A position in a stream (torch: `torch.cuda.Event`)."""

    def synchronize(self) -> None:
        """Block the host until the stream reaches the event."""

    def query(self) -> bool:
        """Return True if the stream has reached the event."""


class Stream(Protocol):
    """A queue of operations on a device (torch: `torch.cuda.Stream`)."""

    def wait_stream(self, stream: Stream) -> None:
        """Run future operations after the work that another stream has queued so far."""

    def wait_event(self, event: Event) -> None:
        """Run this stream's future operations after an event."""

    def record_event(self) -> Event:
        """Return an event after the operations that are queued so far."""

    def synchronize(self) -> None:
        """Block the host until all queued operations have run."""


class TorchStreams:
    """Torch's streams. Tests replace `_streams` with another object."""

    def has_streams(self, device: torch.device) -> bool:
        """Return True if a device runs operations asynchronously to the host."""
        return _has_stream_functions(device.type)

    def make(self, device: torch.device, priority: int) -> Stream:
        """Return a new stream."""
        made: Stream = torch.get_device_module(device).Stream(device, priority=priority)
        return made

    def get_current(self, device: torch.device) -> Stream:
        """Return the stream that operations are queued on now."""
        found: Stream = torch.get_device_module(device).current_stream(device)
        return found

    def use(self, stream: Stream, device: torch.device) -> AbstractContextManager[object]:
        """Return a context manager that queues operations on a stream."""
        context: AbstractContextManager[object] = torch.get_device_module(device).stream(stream)
        return context

    def set_device(self, device: torch.device) -> None:
        """Make a device this thread's current one."""
        torch.get_device_module(device).set_device(device)

    def is_capturing(self, device: torch.device) -> bool:
        """Return True if operations are recorded into a graph instead of queued."""
        asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Delay the reuse of a freed tensor's memory until the stream has finished its queued work."""
        tensor.record_stream(stream)  # type: ignore[arg-type]


@cache
def _has_stream_functions(kind: str) -> bool:
    """Return False for the CPU, meta tensors, and devices such as "mps" for which torch has no streams."""
    if kind in ("cpu", "meta"):
        return False
    try:
        module = torch.get_device_module(torch.device(kind))
    except RuntimeError:  # an unknown device: no module is registered
        return False
    return all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))


_streams = TorchStreams()
_WITHOUT_PINNED_MEMORY = ("mps",)  # the device shares its memory with the CPU
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory")
_DEVICE_ERROR_TEXTS = ("cuda error", "hip error")  # of torch before `AcceleratorError`, and of NCCL


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a device or the host is out of memory, also for NCCL errors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(text in str(error).lower() for text in _OUT_OF_MEMORY_TEXTS)


def is_device_error(error: BaseException) -> bool:
    """Return True for a device error: an earlier queued operation failed."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    return any(text in str(error).lower() for text in _DEVICE_ERROR_TEXTS)


def has_streams(device: torch.device) -> bool:
    """Return True if a device runs operations asynchronously to the host."""
    return _streams.has_streams(device)


def make_stream(device: torch.device, priority: int = 0) -> Stream:
    """Return a new stream on a device, which must have streams. Lower priorities run first."""
    return _streams.make(device, priority)


def get_current_stream(device: torch.device) -> Stream:
    """Return the stream that operations are queued on now. The device must have streams."""
    return _streams.get_current(device)


def use_stream(stream: Stream, device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that queues a device's operations on a stream."""
    return _streams.use(stream, device) if has_streams(device) else nullcontext()


def is_capturing(device: torch.device) -> bool:
    """Return True if operations on a device are recorded into a graph (`torch.cuda.graph`) instead of queued."""
    # While recording, the host cannot wait for operations, and streams cannot wait for earlier events.
    return has_streams(device) and _streams.is_capturing(device)


def record_event(device: torch.device) -> Event | None:
    """Return an event after the operations queued so far; None without streams."""
    return get_current_stream(device).record_event() if has_streams(device) else None


def record_stream(tensor: torch.Tensor) -> None:
    """Record that this stream uses another stream's tensor, so that its memory is reused only after that."""
    if has_streams(tensor.device):
        _streams.record(tensor, get_current_stream(tensor.device))


# Events that the current streams do not wait for yet: copies of tensors that few functions write. Each waits first.
_deferred: dict[torch.device, Event] = {}

os.register_at_fork(after_in_child=_deferred.clear)


def defer_wait(device: torch.device, event: Event) -> None:
    """Let `wait_for_deferred_copies` wait for an event; it replaces the device's earlier one, which comes before it."""
    _deferred[device] = event


def has_deferred_waits() -> bool:
    """Return True if a writer still has to wait."""
    return bool(_deferred)


def wait_for_deferred_copies() -> None:
    """Make the current streams wait for deferred events, before a write; the host does not wait."""
    for device, event in list(_deferred.items()):
        # A graph that is captured writes only when it is replayed, and cannot wait for an event from before it.
        if is_capturing(device):
            continue
        get_current_stream(device).wait_event(event)
        if event.query() and _deferred.get(device) is event:  # until then, writers on other streams wait too
            del _deferred[device]


class CurrentStreams:
    """One thread's current streams, for other threads that work for it."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = {device: get_current_stream(device) for device in set(devices) if has_streams(device)}
        self._thread = get_ident()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Return a context manager that queues operations on these streams, on any thread."""
        with ExitStack() as stack:
            for device, stream in self._streams.items():
                # The end of the context chooses the thread's device again. On a new thread that is GPU 0, and to choose
                # it opens a context there.
                if get_ident() != self._thread:
                    _streams.set_device(device)
                stack.enter_context(use_stream(stream, device))
            yield

    def record_events(self) -> tuple[Event, ...]:
        """Return an event on each stream, after the operations that are queued so far."""
        return tuple(stream.record_event() for stream in self._streams.values())


@cache
def has_float64(device: torch.device) -> bool:
    """Return True if a device computes in float64: MPS and some of Intel's GPUs do not."""
    if device.type in ("cpu", "mps"):
        return device.type == "cpu"
    read = getattr(torch.get_device_module(device), "get_device_properties", None)
    return read is None or bool(getattr(read(device), "has_fp64", True))


def pinned(tensor: torch.Tensor, wanted: bool = True) -> torch.Tensor:
    """Return a CPU tensor in pinned memory, if an accelerator can read it; otherwise the same tensor."""
    if not wanted or not has_pinned_memory() or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


def copy_to_pinned(tensor: torch.Tensor) -> tuple[torch.Tensor, Event | None]:
    """Start to copy a tensor to the CPU; return the copy and the event to wait for before reading it."""
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_pinned_memory())
    copied.copy_(tensor, non_blocking=True)
    return copied, record_event(tensor.device)


def has_pinned_memory() -> bool:
    """Return True if an accelerator copies to and from pinned memory."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found is not None and found.type not in _WITHOUT_PINNED_MEMORY


def has_pinned_copies(device: torch.device) -> bool:
    """Return True if copies between a device and pinned memory run while the host continues."""
    return has_streams(device) and is_gpu_used()


def is_gpu_used() -> bool:
    """Return True if this process already uses an accelerator: then pinned memory is worth its cost."""
    found = find_accelerator()
    if found is None or found.type in _WITHOUT_PINNED_MEMORY:
        return False
    return bool(torch.get_device_module(found).is_initialized())


def find_generators(*, in_use: bool) -> dict[str, Any]:
    """Return the accelerator's module with `get_rng_state` and `set_rng_state`, by its kind; empty without one."""
    found = find_accelerator()
    module = None if found is None else torch.get_device_module(found)
    is_available = getattr(module, "is_available", lambda: False)
    # `torch.mps` cannot report whether it is in use: it counts as in use.
    is_there = getattr(module, "is_initialized", is_available) if in_use else is_available
    return {found.type: module} if found is not None and is_there() else {}
