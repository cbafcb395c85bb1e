"""Stream tensors into output files, as copies and batches under a byte budget, and count the bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, Protocol

from shardckpt.boxes import Box, contiguous_blocks, full_box
from shardckpt.dtypes import bits, nbytes
from shardckpt.format.chunk_reader import PieceReader, ReadItem
from shardckpt.format.reader import Reader
from shardckpt.offline.write.numpy_casts import cast_into
from shardckpt.offline.write.report import OnProgress, Progress
from shardckpt.plan.layout.copy_plan import Batch, Copy, Take, is_scattered, steps
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.storage.store import Store, Writer

_RESERVED_BYTES = 20 * 2**20
"""What the modules of a conversion add to those of `inspect`, measured as resident memory (numpy: 16 MiB)."""

_BUFFERS = 4
"""A batch exists at most so many times: being written, and as stored, as staged and as cast of the one after it."""

_LEAST_BATCH_BYTES = 1 << 16
_LOCAL_BATCH_BYTES = 1 << 20
"""On a disk a batch that stays in the processor's cache is moved fastest."""

_REMOTE_BATCH_BYTES = 1 << 23
"""From a remote store fewer and larger requests are."""

_WIDE_BATCH_BYTES = 1 << 25
"""Each batch of a transposed view reads much of its storage again, so that few large ones are fastest."""

_COPY_BYTES = 1 << 18
_COPY_STEP_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How much memory one writer may use.

    Attributes:
        batch_bytes: Most bytes of one batch.
        wide_bytes: Most bytes of one batch of a transposed view.
        step_bytes: Most bytes of one copy, after which progress is reported; a remote source holds so many in memory.
    """

    batch_bytes: int
    wide_bytes: int
    step_bytes: int

    @classmethod
    def share(cls, max_memory: int, writers: int, *, is_local: bool) -> MemoryBudget:
        """Share a cap on added memory, in bytes, among writers that run side by side.

        Args:
            max_memory: The cap.
            writers: How many share it.
            is_local: Whether the source's files are on this machine.
        """
        share = max(max_memory - _RESERVED_BYTES, 0) // (_BUFFERS * writers)
        share = max(share, _LEAST_BATCH_BYTES)
        batch = min(share, _LOCAL_BATCH_BYTES if is_local else _REMOTE_BATCH_BYTES)
        return cls(batch, min(share, _WIDE_BATCH_BYTES), _COPY_STEP_BYTES if is_local else 2 * batch)


class Sink(Protocol):
    """Takes bytes in order."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes. Raises StorageError."""


class FileSink(Sink, Protocol):
    """An open file, as an encoder gets it: it cannot be closed."""

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file of `source`. Raises StorageError."""


class CountingWriter:
    """A writer that counts bytes, for the encoder of a file, which must not close it.

    Args:
        writer: The open file.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.nbytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append data. Raises StorageError."""
        self._writer.write(data)
        self.nbytes += memoryview(data).nbytes

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file of `source`. Raises as `Writer.copy_from` does."""
        self._writer.copy_from(source, name, offset, nbytes)
        self.nbytes += nbytes


class Stopped(BaseException):
    """Unwinds a writing thread after another one failed; no error, so that no target takes it for one."""


class Meter:
    """Counts written bytes, from several threads, and reports them to the caller.

    Args:
        total_bytes: Bytes that will be written.
        on_progress: Called after every step, under a lock; may raise to stop the work.
    """

    def __init__(self, total_bytes: int, on_progress: OnProgress | None) -> None:
        self._total, self._on_progress = total_bytes, on_progress
        self._done, self._start, self._lock = 0, time.perf_counter(), Lock()
        self._stopped = False
        self._raised: list[BaseException] = []

    def has_raised(self, error: BaseException) -> bool:
        """Return True if an error is what `on_progress` raised."""
        return any(each is error for each in self._raised)

    def stop(self) -> None:
        """Make every thread that counts on raise `Stopped`: another one failed, or the user interrupted."""
        self._stopped = True

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more.

        Raises:
            Stopped: The work was stopped meanwhile.
        """
        if self._stopped:
            raise Stopped
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                try:
                    self._on_progress(Progress(self._done, self._total, time.perf_counter() - self._start))
                except BaseException as error:
                    self._raised.append(error)
                    raise


class TensorPart(NamedTuple):
    """A box of a tensor that is written in one range.

    Attributes:
        tensor: The tensor.
        box: The elements, in row-major order.
    """

    tensor: OutputTensor
    box: Box


class TensorStream:
    """Streams tensors of one open checkpoint into output files, under a byte budget.

    Args:
        reader: The open checkpoint.
        budget: Memory that may be used.
        meter: Counts the bytes written.
        allow_overflow: Accept finite values that become infinite in a cast.
    """

    def __init__(self, reader: Reader, budget: MemoryBudget, meter: Meter, *, allow_overflow: bool = False) -> None:
        self._reader, self._budget, self._meter, self._allow_overflow = reader, budget, meter, allow_overflow

    def is_from_caller(self, error: BaseException) -> bool:
        """Return True if an error is what the caller's `on_progress` raised, to stop the work."""
        return self._meter.has_raised(error)

    def write_tensors(self, tensors: Sequence[OutputTensor], writer: FileSink) -> None:
        """Write full tensors back to back; bytes that do not change are copied from file to file.

        Raises:
            CheckpointError: The source's bytes cannot be read, or a cast overflows.
            StorageError: Reading or writing failed.
        """
        budget = self._budget
        plan = steps(tensors, batch_bytes=budget.batch_bytes, copy_bytes=_COPY_BYTES, wide_bytes=budget.wide_bytes)
        self._write(plan, writer, writer)

    def write_parts(self, parts: Iterable[TensorPart], sink: Sink) -> None:
        """Write parts of tensors back to back.

        Raises:
            CheckpointError: The source's bytes cannot be read, or a cast overflows.
            StorageError: Reading or writing failed.
        """
        self._write(batches(parts, self._budget.batch_bytes, self._budget.wide_bytes), sink)

    def _write(self, plan: Iterable[Copy | Batch], sink: Sink, writer: FileSink | None = None) -> None:
        pieces = PieceReader(self._reader.store)
        current: OutputTensor | None = None
        with _WriteBehind(sink, self._budget.batch_bytes) as behind:
            for step in plan:
                if isinstance(step, Copy):
                    assert writer is not None, "only full files are copied"
                    behind.wait()
                    self._copy(step, writer)
                    continue
                if step.takes[-1].tensor is not current:
                    pieces.forget()
                    current = step.takes[-1].tensor
                data = behind.buffer(step.nbytes)
                assemble(pieces, step, data, self._allow_overflow)
                behind.write(data)
                self._meter.add(step.nbytes)

    def _copy(self, step: Copy, writer: FileSink) -> None:
        most = self._budget.step_bytes
        for start in range(0, step.nbytes, most):
            size = min(most, step.nbytes - start)
            writer.copy_from(self._reader.store, step.file, step.offset + start, size)
            self._meter.add(size)


