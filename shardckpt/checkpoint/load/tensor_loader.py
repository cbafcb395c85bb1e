"""Read elements from a checkpoint's files into tensors, in a few concurrent batches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, islice

import torch

from shardckpt.boxes import Box, contiguous_blocks, narrow_to_box, shift
from shardckpt.checkpoint.load.uploads import (
    PINNED_BYTES,
    PlacedUpload,
    Upload,
    UploadBuffers,
    copy_cast,
    copy_to_device,
    place_uploads,
)
from shardckpt.checkpoint.stateful.tensor_bytes import flat_bytes, is_flat_on_cpu
from shardckpt.devices import has_pinned_copies
from shardckpt.dtypes import nbytes
from shardckpt.events.progress import Meter
from shardckpt.manifest import Encoded, TensorEntry
from shardckpt.readers.chunk_reader import PieceReader, ReadItem, straight_reads
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards
from shardckpt.storage.store import Read, Store, as_copied
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.torchrun import count_cores

BATCH_BYTES = 64 << 20  # bytes of one batch of reads; staging buffers may need as many bytes again

_WINDOW_BYTES = 1 << 29
_WINDOW_PIECES = 100_000  # maximum bytes and pieces that are planned ahead
MAX_READERS = 2  # number of concurrent batches: one is read while the other is hashed and copied to its target
ReadRequest = tuple[TensorEntry, TensorShards]  # entry of a saved array, and the shards to fill


class ElementReader:
    """Reads elements of arrays with located pieces."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pieces = PieceReader(store)
        self._buffers: UploadBuffers | None = None
        self.meter: Meter | None = None  # counts the bytes that are read; None if nobody asks
        self.readers = MAX_READERS  # number of threads that read local files into CPU memory
        # Reads into the memory of shards, by the id of the shard, of bytes that the caller checks afterwards; the
        # shards have to stay.
        self.planned: dict[int, list[Read]] = {}

    def read(self, wanted: Sequence[ReadRequest], straight: Store | None = None) -> None:
        """Read the requested elements; they are in their targets when this returns."""
        self._buffers = _make_buffers(wanted)
        if any(isinstance(piece.layout, Encoded) for entry, _ in wanted for piece in entry.pieces):
            for batch in _batches(wanted):  # a decoder reads forward through all pieces
                self._carry_out(batch, self._pieces)
            self._pieces.forget()
            return
        wanted = sorted(wanted, key=_place)
        if straight is not None:
            self._in_threads(self._planned([request for request in wanted if not request[0].shape]))
            wanted = [request for request in wanted if request[0].shape]
        self._in_threads(self._planned(wanted, None if straight is None else self.planned), straight)

    def read_straight(self, reads: Sequence[Read]) -> None:
        """Read bytes directly into their targets."""
        self._in_threads(self._order_batches(reads))

    def _planned(self, wanted: Sequence[ReadRequest], kept: dict[int, list[Read]] | None = None) -> Iterator[_Batch]:
        """Yield batches of reads, with a bounded number of pieces planned ahead."""
        # The number is bounded, because an array may have a million pieces.
        for some in _windows(wanted):
            reads, rest = _divided(some, kept)
            yield from self._order_batches(reads)
            yield from _batches(rest)

    def _order_batches(self, reads: Sequence[Read]) -> Iterator[_Batch]:
        """Yield read batches, remote ones first: they arrive while local files are read."""
        copied, far = as_copied(self._store), set[str]()
        if copied is not None:
            far = {name for name in {read.name for read in reads} if not copied.is_near(name)}
        yield from _batches_of_reads([read for read in reads if read.name in far])
        yield from _batches_of_reads([read for read in reads if read.name not in far])

    def _in_threads(self, batches: Iterator[_Batch], straight: Store | None = None) -> None:
        def open_pieces(batch: _Batch) -> PieceReader:
            return PieceReader(self._store if straight is None or not batch.is_straight else straight)

        is_local = self._buffers is None and self._store.capabilities.is_local
        readers = self.readers if is_local else MAX_READERS
        started = list(islice(batches, 2))
        if readers == 1 or len(started) < 2:
            for batch in chain(started, batches):
                self._carry_out(batch, open_pieces(batch))
            return
        with ThreadPool(readers, thread_name_prefix="shardckpt-read") as pool:
            running: deque[Future[None]] = deque()
            for batch in chain(started, batches):
                running.append(pool.submit(self._carry_out, batch, open_pieces(batch)))
                if len(running) > readers:
                    running.popleft().result()
            for future in running:
                future.result()

    def _carry_out(self, batch: _Batch, pieces: PieceReader) -> None:
        batch.carry_out(pieces, self._buffers)
        if self.meter is not None:
            self.meter.add(batch.element_bytes)


def count_neighbors(machines: Sequence[bytes]) -> list[int]:
    """Return for each rank how many ranks its machine has."""
    ranks = Counter(machines)
    return [ranks[machine] for machine in machines]


