"""Stream tensors to output files within a memory limit, and count the bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from shardckpt.boxes import Box, contiguous_blocks, full_box
from shardckpt.dtypes import bits, nbytes
from shardckpt.events.progress import Meter
from shardckpt.manifest import Encoded
from shardckpt.offline.write.numpy_casts import cast_into
from shardckpt.offline.write.worker_pool import PoolTask, WorkerPool
from shardckpt.plan.layout.copy_plan import Batch, Copy, Take, is_scattered, most_elements, steps
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import PieceReader, ReadItem
from shardckpt.storage.store import Read, Store, Writer

_T = TypeVar("_T")

# Resident memory of a conversion's modules beyond `inspect`, as measured (NumPy: 16 MiB).
RESERVED_BYTES = 20 * 2**20

_BUFFERS = 4  # copies of a batch in memory per thread: stored, staged, cast, being written

_MIN_BATCH_BYTES = 1 << 16
_LOCAL_BATCH_BYTES = 1 << 20  # fastest if a batch stays in the processor's cache
_REMOTE_BATCH_BYTES = 1 << 23  # fewer and larger requests are faster

# For transposed views: each batch reads much of its storage again, so few large batches are faster.
_WIDE_BATCH_BYTES = 1 << 25

_COPY_BYTES = 1 << 18
_COPY_STEP_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One thread's memory limits, in bytes."""

    batch_bytes: int
    wide_bytes: int  # batch of a transposed view
    step_bytes: int  # copy between two progress reports; a remote source keeps it in memory

    @classmethod
    def share(cls, max_memory: int, threads: int, *, is_local: bool) -> MemoryBudget:
        """Divide a memory limit, in bytes, among concurrent threads."""
        share = max(max_memory - RESERVED_BYTES, 0) // (_BUFFERS * threads)
        share = max(share, _MIN_BATCH_BYTES)
        batch = min(share, _LOCAL_BATCH_BYTES if is_local else _REMOTE_BATCH_BYTES)
        return cls(batch, min(share, _WIDE_BATCH_BYTES), _COPY_STEP_BYTES if is_local else 2 * batch)


class Sink(Protocol):
    """Takes bytes in order."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the next bytes. Raises StorageError."""


class FileSink(Sink, Protocol):
    """An open file for an encoder, which cannot close it."""

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range from a file in `source`. Raises StorageError."""


class CountingWriter:
    """Counts the bytes that an encoder writes to a file, and cannot be closed."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.nbytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append data. Raises StorageError."""
        self._writer.write(data)
        self.nbytes += memoryview(data).nbytes

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range from a file in `source`. Raises errors like `Writer.copy_from`."""
        self._writer.copy_from(source, name, offset, nbytes)
        self.nbytes += nbytes


class _CopiedBlock(NamedTuple):
    """A copy's block that a pool thread reads."""

    copy: Copy

    @property
    def nbytes(self) -> int:
        return self.copy.nbytes


_Step = Copy | _CopiedBlock | Batch


class TensorPart(NamedTuple):
    """A box in a tensor that is written contiguously."""

    tensor: OutputTensor
    box: Box  # in row-major order


