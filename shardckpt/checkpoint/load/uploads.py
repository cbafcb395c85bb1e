"""Cast loaded elements, and upload them to devices through two pinned buffers, in turn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from queue import SimpleQueue
from typing import NamedTuple

import torch

from shardckpt.boxes import Box, contiguous_blocks, full_box, narrow_to_box
from shardckpt.checkpoint.stateful.tensor_bytes import STAGED_BYTES
from shardckpt.devices import CurrentStreams, Event, has_pinned_memory, record_event
from shardckpt.errors import PrecisionError
from shardckpt.manifest import TensorEntry, dotted

__all__ = ["PINNED_BYTES", "PlacedUpload", "Upload", "UploadBuffers", "copy_cast", "copy_to_device", "place_uploads"]

PINNED_BYTES = 64 << 20  # maximum bytes of each of the two buffers into which files are read

_ALIGNMENT_BYTES = 64
_BUFFERS = 2


class Upload(NamedTuple):
    """Elements to read into a tensor on a device."""

    entry: TensorEntry  # entry of the array in the checkpoint
    box: Box
    tensor: torch.Tensor  # target on the device

    @property
    def stored(self) -> torch.dtype:
        """Dtype in the files."""
        stored: torch.dtype = getattr(torch, self.entry.stored)
        return stored

    @property
    def needs_cast(self) -> bool:
        """Whether the dtypes in the files and on the device differ."""
        return self.entry.dtype != self.entry.stored or self.tensor.dtype != self.stored

    @property
    def element_bytes(self) -> int:
        """Buffer bytes per element, including the copy after a cast."""
        return self.stored.itemsize + (self.tensor.dtype.itemsize if self.needs_cast else 0)

    @property
    def most_elements(self) -> int:
        """Maximum elements per buffer."""
        return (PINNED_BYTES - 2 * _ALIGNMENT_BYTES) // self.element_bytes

    @property
    def nbytes(self) -> int:
        """Buffer bytes that the upload needs."""
        return prod(self.tensor.shape) * self.element_bytes + 2 * _ALIGNMENT_BYTES


@dataclass(frozen=True)
class PlacedUpload:
    """Upload with its memory in a buffer."""

    upload: Upload  # elements and their target
    values: torch.Tensor  # part of the buffer into which the elements are read
    cast: torch.Tensor | None  # part of the buffer for the elements after a cast; None without a cast

    def start(self) -> None:
        """Start the copy to the device, on the current stream."""
        values, entry = self.values, self.upload.entry
        if self.cast is not None:
            copy_cast(values.to(getattr(torch, entry.dtype)), self.cast, entry)
            values = self.cast
        with torch.no_grad():
            self.upload.tensor.copy_(values, non_blocking=True)


class UploadBuffers:
    """Two pinned buffers for the threads of one load."""

    # Threads copy on the streams that are current when the object is created.

    def __init__(self, nbytes: int, devices: Iterable[torch.device]) -> None:
        self._nbytes = nbytes
        self._streams = CurrentStreams(devices)
        self._idle: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        for _ in range(_BUFFERS):
            self._idle.put(None)

    @contextmanager
    def take(self) -> Iterator[torch.Tensor]:
        """Wait for a buffer and yield it; on exit, wait for the copies from it."""
        buffer = self._idle.get()
        try:
            if buffer is None:
                buffer = _pinned_bytes(self._nbytes)
            with self._streams.use():
                try:
                    yield buffer
                finally:
                    for event in self._streams.record_events():
                        event.synchronize()
        finally:
            self._idle.put(buffer)


def place_uploads(uploads: Sequence[Upload], buffer: torch.Tensor) -> list[PlacedUpload]:
    """Assign places in a buffer, which must be large enough, to uploads."""
    placed, at = [], 0
    for upload in uploads:
        shape = tuple(upload.tensor.shape)
        values, at = _take(buffer, at, shape, upload.stored)
        cast = None
        if upload.needs_cast:
            cast, at = _take(buffer, at, shape, upload.tensor.dtype)
        placed.append(PlacedUpload(upload, values, cast))
    return placed


def copy_to_device(values: torch.Tensor, tensor: torch.Tensor, entry: TensorEntry) -> None:
    """Copy elements to a device on the current stream, and wait for the copy."""
    if values.dtype != tensor.dtype:
        cast = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        copy_cast(values, cast, entry)
        values = cast
    most = max(STAGED_BYTES // values.element_size(), 1)
    buffers = [_pinned_bytes(min(STAGED_BYTES, values.nbytes)) for _ in range(_BUFFERS)]
    copied: deque[Event | None] = deque()
    for number, box in enumerate(contiguous_blocks(full_box(tuple(values.shape)), most)):
        if len(copied) == _BUFFERS:
            _wait(copied.popleft())
        piece, _ = _take(buffers[number % _BUFFERS], 0, box.size, values.dtype)
        piece.copy_(narrow_to_box(values, box))
        with torch.no_grad():
            narrow_to_box(tensor, box).copy_(piece, non_blocking=True)
        copied.append(record_event(tensor.device))
    while copied:
        _wait(copied.popleft())


def _wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()


def _take(buffer: torch.Tensor, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Return a tensor in a buffer, and the next one's offset in bytes."""
    stop = at + prod(shape) * dtype.itemsize
    return buffer[at:stop].view(dtype).view(shape), -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _pinned_bytes(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=has_pinned_memory())


