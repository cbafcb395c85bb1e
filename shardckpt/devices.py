"""Streams, events and pinned memory of devices. Nothing else in the package asks torch for them.

The names are those of torch: a stream runs what is queued on it in order; an event is a place in a stream that another
stream, or the host, waits for. The CPU has none of them, and the functions do nothing for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

__all__ = [
    "Event",
    "Stream",
    "TorchStreams",
    "copy_to_pinned",
    "get_current_stream",
    "has_pinned_memory",
    "has_streams",
    "is_gpu_used",
    "make_stream",
    "pinned",
    "record_event",
    "record_stream",
    "use_stream",
]


class Event(Protocol):
    """A place in a stream (torch: `torch.cuda.Event`)."""

    def synchronize(self) -> None:
        """Block the host until it is reached."""


class Stream(Protocol):
    """A queue of work on a device (torch: `torch.cuda.Stream`)."""

    def wait_stream(self, stream: Stream) -> None:
        """Run what is queued from now on after what is queued on another stream now."""

    def wait_event(self, event: Event) -> None:
        """Run what is queued from now on after an event."""

    def record_event(self) -> Event:
        """Return an event behind what is queued now."""

    def synchronize(self) -> None:
        """Block the host until what is queued has run."""


class TorchStreams:
    """Streams as torch has them. Tests put another object in the place of `_streams`."""

    def has_streams(self, device: torch.device) -> bool:
        """Return True if a device runs what is queued later than the host."""
        return device.type not in ("cpu", "meta")

    def make(self, device: torch.device, priority: int) -> Stream:
        """Return a new stream."""
        made: Stream = torch.get_device_module(device).Stream(device, priority=priority)
        return made

    def get_current(self, device: torch.device) -> Stream:
        """Return the stream that operations are queued on."""
        found: Stream = torch.get_device_module(device).current_stream(device)
        return found

    def use(self, stream: Stream, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which operations are queued on a stream."""
        context: AbstractContextManager[object] = torch.get_device_module(device).stream(stream)
        return context

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Delay the reuse of a tensor's memory, once freed, until what a stream has queued by then has run."""
        tensor.record_stream(stream)  # type: ignore[arg-type]


_streams = TorchStreams()
_WITHOUT_PINNED_MEMORY = ("mps",)  # it shares its memory with the CPU


def has_streams(device: torch.device) -> bool:
    """Return True if a device runs what is queued later than the host: the one predicate for that."""
    return _streams.has_streams(device)


def make_stream(device: torch.device, priority: int = 0) -> Stream:
    """Return a new stream of a device that has streams.

    Args:
        device: The device.
        priority: Lower numbers go first.
    """
    return _streams.make(device, priority)


def get_current_stream(device: torch.device) -> Stream:
    """Return the stream that operations are queued on, of a device that has streams."""
    return _streams.get_current(device)


def use_stream(stream: Stream, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which operations on a device are queued on a stream."""
    return _streams.use(stream, device) if has_streams(device) else nullcontext()


def record_event(device: torch.device, stream: Stream | None = None) -> Event | None:
    """Return an event behind what is queued now; None without streams.

    Args:
        device: The device.
        stream: A stream of it; None for the current one.
    """
    if not has_streams(device):
        return None
    return (stream or get_current_stream(device)).record_event()


def record_stream(tensor: torch.Tensor, stream: Stream | None = None) -> None:
    """Note that a stream uses a tensor that another one allocated: its memory, once freed, waits for that stream.

    Args:
        tensor: The tensor.
        stream: The stream; None for the current one.
    """
    if has_streams(tensor.device):
        _streams.record(tensor, stream or get_current_stream(tensor.device))


def pinned(tensor: torch.Tensor, wanted: bool = True) -> torch.Tensor:
    """Return a CPU tensor in pinned memory; the same tensor without an accelerator that reads it."""
    if not wanted or not has_pinned_memory() or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


def copy_to_pinned(tensor: torch.Tensor) -> tuple[torch.Tensor, Event | None]:
    """Start to copy a tensor to the CPU; the host may go on.

    Args:
        tensor: On a device with streams.

    Returns:
        The copy, and the event to wait for before it is read.
    """
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=has_pinned_memory())
    copied.copy_(tensor, non_blocking=True)
    return copied, record_event(tensor.device)


def has_pinned_memory() -> bool:
    """Return True if there is an accelerator that copies from and to pinned memory beside the host."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found is not None and found.type not in _WITHOUT_PINNED_MEMORY


def is_gpu_used() -> bool:
    """Return True if this process uses an accelerator already, so that pinned memory pays."""
    found = torch.accelerator.current_accelerator()
    if found is None or found.type in _WITHOUT_PINNED_MEMORY:
        return False
    return bool(torch.get_device_module(found).is_initialized())
