"""Reused buffers between the training loop, which copies into them, and the saver's thread, which writes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Condition
from typing import Generic, NamedTuple, TypeVar

import torch

from shardckpt.boxes import contiguous_blocks, full_box
from shardckpt.checkpoint.save.side_streams import SideStreams, wait_for_side_streams
from shardckpt.checkpoint.stateful.tensor_bytes import (
    is_flat,
    join_small,
    narrow_to_box,
    view_as_bytes,
    view_box,
)
from shardckpt.devices import Event, is_gpu_used
from shardckpt.errors import UsageError
from shardckpt.format.native.payload import FileLayout, PayloadFile
from shardckpt.manifest import Path
from shardckpt.state.local.local_shards import TensorShards

BUFFER_BYTES = 64 << 20
"""Bytes of a buffer, where the budget is not small: threads that copy meet once a buffer, and wait for each other."""

LEAST_BUDGET_BYTES = 1 << 20

_LEAST_BUFFERS = 4
"""Buffers in a small budget: some are filled while others are written."""

_PART_BYTES = 1 << 20
"""Bytes of a tensor that is not contiguous that are copied at a time, besides the budget."""

_LOG = logging.getLogger("shardckpt")
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

T = TypeVar("T")


def default_budget() -> int | None:
    """Return how many bytes the buffers of a rank may take where the caller gives no bound; None for no limit.

    Buffers are pinned where this process uses a GPU: then half of this machine's memory, divided by its ranks.
    """
    if not is_gpu_used():
        return None
    setting = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(setting) if setting.isdigit() else torch.accelerator.device_count()
    return max(memory_size() // 2 // max(ranks, 1), LEAST_BUDGET_BYTES)


def memory_size() -> int:
    """Return how many bytes of memory this machine has, or this container may use."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _MEMORY_LIMITS:
        with suppress(OSError, ValueError), open(name, encoding="ascii") as file:
            size = min(size, int(file.read()))
    return size