class TensorStream:
    """Streams tensors from one open checkpoint to output files, within a memory limit."""

    def __init__(
        self,
        reader: Reader,
        budget: MemoryBudget,
        meter: Meter | None,
        pool: WorkerPool,
        *,
        allow_overflow: bool = False,
    ) -> None:
        self._reader, self._budget, self._meter, self._pool = reader, budget, meter, pool
        self._allow_overflow = allow_overflow
        self._scratch = _Scratch()
        self._has_blocks = reader.store.capabilities.block_bytes > 0
        block = reader.store.capabilities.block_bytes
        self._copy_bytes = block if 0 < block <= budget.wide_bytes else budget.batch_bytes
        self._filled_files = 0
        self._lock = threading.Lock()

    def is_from_caller(self, error: BaseException) -> bool:
        """Return True if the caller's `on_progress` raised this error to stop the work."""
        return self._meter is not None and self._meter.has_raised(error)

    def stop(self) -> None:
        """Make the threads that write other files raise `Stopped` at their next step."""
        assert self._meter is not None, "files that are written side by side have a meter"
        self._meter.stop()

    def write_tensors(self, tensors: Sequence[OutputTensor], writer: FileSink) -> None:
        """Write full tensors contiguously; unchanged bytes are copied from file to file."""
        budget = self._budget
        plan = steps(tensors, batch_bytes=budget.batch_bytes, copy_bytes=_COPY_BYTES, wide_bytes=budget.wide_bytes)
        with self._fill_file():
            self._write_in_order(self._share_copies(plan), writer, writer)

    def write_parts(self, parts: Iterable[TensorPart], sink: Sink) -> None:
        """Write tensor parts contiguously."""
        self._write_in_order(batches(parts, self._budget.batch_bytes, self._budget.wide_bytes), sink)

    @contextmanager
    def _fill_file(self) -> Iterator[None]:
        with self._lock:
            self._filled_files += 1
        try:
            yield
        finally:
            with self._lock:
                self._filled_files -= 1

    def _share_copies(self, plan: Iterable[Copy | Batch]) -> Iterator[_Step]:
        """Split copies into blocks for the pool, as long as it has more threads than files to write."""
        # Otherwise the thread that writes a file copies it through one buffer.
        for step in plan:
            if isinstance(step, Copy) and self._pool.threads > (1 if self._has_blocks else self._filled_files):
                yield from map(_CopiedBlock, split_copy(step, self._copy_bytes, is_aligned=self._has_blocks))
            else:
                yield step

    def _write_in_order(self, plan: Iterable[_Step], sink: Sink, writer: FileSink | None = None) -> None:
        free: deque[bytearray] = deque()
        with self._pool.run(self._read_ahead(plan, free), self._pool.ahead) as done:
            for step, data in done:
                if isinstance(step, Copy):
                    assert writer is not None, "only full files are copied"
                    self._copy(step, writer)
                    continue
                sink.write(memoryview(data)[: step.nbytes])
                free.append(data)
                self._count(step.nbytes)

    def _read_ahead(self, plan: Iterable[_Step], free: deque[bytearray]) -> Iterator[PoolTask[tuple[_Step, bytearray]]]:
        """Yield tasks that read blocks and assemble batches, in buffers whose content has been written."""
        assembler = _Assembler(self._reader.store, self._scratch, allow_overflow=self._allow_overflow)

        def assemble(batch: Batch, data: bytearray, is_decoded: bool) -> tuple[_Step, bytearray]:
            assembler.assemble(batch, memoryview(data)[: batch.nbytes], is_decoded=is_decoded)
            return batch, data

        for step in plan:
            if isinstance(step, Copy):
                yield PoolTask(partial(_return, (step, bytearray())), is_trivial=True)
                continue
            data = free.popleft() if free else bytearray()
            if len(data) < step.nbytes:
                data = bytearray(max(step.nbytes, self._budget.batch_bytes))
            if isinstance(step, _CopiedBlock):
                yield PoolTask(partial(self._read, step, data))
                continue
            is_decoded = assembler.is_decoded(step)
            yield PoolTask(partial(assemble, step, data, is_decoded), is_decoded)

    def _read(self, block: _CopiedBlock, data: bytearray) -> tuple[_Step, bytearray]:
        copy = block.copy
        self._reader.store.read([Read(copy.file, copy.offset, memoryview(data)[: copy.nbytes])])
        return block, data

    def _count(self, nbytes: int) -> None:
        if self._meter is not None:
            self._meter.add(nbytes)

    def _copy(self, step: Copy, writer: FileSink) -> None:
        most = self._budget.step_bytes
        for start in range(0, step.nbytes, most):
            size = min(most, step.nbytes - start)
            writer.copy_from(self._reader.store, step.file, step.offset + start, size)
            self._count(size)


def _return(value: _T) -> _T:
    return value


def split_copy(copy: Copy, most: int, *, is_aligned: bool) -> Iterator[Copy]:
    """Yield a copy's parts; aligned ones end at multiples of `most` in the source, to be verified at once."""
    start, end = copy.offset, copy.offset + copy.nbytes
    while start < end:
        stop = min(start - (start % most if is_aligned else 0) + most, end)
        yield Copy(copy.file, start, stop - start)
        start = stop


