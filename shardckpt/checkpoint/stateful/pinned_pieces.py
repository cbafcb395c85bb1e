"""Downloads of bytes from devices through two pinned buffers, in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardckpt.devices import Event, has_pinned_memory, record_event

_BUFFERS = 2


class _Piece(NamedTuple):
    buffer: torch.Tensor
    nbytes: int
    events: tuple[Event, ...]


class PinnedPieces:
    """Packer of bytes from devices into pieces; one is copied while another is read.

    The copies are queued on the current stream.

    Args:
        nbytes: Maximum bytes of a piece, and bytes of each of the two buffers.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._copied: deque[_Piece] = deque()
        self._idle: list[torch.Tensor] = []
        self._made = self._used = 0
        self._buffer: torch.Tensor | None = None
        self._devices: set[torch.device] = set()

    def add(self, data: torch.Tensor) -> Iterator[memoryview]:
        """Copy bytes, and yield earlier bytes, valid until the next part is requested.

        Args:
            data: 1-D uint8 tensor on a device.
        """
        start = 0
        while start < data.numel():
            if self._buffer is None or self._used == self._nbytes:
                yield from self._begin_piece()
            assert self._buffer is not None
            stop = min(data.numel(), start + self._nbytes - self._used)
            at, self._used = self._used, self._used + stop - start
            self._buffer[at : self._used].copy_(data[start:stop], non_blocking=True)
            self._devices.add(data.device)
            start = stop

    def flush(self) -> Iterator[memoryview]:
        """Yield the remaining bytes, each part valid until the next one is requested."""
        self._end_piece()
        while self._copied:
            yield from self._read_oldest()

    def _begin_piece(self) -> Iterator[memoryview]:
        self._end_piece()
        if not self._idle and self._made == _BUFFERS:
            yield from self._read_oldest()
        if self._idle:
            self._buffer = self._idle.pop()
        else:
            self._buffer = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=has_pinned_memory())
            self._made += 1

    def _end_piece(self) -> None:
        if self._buffer is not None:
            events = [record_event(device) for device in self._devices]
            self._copied.append(_Piece(self._buffer, self._used, tuple(event for event in events if event is not None)))
        self._buffer, self._used = None, 0
        self._devices.clear()

    def _read_oldest(self) -> Iterator[memoryview]:
        piece = self._copied.popleft()
        for event in piece.events:
            event.synchronize()
        yield memoryview(piece.buffer.numpy())[: piece.nbytes]  # type: ignore[arg-type]
        self._idle.append(piece.buffer)