Encoder = Callable[[TensorStream, FileSink], tuple[int, ...]]
"""Writes one file from start to end, without closing it; returns hashes of its blocks if the format stores them."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A planned file of tensor data, in any format.

    Attributes:
        name: Path in the target, with forward slashes.
        nbytes: Bytes of the full file.
        count: Tensors, or parts of tensors, in it.
        encode: Writes its bytes.
    """

    name: str
    nbytes: int
    count: int
    encode: Encoder


def iter_parts(tensors: Iterable[OutputTensor]) -> Iterator[TensorPart]:
    """Yield full tensors as parts; one of several members is yielded as its members."""
    for tensor in tensors:
        for member in tensor.output_parts:
            yield TensorPart(member, full_box(member.shape))


def batches(parts: Iterable[TensorPart], most: int, wide: int = 0) -> Iterator[Batch]:
    """Yield parts in order, split into blocks and grouped in batches of at most `most` bytes.

    Args:
        parts: What is written.
        most: Most bytes of a batch.
        wide: Most bytes of a block of a transposed view, which is a batch of its own where it is larger.
    """
    takes: list[Take] = []
    size = 0
    for tensor, part in parts:
        width = max(bits(tensor.entry.stored), bits(tensor.dtype))
        limit = max(most, wide) if is_scattered(tensor) else most
        elements = limit * 8 // width if width % 8 == 0 else part.volume
        for block in contiguous_blocks(part, max(elements, 1)):
            written = nbytes(tensor.dtype, block.volume)
            if takes and size + written > most:
                yield Batch(size, tuple(takes))
                takes, size = [], 0
            takes.append(Take(tensor, block, size))
            size += written
    if takes:
        yield Batch(size, tuple(takes))


class _WriteBehind:
    """Writes one batch on a thread of its own while the next one is assembled, through two buffers.

    Leaving the block waits for the last write, whatever happened, so that nobody closes the file under it.

    Args:
        writer: Where the batches go, in order.
        nbytes: Bytes of a usual batch.
    """

    def __init__(self, writer: Sink, nbytes: int) -> None:
        self._writer = writer
        self._free, self._busy = bytearray(nbytes), bytearray(nbytes)
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def buffer(self, nbytes: int) -> memoryview:
        """Return a buffer of `nbytes` that no write is reading."""
        if len(self._free) < nbytes:
            self._free = bytearray(nbytes)
        return memoryview(self._free)[:nbytes]

    def write(self, batch: memoryview) -> None:
        """Begin to write what the last buffer holds, once the write before is done.

        Raises:
            StorageError: The write before failed.
        """
        self.wait()
        self._pending = self._thread.submit(self._writer.write, batch)
        self._free, self._busy = self._busy, self._free

    def wait(self) -> None:
        """Wait for the write that is under way.

        Raises:
            StorageError: It failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> _WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self.wait()


def assemble(pieces: PieceReader, batch: Batch, out: memoryview, allow_overflow: bool) -> None:
    """Fill a buffer with a batch, cast where its tensors are cast.

    Args:
        pieces: Reads from the source.
        batch: What is wanted.
        out: Exactly the batch's bytes.
        allow_overflow: Accept finite values that become infinite in a cast.

    Raises:
        CheckpointError: The source's bytes cannot be read, or a cast overflows.
        StorageError: Reading failed.
    """
    staged: Sequence[tuple[Take, memoryview]] = [
        (take, memoryview(bytearray(nbytes(take.tensor.entry.stored, take.box.volume))))
        if take.tensor.is_computed
        else (take, out[take.offset : take.offset + take.nbytes])
        for take in batch.takes
    ]
    pieces.fill([ReadItem(t.tensor.entry.pieces, t.box, t.tensor.entry.stored, target) for t, target in staged])
    for take, data in staged:
        if take.tensor.is_computed:
            stored = take.tensor.entry.stored
            if take.tensor.change is not None:
                data, stored = take.tensor.change(take.box, data, stored)
            cast_into(
                data,
                stored,
                out[take.offset : take.offset + take.nbytes],
                take.tensor.dtype,
                name=take.tensor.name,
                allow_overflow=allow_overflow,
            )