def buffer_size(budget: int | None) -> int:
    """Return how large the buffers under a budget are, in bytes: a power of two, as pinned memory is allocated.

    Args:
        budget: Bytes that all of them may take; None for no limit.

    Raises:
        UsageError: It is too small for any.
    """
    if budget is None:
        return BUFFER_BYTES
    if budget < LEAST_BUDGET_BYTES:
        raise UsageError(
            "`max_staging_bytes` is too small to stage a save", found=f"{budget} bytes", expected="1 MiB or more"
        )
    return min(BUFFER_BYTES, 1 << (budget // _LEAST_BUFFERS).bit_length() - 1)


class BufferPool(Generic[T]):
    """Buffers of one size: made when they are first needed, kept from save to save, never more than a budget allows.

    One thread takes, another gives back. What a buffer is, `make` decides.

    Args:
        make: Returns a new buffer of so many bytes.
        is_outdated: Returns True for a buffer that goes when the next save begins.

    Attributes:
        made: Buffers that were ever made.
    """

    def __init__(self, make: Callable[[int], T], is_outdated: Callable[[T], bool] = lambda _: False) -> None:
        self._make, self._is_outdated = make, is_outdated
        self.made = 0
        self.forget()

    def forget(self) -> None:
        """Release every buffer."""
        self._changed = Condition()
        self._size = 0
        self._most: int | None = None
        self._all: list[T] = []
        self._idle: list[T] = []
        self._is_closed = True

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers there are."""
        return len(self._all) * self._size

    def open(self, budget: int | None) -> None:
        """Begin a save: all buffers are idle, and those go that the budget has no room for.

        Args:
            budget: Bytes that they may take; None for no limit.

        Raises:
            UsageError: It is too small.
        """
        size = buffer_size(budget)
        with self._changed:
            self._all = [] if size != self._size else [each for each in self._all if not self._is_outdated(each)]
            self._size = size
            self._most = None if budget is None else budget // size
            if self._most is not None:
                del self._all[self._most :]
            self._idle = self._all[::-1]
            self._is_closed = False

    def count_missing(self, file_bytes: Iterable[int]) -> int:
        """Return how many bytes of buffers are to be made for files of so many bytes, each in its own buffers."""
        with self._changed:
            needed = sum(-(-nbytes // self._size) for nbytes in file_bytes)
            most = needed if self._most is None else min(needed, self._most)
            return max(most - len(self._all), 0) * self._size

    def take(self, *, wait: bool) -> T | None:
        """Return an idle buffer, or a new one; None where there may be no more.

        Args:
            wait: Wait until one is given back; None then means that the pool was closed.
        """
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
        """Take a buffer back."""
        with self._changed:
            self._idle.append(block)
            self._changed.notify()

    def close(self) -> None:
        """Release a waiting `take`: no buffer will come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class StagingBuffer(NamedTuple):
    """A buffer.

    Attributes:
        tensor: Its bytes.
        view: The same bytes.
        is_pinned: Whether a GPU copies to it while the host does something else.
    """

    tensor: torch.Tensor
    view: memoryview
    is_pinned: bool


def make_buffer(nbytes: int) -> StagingBuffer:
    """Return a buffer of so many bytes in this machine's memory, pinned where this process uses a GPU."""
    is_pinned = is_gpu_used()
    with torch.inference_mode(False):  # a buffer outlives the mode of whoever needed it first
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    return StagingBuffer(tensor, memoryview(tensor.numpy()), is_pinned)  # type: ignore[arg-type]


def is_unpinned(buffer: StagingBuffer) -> bool:
    """Return True if a buffer was made before this process used the GPU that it uses now."""
    return not buffer.is_pinned and is_gpu_used()


class _Filled(NamedTuple):
    block: StagingBuffer
    nbytes: int
    ends_file: bool
    events: tuple[Event, ...]


class _NobodyWritesError(Exception):
    """The saver's thread has given up."""


class StagingArea:
    """Staging area of an asynchronous save: a rank's files on their way to the thread that writes them.

    All that fits into the budget is copied before the first byte is written, so that the two do not compete for memory;
    from then on as much is copied as was written.

    Copies from a device are queued, and not waited for: the thread waits for each buffer before it writes it, and the
    device for all of them before it runs what is queued later on the current stream.

    Args:
        pool: Where buffers come from; nobody else uses it until this save is over.
        budget: Bytes that they may take; None for no limit.

    Attributes:
        rounds: How often copied buffers were queued for the writing thread: one more than the loop had to wait.
    """

    def __init__(self, pool: BufferPool[StagingBuffer], budget: int | None) -> None:
        wait_for_side_streams()
        pool.open(budget)
        self._pool = pool
        self._queue: SimpleQueue[_Filled | Exception] = SimpleQueue()
        self._filled: list[_Filled] = []
        self._block: StagingBuffer | None = None
        self._used = 0
        self._streams = SideStreams(())
        self.rounds = 0

    # The loop's side

    def fill(self, files: Sequence[FileLayout], arrays: Mapping[Path, TensorShards]) -> None:
        """Copy what is to be written; once this returns, the arrays may change.

        Those on a device may be changed by what is queued on the current stream from then on.

        Args:
            files: The layouts of the files.
            arrays: The arrays of this rank.
        """
        self._log_pinning([file.nbytes for file in files])
        self._streams = SideStreams({shard.tensor.device for array in arrays.values() for shard in array.shards})
        try:
            with self._streams.copying():
                for file in files:
                    for part in join_small(view_box(arrays[chunk.path], chunk.box) for chunk in file.chunks):
                        if isinstance(part, bytes):
                            self._put_bytes(memoryview(part))
                        else:
                            self._put(part)
                    self._end_block(ends_file=True)
                self._hand_over()
        except _NobodyWritesError:
            return

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
        """Send the writing thread the reason why no more data will come."""
        self._queue.put(error)

    def _put(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        if is_flat(tensor):
            self._put_flat(view_as_bytes(tensor))
            return
        for box in contiguous_blocks(full_box(tuple(tensor.shape)), _PART_BYTES // tensor.element_size()):
            self._put_flat(view_as_bytes(narrow_to_box(tensor, box).resolve_conj().resolve_neg().contiguous()))

    def _put_flat(self, data: torch.Tensor) -> None:
        for start, stop, block, at in self._spans(data.numel()):
            # From a GPU this waits for nothing; `blocks` does.
            block.tensor[at : at + stop - start].copy_(data[start:stop], non_blocking=True)

    def _put_bytes(self, data: memoryview) -> None:
        for start, stop, block, at in self._spans(len(data)):
            block.view[at : at + stop - start] = data[start:stop]

    def _spans(self, nbytes: int) -> Iterator[tuple[int, int, StagingBuffer, int]]:
        """Yield which bytes go into which buffer at which place."""
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
            self._filled.append(_Filled(self._block, self._used, ends_file, self._streams.record_events()))
        self._block, self._used = None, 0

    def _hand_over(self) -> None:
        self.rounds += 1
        for block in self._filled:
            self._queue.put(block)
        self._filled.clear()

    # The saver's side

    def blocks(self, payload: PayloadFile) -> Iterator[memoryview]:
        """Yield the contents of the next file behind its header; each part is valid until the next one is asked for.

        Args:
            payload: The file; they come in the order in which they are copied.

        Raises:
            Exception: The error that `fail` was called with.
        """
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
        """Release the copying thread: nothing is written any more."""
        self._pool.close()
