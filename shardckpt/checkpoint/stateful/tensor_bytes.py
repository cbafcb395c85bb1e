"""Tensor bytes in row-major order, as views if possible or as staged copies.

Copies from devices are in pinned memory.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch

from shardckpt.boxes import Box, contiguous_blocks, full_box, intersect, narrow_to_box, shift
from shardckpt.devices import Event, has_pinned_copies, has_pinned_memory, record_event
from shardckpt.native.payload import PayloadChunk
from shardckpt.state.local.tensor_shards import TensorShards

STAGED_BYTES = 16 << 20  # bytes per staged copy of a tensor that is not contiguous in CPU memory
_JOINED_BYTES = 256 << 10  # bytes of small tensors per joint copy
_MANY_ALIKE = 8  # least number of small tensors of one shape that are copied with one call

_KIND = attrgetter("dtype", "shape", "is_cpu")

_REDUCED_BYTES = 4 << 20  # bytes of a tensor that are reduced at a time; each takes up to eight times its size
_GOLDEN, _ODD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # factors of `sum_rows`

# Maximum size in bytes of a small tensor, which is copied and written with others; views would be slower.
SMALL_BYTES = 64 << 10


class TensorSource(Protocol):
    """A state's tensors on this rank."""

    @property
    def devices(self) -> set[torch.device]:
        """The tensors' devices."""

    def views(self, chunks: Sequence[PayloadChunk], /) -> Iterable[torch.Tensor]:
        """Return the chunks' elements."""


def view_box(array: TensorShards, box: Box) -> torch.Tensor:
    """Return an array box's elements, as a view of this rank's shard."""
    for shard in array.shards:
        if shard.box == box:
            return shard.tensor
        if box.volume and intersect(shard.box, box) == box:
            return narrow_to_box(shard.tensor, shift(box, shard.box.offset))
    assert not box.volume, "a plan gives a rank only what it holds"
    return torch.empty(0, dtype=torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in row-major order, as views if possible."""
    return iter_bytes((tensor,), tensor.nbytes)


def iter_bytes(tensors: Iterable[torch.Tensor], most: int = STAGED_BYTES) -> Iterator[memoryview]:
    """Yield the tensors' bytes in row-major order."""
    # Each part is valid until the next one is requested. Tensors on a device are copied through two pinned buffers of
    # 16 MiB each: one is filled while the other is read.
    pieces = PinnedPieces(max(min(STAGED_BYTES, most), 1))
    for part in join_small(tensors):
        if isinstance(part, torch.Tensor) and not part.is_cpu and has_pinned_copies(part.device):
            for flat in (part,) if is_flat(part) else _flat_copies(part):
                yield from pieces.add(view_as_bytes(flat))
            continue
        yield from pieces.flush()
        if isinstance(part, bytes):
            yield memoryview(part)
        else:
            yield from _host_bytes(part)
    yield from pieces.flush()


def _host_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    if is_flat_on_cpu(tensor):
        yield flat_bytes(tensor)
        return
    for part in _flat_copies(tensor):
        yield flat_bytes(part.cpu())


def _flat_copies(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in parts that are flat, on its device."""
    for box in contiguous_blocks(full_box(tuple(tensor.shape)), max(STAGED_BYTES // tensor.element_size(), 1)):
        yield narrow_to_box(tensor, box).resolve_conj().resolve_neg().contiguous()


def join_small(tensors: Iterable[torch.Tensor]) -> Iterator[bytes | torch.Tensor]:
    """Yield tensors in order; consecutive small tensors in CPU memory as joint bytes or one tensor."""
    # A call per small tensor would take several times as long as the copy.
    small: list[torch.Tensor] = []
    nbytes = 0
    for _, group in groupby(tensors, _KIND):
        alike = list(group)
        if len(alike) >= _MANY_ALIKE and alike[0].is_cpu and 0 < alike[0].nbytes <= SMALL_BYTES:
            if small:
                yield _join(small)
                small, nbytes = [], 0
            yield from _stack(alike)
            continue
        for tensor in alike:
            is_small = tensor.nbytes <= SMALL_BYTES and is_flat_on_cpu(tensor)
            if is_small:
                small.append(tensor)
                nbytes += tensor.nbytes
            if small and (not is_small or nbytes >= _JOINED_BYTES):
                yield _join(small)
                small, nbytes = [], 0
            if not is_small:
                yield tensor
    if small:
        yield _join(small)


def _stack(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield joint copies of small tensors with one shape and dtype."""
    count = max(_JOINED_BYTES // tensors[0].nbytes, 1)
    for start in range(0, len(tensors), count):
        with torch.no_grad():
            joined = torch.stack(tensors[start : start + count])  # type: ignore[arg-type]
        yield joined


def _join(tensors: Sequence[torch.Tensor]) -> bytes:
    return b"".join([ctypes.string_at(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])


def find_memory(tensor: torch.Tensor) -> Hashable:
    """Return a key, equal for tensors with the same elements in the same memory."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return (tensor.device, tensor.data_ptr(), shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def is_flat(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory is its elements in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_flat_on_cpu(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory is its elements in row-major order, on the CPU."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor's memory as a uint8 tensor."""
    # If a tensor has one element, `view(-1)` would keep a stride other than 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a flat tensor's memory; a write changes the tensor."""
    if tensor.dtype in _PLAIN and tensor.numel():
        return memoryview((tensor.detach() if tensor.requires_grad else tensor).numpy()).cast("B")  # type: ignore[arg-type]
    return memoryview(view_as_bytes(tensor).numpy())  # type: ignore[arg-type]


# Dtypes that memoryview supports.
_PLAIN = frozenset(
    {
        *(torch.float16, torch.float32, torch.float64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)


_PINNED_BUFFERS = 2


class _Piece(NamedTuple):
    buffer: torch.Tensor
    nbytes: int
    events: tuple[Event, ...]


class PinnedPieces:
    """Packs device bytes into pieces; one is copied, on the current stream, while another is read."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._copied: deque[_Piece] = deque()
        self._idle: list[torch.Tensor] = []
        self._made = self._used = 0
        self._buffer: torch.Tensor | None = None
        self._devices: set[torch.device] = set()

    def add(self, data: torch.Tensor) -> Iterator[memoryview]:
        """Copy bytes, and yield earlier bytes, valid until the next part is requested."""
        start = 0
        while start < data.numel():
            if self._buffer is None or self._used == self._nbytes:
                yield from self._start_piece()
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

    def _start_piece(self) -> Iterator[memoryview]:
        self._end_piece()
        if not self._idle and self._made == _PINNED_BUFFERS:
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


@torch.no_grad()
def sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return an integer sum for each row, `(row,)`: a digest of its bytes and their places."""
    flat = rows.detach().resolve_conj().resolve_neg().contiguous()
    data = view_as_bytes(flat).view(rows.shape[0], -1)
    width = next(size for size in (8, 4, 2, 1) if data.shape[1] % size == 0)
    if data.storage_offset() % width:
        data = data.clone()
    words = data.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    total = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
    step = max(_REDUCED_BYTES // (width * max(rows.shape[0], 1)), 1)
    for start in range(0, words.shape[1], step):
        part = words[:, start : start + step].to(torch.int64)
        places = torch.arange(start, start + part.shape[1], dtype=torch.int64, device=rows.device)
        mixed = (part ^ (places * _GOLDEN)) * _ODD
        mixed ^= mixed >> 31
        mixed *= _GOLDEN
        total += (mixed ^ (mixed >> 29)).sum(1)
    return total
