"""Writing one output file: a header, then its tensors as runs and batches under a byte budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shardckpt.boxes import Box, contiguous_blocks, full_box
from shardckpt.dtypes import bits, nbytes
from shardckpt.format.chunk_reader import PieceReader, ReadItem
from shardckpt.format.encodings.safetensors import HeaderTensor, encode_header, file_order
from shardckpt.format.reader import Reader
from shardckpt.offline.write.numpy_casts import cast_into
from shardckpt.offline.write.report import Meter
from shardckpt.plan.layout.copy_plan import Batch, Copy, Take, is_scattered, steps
from shardckpt.plan.layout.output_files import OutputTensor, PlannedFile
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
        step_bytes: Most bytes of one copy, after which progress is told; a remote source holds so many in memory.
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
    """What takes bytes in order."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes. Raises StorageError."""


class TensorPart(NamedTuple):
    """A box of a tensor that is written in one range.

    Attributes:
        tensor: The tensor.
        box: The elements, in row-major order.
    """

    tensor: OutputTensor
    box: Box


class OutputFile(Protocol):
    """A planned file of tensor data, in any format."""

    @property
    def name(self) -> str:
        """In the target."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""

    @property
    def count(self) -> int:
        """How many tensors, or parts of some, it holds."""

    def write(
        self, reader: Reader, writer: Writer, *, budget: MemoryBudget, allow_overflow: bool, meter: Meter
    ) -> tuple[int, ...]:
        """Write it from start to end; the caller closes the writer.

        Returns:
            Hashes of its blocks, where the format keeps them.

        Raises:
            CheckpointError: The source's bytes cannot be read, or a cast overflows.
            StorageError: Reading or writing failed.
        """


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An output file with its header.

    Attributes:
        name: In the target.
        header: First bytes of the file.
        tensors: In the order of the data.
    """

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(t.nbytes for t in self.tensors)

    @property
    def count(self) -> int:
        """Tensors in it."""
        return len(self.tensors)

    def write(
        self, reader: Reader, writer: Writer, *, budget: MemoryBudget, allow_overflow: bool, meter: Meter
    ) -> tuple[int, ...]:
        """Write it from start to end; the caller closes the writer.

        Raises:
            CheckpointError: The source's bytes cannot be read, or a cast overflows.
            StorageError: Reading or writing failed.
        """
        write_file(reader, self, writer, budget=budget, allow_overflow=allow_overflow, meter=meter)
        return ()


def lay_out(file: PlannedFile, metadata: Mapping[str, str]) -> SafetensorsFile:
    """Order a file's tensors and make its header.

    Raises:
        UnsupportedError: A type that safetensors cannot hold.
    """
    tensors = {t.name: t for t in file.tensors}
    order = file_order(HeaderTensor(t.name, t.dtype, t.shape) for t in file.tensors)
    return SafetensorsFile(
        file.name, encode_header(order, metadata), tuple(part for p in order for part in tensors[p.name].output_parts)
    )


def write_file(
    reader: Reader, file: SafetensorsFile, writer: Writer, *, budget: MemoryBudget, allow_overflow: bool, meter: Meter
) -> None:
    """Write a file from start to end; the caller closes the writer.

    Raises:
        CheckpointError: The source's bytes cannot be read, or a cast overflows.
        StorageError: Reading or writing failed.
    """
    writer.write(file.header)
    pieces = PieceReader(reader.store)
    current: OutputTensor | None = None
    with _WriteBehind(writer, budget.batch_bytes) as behind:
        wide = budget.wide_bytes
        for step in steps(file.tensors, batch_bytes=budget.batch_bytes, copy_bytes=_COPY_BYTES, wide_bytes=wide):
            if isinstance(step, Copy):
                behind.wait()
                _copy(reader.store, step, writer, budget.step_bytes, meter)
                continue
            if step.takes[-1].tensor is not current:
                pieces.forget()
                current = step.takes[-1].tensor
            batch = behind.buffer(step.nbytes)
            assemble(pieces, step, batch, allow_overflow)
            behind.write(batch)
            meter.add(step.nbytes)


def iter_parts(tensors: Iterable[OutputTensor]) -> Iterator[TensorPart]:
    """Yield whole tensors as parts; one of several members is those."""
    for tensor in tensors:
        for member in tensor.output_parts:
            yield TensorPart(member, full_box(member.shape))


def write_parts(
    reader: Reader, parts: Iterable[TensorPart], sink: Sink, *, budget: MemoryBudget, allow_overflow: bool, meter: Meter
) -> None:
    """Give the bytes of parts to a sink, back to back.

    Raises:
        CheckpointError: The source's bytes cannot be read, or a cast overflows.
        StorageError: Reading or writing failed.
    """
    pieces = PieceReader(reader.store)
    current: OutputTensor | None = None
    with _WriteBehind(sink, budget.batch_bytes) as behind:
        for batch in batches(parts, budget.batch_bytes, budget.wide_bytes):
            if batch.takes[-1].tensor is not current:
                pieces.forget()
                current = batch.takes[-1].tensor
            data = behind.buffer(batch.nbytes)
            assemble(pieces, batch, data, allow_overflow)
            behind.write(data)
            meter.add(batch.nbytes)


def batches(parts: Iterable[TensorPart], most: int, wide: int = 0) -> Iterator[Batch]:
    """Yield parts in order, cut into blocks and put together in batches of at most `most` bytes.

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


def _copy(store: Store, step: Copy, writer: Writer, most: int, meter: Meter) -> None:
    for start in range(0, step.nbytes, most):
        size = min(most, step.nbytes - start)
        writer.copy_from(store, step.file, step.offset + start, size)
        meter.add(size)


def assemble(pieces: PieceReader, batch: Batch, out: memoryview, allow_overflow: bool) -> None:
    """Fill a buffer with a batch, cast where its tensors are cast.

    Args:
        pieces: Reads from the source.
        batch: What is wanted.
        out: Exactly the batch's bytes.
        allow_overflow: Let finite values become infinite in a cast.

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