def choose_readers(neighbors: int) -> int:
    """Return how many threads read local files."""
    # With all cores busy, more threads would only move each core, and its cache, from one thread to another.
    return max(min(count_cores() // neighbors, MAX_READERS), 1)


def count_bytes(wanted: Iterable[ReadRequest]) -> int:
    """Return the bytes that requests read, as `ElementReader.meter` counts them."""
    shards = ((entry, shard) for entry, array in wanted for shard in array.shards)
    return sum(shard.tensor.numel() * getattr(torch, entry.stored).itemsize for entry, shard in shards)


@dataclass
class PendingRead:
    """A file read by this rank, or by another rank that sends the bytes."""

    reads: list[Read]  # byte ranges with their targets; emptied when they are divided
    finish: Callable[[], object] | None  # copies arrived bytes from a buffer to their target; None without a buffer
    request: ReadRequest  # request for the same elements, for a read by this rank alone
    left: int = 0  # number of parts that have not arrived

    def mark_arrived(self) -> None:
        """Record that a part has arrived; the last part finishes the read."""
        self.left -= 1
        if not self.left and self.finish is not None:
            self.finish()
            self.finish = None


def as_pending_reads(wanted: Sequence[ReadRequest]) -> tuple[list[PendingRead], list[ReadRequest]]:
    """Return requests as file reads, and all other requests."""
    # Targets on a device, or of another dtype, get a buffer, whose memory is not touched before bytes arrive.
    pending: list[PendingRead] = []
    rest: list[ReadRequest] = []
    for entry, array in wanted:
        others = []
        for shard in _shards(array, entry):
            buffer, finish = _buffer(shard.tensor, entry)
            reads = straight_reads(ReadItem(entry.pieces, shard.box, entry.stored, buffer))
            if reads is None:
                others.append(shard)
            else:
                request = entry, array._replace(shards=(shard,))
                pending.append(PendingRead(reads, finish, request))
        if others:
            rest.append((entry, array._replace(shards=tuple(others))))
    return pending, rest


def _divided(wanted: Sequence[ReadRequest], kept: dict[int, list[Read]] | None) -> tuple[list[Read], list[ReadRequest]]:
    """Return reads directly into targets, and all other requests; add the reads to `kept` by shard id."""
    reads: list[Read] = []
    rest: list[ReadRequest] = []
    for entry, array in wanted:
        others = []
        for shard in array.shards:
            straight = plan_straight(shard, entry) if shard.tensor.numel() else []
            if straight is None:
                others.append(shard)
            else:
                reads += straight
                if kept is not None:
                    kept[id(shard)] = straight
        if others:
            rest.append((entry, array._replace(shards=tuple(others))))
    return reads, rest


def _shards(array: TensorShards, entry: TensorEntry) -> Iterator[LocalShard]:
    """Yield an array's shards; split shards that need a buffer to fit a batch."""
    for shard in array.shards:
        if is_flat_on_cpu(shard.tensor) and shard.tensor.dtype == getattr(torch, entry.stored):
            if shard.box.volume:
                yield shard
        else:
            yield from (LocalShard(*part) for part in _parts(array._replace(shards=(shard,)), entry))


@dataclass
class _Batch:
    """Batch of reads, with the copies to make after them."""

    wants: list[ReadItem] = field(default_factory=list)  # items to read into CPU memory
    # Items to read into a pinned buffer and copy to devices; one buffer has space for all of them.
    uploads: list[Upload] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)  # other reads of byte ranges
    after: list[Callable[[], object]] = field(default_factory=list)  # functions to call after all reads
    nbytes: int = 0  # number of bytes of all reads

    def carry_out(self, pieces: PieceReader, buffers: UploadBuffers | None) -> None:
        """Read, then copy staged elements to their targets."""
        if self.uploads:
            assert buffers is not None, "uploads have buffers"
            with buffers.take() as buffer:
                self._read_and_copy(pieces, buffer)
            return
        pieces.fill(self.wants, self.reads)
        for finish in self.after:
            finish()

    @property
    def is_straight(self) -> bool:
        """Whether the bytes are read into their targets as they are."""
        return not (self.wants or self.uploads)

    @property
    def element_bytes(self) -> int:
        """Element bytes, as they are stored."""
        uploaded = sum(upload.tensor.numel() * upload.stored.itemsize for upload in self.uploads)
        return (
            uploaded + sum(item.buffer.nbytes for item in self.wants) + sum(read.buffer.nbytes for read in self.reads)
        )

    def _read_and_copy(self, pieces: PieceReader, buffer: torch.Tensor) -> None:
        placed = place_uploads(self.uploads, buffer)
        pieces.fill([*self.wants, *map(_read_item, placed)], self.reads)
        for finish in self.after:
            finish()
        for upload in placed:
            upload.start()


def _place(request: ReadRequest) -> tuple[str, int]:
    """Return roughly where elements are, to sort reads by file and offset."""
    pieces = request[0].pieces
    return (pieces[0].file, getattr(pieces[0].layout, "offset", 0)) if pieces else ("", 0)


def plan_straight(shard: LocalShard, entry: TensorEntry) -> list[Read] | None:
    """Return the reads that fill a shard; None if its elements have another form."""
    if not is_flat_on_cpu(shard.tensor) or shard.tensor.dtype != getattr(torch, entry.stored):
        return None
    return straight_reads(ReadItem(entry.pieces, shard.box, entry.stored, flat_bytes(shard.tensor)))


def _batches(wanted: Sequence[ReadRequest]) -> Iterator[_Batch]:
    """Divide requests into batches; buffers are allocated when their batch is yielded."""
    batch, uploaded = _Batch(), 0
    for entry, array in wanted:
        for box, tensor in _parts(array, entry):
            if has_pinned_copies(tensor.device):
                part = Upload(entry, box, tensor)
                if uploaded + part.nbytes > PINNED_BYTES:
                    yield batch
                    batch, uploaded = _Batch(), 0
                batch.uploads.append(part)
                batch.nbytes += part.nbytes
                uploaded += part.nbytes
            else:
                buffer, finish = _buffer(tensor, entry)
                batch.wants.append(ReadItem(entry.pieces, box, entry.stored, buffer))
                if finish is not None:
                    batch.after.append(finish)
                batch.nbytes += buffer.nbytes
            if batch.nbytes >= BATCH_BYTES:
                yield batch
                batch, uploaded = _Batch(), 0
    if batch.nbytes:
        yield batch


def _make_buffers(wanted: Sequence[ReadRequest]) -> UploadBuffers | None:
    """Return the buffers for targets on devices; None without such targets."""
    shards = [(entry, shard) for entry, array in wanted for shard in array.shards]
    uploads = [Upload(entry, *shard) for entry, shard in shards if has_pinned_copies(shard.tensor.device)]
    if not uploads:
        return None
    nbytes = min(PINNED_BYTES, sum(upload.nbytes for upload in uploads))
    return UploadBuffers(nbytes, {upload.tensor.device for upload in uploads})


def _windows(wanted: Sequence[ReadRequest]) -> Iterator[Sequence[ReadRequest]]:
    """Divide requests into windows, limited by bytes and by pieces."""
    start = held = pieces = 0
    for at, (entry, array) in enumerate(wanted):
        held += sum(shard.tensor.nbytes for shard in array.shards)
        pieces += len(entry.pieces)
        if held >= _WINDOW_BYTES or pieces >= _WINDOW_PIECES:
            yield wanted[start : at + 1]
            start, held, pieces = at + 1, 0, 0
    if start < len(wanted):
        yield wanted[start:]


def _batches_of_reads(reads: Sequence[Read]) -> Iterator[_Batch]:
    """Divide reads into batches, in offset order."""
    # Batches end at block boundaries, so that no block is in two batches.
    batch = _Batch()
    last: tuple[str, int] = ("", 0)
    for name, offset, buffer in sorted(reads, key=lambda read: read[:2]):
        start, stop = offset, offset + len(buffer)
        while start < stop:
            slot = name, start // BATCH_BYTES
            end = min(stop, (slot[1] + 1) * BATCH_BYTES)
            if slot != last and 2 * batch.nbytes >= BATCH_BYTES:
                yield batch
                batch = _Batch()
            batch.reads.append(Read(name, start, buffer[start - offset : end - offset]))
            batch.nbytes += end - start
            start, last = end, slot
    if batch.reads:
        yield batch


def _parts(array: TensorShards, entry: TensorEntry) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield an array's boxes and targets, in parts that fit a batch."""
    for box, tensor in array.shards:
        most = _most_elements(tensor, box, entry)
        if box.volume <= most:
            if box.volume:
                yield box, tensor
            continue
        for part in contiguous_blocks(box, most):
            yield part, narrow_to_box(tensor, shift(part, box.offset))


def _most_elements(tensor: torch.Tensor, box: Box, entry: TensorEntry) -> int:
    """Return the maximum elements of an array per batch."""
    most = max(BATCH_BYTES // max(nbytes(entry.stored, 8) // 8, 1), 1)
    if has_pinned_copies(tensor.device):
        most = min(most, Upload(entry, box, tensor).most_elements)
    return most


def _read_item(placed: PlacedUpload) -> ReadItem:
    entry, box, _ = placed.upload
    return ReadItem(entry.pieces, box, entry.stored, flat_bytes(placed.values))


def _buffer(tensor: torch.Tensor, entry: TensorEntry) -> tuple[memoryview, Callable[[], object] | None]:
    """Return memory to read into, and a function that copies it to the tensor."""
    # If the bytes are stored as the tensor has them, this is the tensor's own memory, and the function is None.
    stored = getattr(torch, entry.stored)
    if is_flat_on_cpu(tensor) and tensor.dtype == stored:
        return flat_bytes(tensor), None
    staged = torch.empty(tuple(tensor.shape), dtype=stored)
    delivered = getattr(torch, entry.dtype)
    put = copy_to_device if has_pinned_copies(tensor.device) else copy_cast

    def finish() -> None:
        put(staged.to(delivered) if delivered != stored else staged, tensor, entry)

    return flat_bytes(staged), finish