def copy_cast(values: torch.Tensor, into: torch.Tensor, entry: TensorEntry) -> None:
    """Copy elements to a target and cast them; a value that its dtype cannot represent is an error."""
    with torch.no_grad():
        lost = _copy(values, into)
    if lost is not None:
        raise PrecisionError(
            "a value does not fit the type that it is cast to",
            where=dotted(entry.path),
            found=f"{values[lost].flatten()[0].item()} of {_name(values)}",
            expected=_name(into),
            fix="Load it in a wider type." if into.is_complex() or not values.is_complex() else "Load it as complex.",
        )


def _copy(values: torch.Tensor, into: torch.Tensor) -> torch.Tensor | None:
    """Copy elements; return a mask for elements that changed too much, or None."""
    if values.is_complex() and not into.is_complex():
        lost = values.imag != 0  # NaN too
        return lost if lost.any() else _copy(values.real, into)
    if into.is_complex() and values.dtype != into.dtype:
        parts = torch.view_as_real(into)
        if values.is_complex():
            lost_parts = _copy(torch.view_as_real(values.resolve_conj()), parts)
            return None if lost_parts is None else lost_parts.any(-1)
        parts[..., 1] = 0
        return _copy(values, parts[..., 0])
    into.copy_(values)
    if _holds_all(into.dtype, values.dtype):
        return None
    lost = _lost(values, into.to(values.device))
    return lost if lost.any() else None


def _holds_all(wanted: torch.dtype, stored: torch.dtype) -> bool:
    """Return True if a real dtype represents another's values, up to rounding."""
    if stored in (wanted, torch.bool):
        return True
    if wanted.is_floating_point:
        most = torch.finfo(stored).max if stored.is_floating_point else torch.iinfo(stored).max
        return torch.finfo(wanted).max >= most
    if wanted == torch.bool or stored.is_floating_point:
        return False
    room, used = torch.iinfo(wanted), torch.iinfo(stored)
    return room.min <= used.min and used.max <= room.max


def _lost(values: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
    """Return a mask for elements that changed by more than rounding."""
    if cast.dtype.is_floating_point:
        wide = values.double()
        return wide.isfinite() & (~cast.float().isfinite() | (wide.abs() > _largest(cast.dtype)))
    return ~((cast.double() - values.double()).abs() < 1)


def _largest(dtype: torch.dtype) -> float:
    """Return the largest number that rounds to a dtype's maximum; some saturate."""
    info = torch.finfo(dtype)
    return info.max + info.eps / 2 * 2.0 ** (math.frexp(info.max)[1] - 1)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