class _Scratch:
    """Each thread's buffers by purpose, reused by its next task."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self, use: str, nbytes: int) -> memoryview:
        """Return a buffer of `nbytes`, whose content is undefined."""
        kept: bytearray = self._local.__dict__.get(use, b"")
        if len(kept) < nbytes:
            kept = self._local.__dict__[use] = bytearray(nbytes)
        return memoryview(kept)[:nbytes]


class _Assembler:
    """Assembles one file's batches on any thread."""

    def __init__(self, store: Store, scratch: _Scratch, *, allow_overflow: bool) -> None:
        self._store, self._scratch, self._allow_overflow = store, scratch, allow_overflow
        self._decoding: PieceReader | None = None  # decoders run forward only
        self._decoded: OutputTensor | None = None
        self._last: tuple[OutputTensor | None, bool] = (None, False)

    def is_decoded(self, batch: Batch) -> bool:
        """Return True if a batch has encoded pieces, which are decoded in order."""
        return any(self._has_encoded_pieces(take.tensor) for take in batch.takes)

    def _has_encoded_pieces(self, tensor: OutputTensor) -> bool:
        if self._last[0] is not tensor:
            self._last = tensor, any(isinstance(piece.layout, Encoded) for piece in tensor.entry.pieces)
        return self._last[1]

    def assemble(self, batch: Batch, out: memoryview, *, is_decoded: bool) -> None:
        """Fill a buffer with a batch, including casts."""
        targets = self._targets(batch, out)
        reads: list[Read] = []
        items: list[ReadItem] = []
        for take, target in zip(batch.takes, targets, strict=True):
            if take.source is not None:
                reads.append(Read(take.source.file, take.source.offset, target))
            else:
                items.append(ReadItem(take.tensor.entry.pieces, take.box, take.tensor.entry.stored, target))
        if not items:
            self._store.read(reads)
            return
        if is_decoded:  # decoders run forward, and rows may be written in another order
            items.sort(key=lambda item: item.box.offset)
        pieces = self._pieces(batch) if is_decoded else PieceReader(self._store)
        pieces.fill(items, reads)
        for take, data in zip(batch.takes, targets, strict=True):
            if take.tensor.is_computed:
                self._compute(take, data, out[take.offset : take.offset + take.nbytes])

    def _pieces(self, batch: Batch) -> PieceReader:
        """Return the reader with a tensor's decoders, a new one for each tensor."""
        if self._decoding is None or batch.takes[-1].tensor is not self._decoded:
            self._decoding = PieceReader(self._store)
            self._decoded = batch.takes[-1].tensor
        return self._decoding

    def _targets(self, batch: Batch, out: memoryview) -> list[memoryview]:
        """Return a buffer for each block in a batch: in `out`, or one to cast from."""
        sizes = [nbytes(t.tensor.entry.stored, t.box.volume) if t.tensor.is_computed else 0 for t in batch.takes]
        stored = self._scratch.get("stored", sum(sizes))
        targets: list[memoryview] = []
        for take, size in zip(batch.takes, sizes, strict=True):
            if take.tensor.is_computed:
                targets.append(stored[:size])
                stored = stored[size:]
            else:
                targets.append(out[take.offset : take.offset + take.nbytes])
        return targets

    def _compute(self, take: Take, data: memoryview, out: memoryview) -> None:
        tensor, stored = take.tensor, take.tensor.entry.stored
        if tensor.change is not None:
            data, stored = tensor.change(take.box, data, stored)
        if stored == tensor.dtype:
            out[:] = data
            return
        cast_into(data, stored, out, tensor.dtype, name=tensor.name, allow_overflow=self._allow_overflow)


# Writes one file without closing it; returns block hashes if the format stores them.
Encoder = Callable[[TensorStream, FileSink], bytes]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A planned file with tensor data, in any format.

    Attributes:
        name: File name in the target, with forward slashes.
        nbytes: Size in bytes.
        count: How many tensors, or tensor parts, it has.
        encode: Writes its bytes.
        plain: Its content as data; None if the format does more than write it.
    """

    name: str
    nbytes: int
    count: int
    encode: Encoder
    plain: PlainContent | None = None


class PlainContent(NamedTuple):
    """The content of a file that is a header and then full tensors, or parts of tensors."""

    header: bytes
    tensors: tuple[OutputTensor, ...]
    boxes: tuple[Box, ...] | None = None  # one part of each tensor, and the file's blocks are hashed

    def encode(self, stream: TensorStream, writer: FileSink) -> bytes:
        """Write the file, and return the hashes of its blocks, if it has any. Raises StorageError."""
        if self.boxes is not None:
            sink = _Hashed(writer)
            sink.write(self.header)
            stream.write_parts(map(TensorPart, self.tensors, self.boxes), sink)
            return sink.hasher.digests()
        writer.write(self.header)
        stream.write_tensors(self.tensors, writer)
        return b""

    def plan_file(self, name: str) -> OutputFile:
        """Return the file that has this content."""
        volumes = [box.volume for box in self.boxes or [full_box(tensor.shape) for tensor in self.tensors]]
        sizes = (nbytes(tensor.dtype, volume) for tensor, volume in zip(self.tensors, volumes, strict=True))
        return OutputFile(name, len(self.header) + sum(sizes), len(self.tensors), self.encode, self)


class _Hashed:
    """Hashes bytes and passes them on."""

    def __init__(self, writer: FileSink) -> None:
        from shardckpt.native.payload import BlockHasher  # noqa: PLC0415  (most files have no hashes)

        self._writer = writer
        self.hasher = BlockHasher()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write and hash the next bytes. Raises StorageError."""
        self._writer.write(data)
        self.hasher.update(data)


def iter_parts(tensors: Iterable[OutputTensor]) -> Iterator[TensorPart]:
    """Yield full tensors as parts; a tensor with members yields these."""
    for tensor in tensors:
        for member in tensor.output_parts:
            yield TensorPart(member, full_box(member.shape))


def batches(parts: Iterable[TensorPart], most: int, wide: int = 0) -> Iterator[Batch]:
    """Yield parts in order, split into blocks, in batches with at most `most` bytes."""
    takes: list[Take] = []
    size = stored = 0
    for tensor, part in parts:
        limit = max(most, wide) if is_scattered(tensor) else most
        is_split = max(bits(tensor.entry.stored), bits(tensor.dtype)) % 8 == 0
        for block in contiguous_blocks(part, most_elements(tensor, limit) if is_split else max(part.volume, 1)):
            written, read = nbytes(tensor.dtype, block.volume), nbytes(tensor.entry.stored, block.volume)
            if takes and (size + written > most or stored + read > most):
                yield Batch(size, tuple(takes))
                takes, size, stored = [], 0, 0
            takes.append(Take(tensor, block, size))
            size += written
            stored += read
    if takes:
        yield Batch(size, tuple(takes))
