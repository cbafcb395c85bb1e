"""Staging buffers, which the training loop fills and the saver's thread writes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import groupby
from queue import SimpleQueue
from threading import Condition
from threading import Event as Flag
from typing import Generic, NamedTuple, TypeVar

import torch

from shardckpt.boxes import contiguous_blocks, full_box, narrow_to_box
from shardckpt.checkpoint.stateful.tensor_bytes import (
    TensorSource,
    is_flat,
    join_small,
    view_as_bytes,
)
from shardckpt.devices import (
    Event,
    Stream,
    defer_wait,
    get_current_stream,
    has_streams,
    is_gpu_used,
    make_stream,
    record_stream,
    use_stream,
)
from shardckpt.errors import UsageError
from shardckpt.manifest import Path
from shardckpt.native.payload import FileLayout, PayloadFile
from shardckpt.torchrun import local_world_size

# Bytes per buffer within a budget, unless that is small; copying threads synchronize once per buffer.
BUFFER_BYTES = 64 << 20

# Bytes per buffer without a budget: unused memory is not taken then. While other threads run Python code, the writing
# thread waits for the interpreter's lock a few times per buffer (docs/decisions/0033).
UNBOUNDED_BUFFER_BYTES = 256 << 20

LEAST_BUDGET_BYTES = 1 << 20

_LEAST_BUFFERS = 4  # number of buffers in a small budget: some are filled while others are written
_PART_BYTES = 1 << 20  # bytes per copy of a non-contiguous tensor, in addition to the budget

_LOG = logging.getLogger("shardckpt")
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

T = TypeVar("T")


def default_budget() -> int | None:
    """Return the default budget for a rank's buffers in bytes; None for no limit."""
    if not is_gpu_used():
        return None
    # With a GPU the buffers are pinned: they share half the machine's memory with its other ranks.
    ranks = local_world_size() or torch.accelerator.device_count() or 1
    return max(memory_size() // 2 // ranks, LEAST_BUDGET_BYTES)


def memory_size() -> int:
    """Return this machine's memory, or this container's limit, in bytes."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError), open(name, encoding="ascii") as file:
            size = min(size, int(file.read()))
    return size


def buffer_size(budget: int | None) -> int:
    """Return each buffer's size in bytes: a power of two, as for pinned memory."""
    if budget is None:
        return UNBOUNDED_BUFFER_BYTES
    if budget < LEAST_BUDGET_BYTES:
        raise UsageError(
            "`max_staging_bytes` is too small to stage a save", found=f"{budget} bytes", expected="1 MiB or more"
        )
    return min(BUFFER_BYTES, 1 << (budget // _LEAST_BUFFERS).bit_length() - 1)


class BufferPool(Generic[T]):
    """Equally large buffers within a budget, kept between saves."""

    # One thread takes buffers, another one gives them back.

    def __init__(self, make: Callable[[int], T], is_outdated: Callable[[T], bool] = lambda _: False) -> None:
        self._make, self._is_outdated = make, is_outdated
        self.made = 0  # buffers ever created
        self.forget()

    def forget(self) -> None:
        """Release every buffer."""
        self._changed = Condition()
        self._size = 0
        self._most: int | None = None
        self._all: list[T] = []
        self._idle: list[T] = []
        self._is_closed = True
        self.copies: tuple[Event, ...] = ()  # after the last save's copies into the buffers

    @property
    def nbytes(self) -> int:
        """Bytes in all buffers."""
        return len(self._all) * self._size

    def open(self, budget: int | None) -> None:
        """Start a save: mark all buffers as idle, and drop buffers that exceed the budget in bytes."""
        for event in self.copies:
            event.synchronize()  # a failed save may still be writing to a buffer
        size = buffer_size(budget)
        with self._changed:
            self._all = [] if size != self._size else [buffer for buffer in self._all if not self._is_outdated(buffer)]
            self._size = size
            self._most = None if budget is None else budget // size
            if self._most is not None:
                del self._all[self._most :]
            self._idle = self._all[::-1]
            self._is_closed = False

    def count_missing(self, file_bytes: Iterable[int]) -> int:
        """Return the bytes of new buffers that files with these sizes need. Files do not share buffers."""
        with self._changed:
            needed = sum(-(-nbytes // self._size) for nbytes in file_bytes)
            most = needed if self._most is None else min(needed, self._most)
            return max(most - len(self._all), 0) * self._size

    def take(self, *, wait: bool) -> T | None:
        """Return an idle or a new buffer; None if the budget is used up, or the pool was closed during a wait."""
        with self._changed:
            if self._is_closed:
                return None
            if self._idle:
                return self._idle.pop()
            if self._most is None or len(self._all) < self._most:
                return self._added()
            if wait:
                self._changed.wait_for(lambda: self._idle or self._is_closed)
            return self._idle.pop() if self._idle and not self._is_closed else None

    def _added(self) -> T:
        block = self._make(self._size)
        self._all.append(block)
        self.made += 1
        return block

    def give(self, block: T) -> None:
        """Give a buffer back to the pool."""
        with self._changed:
            self._idle.append(block)
            self._changed.notify()

    def close(self) -> None:
        """Close the pool: a waiting `take` returns None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class StagingBuffer(NamedTuple):
    """Staging buffer in CPU memory."""

    tensor: torch.Tensor  # 1-D, uint8
    view: memoryview  # the same bytes
    is_pinned: bool  # copies from a GPU are asynchronous


def make_buffer(nbytes: int) -> StagingBuffer:
    """Return a buffer with `nbytes` bytes, pinned if this process uses a GPU."""
    is_pinned = is_gpu_used()
    with torch.inference_mode(False):  # a buffer outlives the caller's inference mode
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    return StagingBuffer(tensor, memoryview(tensor.numpy()), is_pinned)  # type: ignore[arg-type]


def is_unpinned(buffer: StagingBuffer) -> bool:
    """Return True if a buffer was created before this process used a GPU."""
    return not buffer.is_pinned and is_gpu_used()


class _Filled(NamedTuple):
    block: StagingBuffer
    nbytes: int
    ends_file: bool
    events: tuple[Event, ...]
    deferred: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # copies that are not queued yet: into, from


class _NobodyWritesError(Exception):
    """The saver's thread has ended and does not write any more buffers."""


class StagingArea:
    """Staging area for an asynchronous save: buffers with a rank's files, in order."""

    # The first byte is written once the budget is used up: copies and writes would compete for memory bandwidth. After
    # that, each written buffer is filled again.
    # Copies from a device are queued: the thread waits for each buffer before it writes it. The device waits for them
    # before it runs work that is queued later on the current stream. Only writers wait for copies that are deferred:
    # those are queued after all others.

    def __init__(self, pool: BufferPool[StagingBuffer], budget: int | None) -> None:
        pool.open(budget)  # nothing else uses the pool until the save ends
        self._pool = pool
        self._queue: SimpleQueue[_Filled | Exception] = SimpleQueue()
        self._is_copied = Flag()
        self._filled: list[_Filled] = []
        self._block: StagingBuffer | None = None
        self._used = 0
        self._deferred: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._streams = SideStreams(())
        self.rounds = 0  # times that buffers were queued for the writing thread: one more than the training loop waited
        self.is_filled = False

    # Methods for the training loop

    def fill(self, files: Sequence[FileLayout], state: TensorSource, deferred: Set[Path] = frozenset()) -> None:
        """Copy the contents of files; after this the state may change, also by work queued on the current stream."""
        # Before a write to the arrays in `deferred`, call `wait_for_deferred_copies`.
        self._log_pinning([file.nbytes for file in files])
        self._streams = SideStreams(state.devices)
        try:
            with self._streams.copying():
                for file in files:
                    for is_deferred, chunks in groupby(file.chunks, lambda chunk: chunk.path in deferred):
                        for part in join_small(state.views(list(chunks))):
                            if isinstance(part, bytes):
                                self._put_bytes(memoryview(part))
                            else:
                                self._put(part, is_deferred=is_deferred)
                    self._end_block(ends_file=True)
            self.is_filled = True
            with self._streams.copying(defers_wait=True) if deferred else nullcontext():
                self._hand_over()
        except _NobodyWritesError:
            return
        finally:
            self._pool.copies = self._streams.record_events()

    def _log_pinning(self, file_bytes: Sequence[int]) -> None:
        missing = self._pool.count_missing(file_bytes) if is_gpu_used() else 0
        if missing:
            _LOG.info(
                "async_save pins %.1f MB more of this machine's memory on this rank, %.1f MB in all, and keeps it for"
                " the next save; `max_staging_bytes` bounds it",
                missing / 1e6,
                (self._pool.nbytes + missing) / 1e6,
            )

    def fail(self, error: Exception) -> None:
        """Send the writing thread the error that ended the copy."""
        self._queue.put(error)
        self._is_copied.set()

    def _put(self, tensor: torch.Tensor, *, is_deferred: bool) -> None:
        if not tensor.numel():
            return
        if is_flat(tensor):
            self._put_flat(view_as_bytes(tensor), is_deferred=is_deferred and has_streams(tensor.device))
            return
        for box in contiguous_blocks(full_box(tuple(tensor.shape)), _PART_BYTES // tensor.element_size()):
            self._put_flat(view_as_bytes(narrow_to_box(tensor, box).resolve_conj().resolve_neg().contiguous()))

    def _put_flat(self, data: torch.Tensor, *, is_deferred: bool = False) -> None:
        for start, stop, block, at in self._spans(data.numel()):
            into, part = block.tensor[at : at + stop - start], data[start:stop]
            if is_deferred:
                self._deferred.append((into, part))
            else:
                # A copy from a GPU is asynchronous; `blocks` waits for it. Without pinned memory there may be no event.
                into.copy_(part, non_blocking=block.is_pinned)

    def _put_bytes(self, data: memoryview) -> None:
        for start, stop, block, at in self._spans(len(data)):
            block.view[at : at + stop - start] = data[start:stop]

    def _spans(self, nbytes: int) -> Iterator[tuple[int, int, StagingBuffer, int]]:
        """Yield byte ranges (start, stop), each with its buffer and offset in it."""
        start = 0
        while start < nbytes:
            block = self._block
            if block is None or self._used == len(block.view):
                block = self._next_block()
            stop = min(nbytes, start + len(block.view) - self._used)
            at, self._used = self._used, self._used + stop - start
            yield start, stop, block, at
            start = stop

    def _next_block(self) -> StagingBuffer:
        self._end_block(ends_file=False)
        block = self._pool.take(wait=False)
        if block is None:
            self._hand_over()
            block = self._pool.take(wait=True)
        if block is None:
            raise _NobodyWritesError
        self._block = block
        return block

    def _end_block(self, *, ends_file: bool) -> None:
        if self._block is not None:
            events = () if self._deferred else self._streams.record_events()
            self._filled.append(_Filled(self._block, self._used, ends_file, events, tuple(self._deferred)))
        self._block, self._used = None, 0
        self._deferred.clear()

    def _hand_over(self) -> None:
        self.rounds += 1
        for filled in self._filled:
            self._queue.put(self._copy_deferred(filled) if filled.deferred else filled)
        self._filled.clear()
        self._is_copied.set()

    def _copy_deferred(self, filled: _Filled) -> _Filled:
        for into, part in filled.deferred:
            into.copy_(part, non_blocking=filled.block.is_pinned)
            record_stream(part)  # the state may be freed before a writer waits
        return filled._replace(events=self._streams.record_events(), deferred=())

    # Methods for the saver's thread

    def wait(self) -> None:
        """Wait until the first buffers are copied, or `fail` is called."""
        # Until then, Python code of the saver's thread would take the interpreter's lock from the training loop.
        self._is_copied.wait()

    def blocks(self, payload: PayloadFile) -> Iterator[memoryview]:
        """Yield the next file's contents after its header; each part is valid until the next request."""
        if not payload.has_data:
            return
        while True:
            got = self._queue.get()
            if isinstance(got, Exception):
                raise got
            for event in got.events:
                event.synchronize()
            yield got.block.view[: got.nbytes]
            self._pool.give(got.block)
            if got.ends_file:
                return

    def close(self) -> None:
        """Release the copying thread: buffers are not written any more."""
        self._pool.close()


_side_streams: dict[torch.device, Stream] = {}  # side stream of each device, kept between saves

os.register_at_fork(after_in_child=_side_streams.clear)


class SideStreams:
    """Side streams for copying one state."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = {device: _side_stream(device) for device in devices if has_streams(device)}

    @contextmanager
    def copying(self, *, defers_wait: bool = False) -> Iterator[None]:
        """Queue the context's copies on the side streams; the host does not wait."""
        # Copies run after the work queued on the current streams so far.
        current = {device: get_current_stream(device) for device in self._streams}
        for device, stream in self._streams.items():
            stream.wait_stream(current[device])
        is_deferred = False
        try:
            with ExitStack() as stack:
                for device, stream in self._streams.items():
                    stack.enter_context(use_stream(stream, device))
                yield
            is_deferred = defers_wait
        finally:
            # Work queued later runs after the copies, also if the context raises; or writers wait for them.
            for device, stream in self._streams.items():
                event = stream.record_event()
                if is_deferred:
                    defer_wait(device, event)
                else:
                    current[device].wait_event(event)

    def record_events(self) -> tuple[Event, ...]:
        """Return one event per stream, recorded after its queued copies."""
        return tuple(stream.record_event() for stream in self._streams.values())


def _side_stream(device: torch.device) -> Stream:
    if device not in _side_streams:
        _side_streams[device] = make_stream(device)
    return _side_streams[device]
