"""Write payload files from memory and hash them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Protocol

from shardckpt.checkpoint.save.chunk_meter import ChunkMeter
from shardckpt.checkpoint.stateful.tensor_bytes import SMALL_BYTES, TensorSource, iter_bytes
from shardckpt.format.encodings.safetensors_check import create_checked
from shardckpt.format.native.manifest_json import WrittenPayload
from shardckpt.format.native.payload import FileHasher, HashTask, PayloadFile
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import Writer

SLICE_BYTES = 128 << 20
"""Bytes per write; they are hashed at the same time.

Beside Python code of other threads, each call that releases the interpreter's lock waits 5 ms to get it back, however
short the call is (docs/decisions/0033).
"""

_HASH_THREADS = 4
"""Threads that hash a slice; they wait for the lock at the same time, so their number does not depend on the cores."""

_GATHERED_BYTES = 1 << 20


Source = Callable[[PayloadFile], Iterable[memoryview]]
"""Returns the contents of a file after its header; each part is valid until the next one is requested."""


class _Digester(Protocol):
    """Computes something from the bytes of a file while it is written."""

    def split(self, data: memoryview, most: int, /) -> list[HashTask]:
        """Return tasks for the file's next bytes, about `most`."""


def write_payloads(
    publication: Publication,
    payloads: Sequence[PayloadFile],
    source: Source,
    *,
    checksums: bool,
    digests: bool = False,
    stats: bool = False,
) -> list[WrittenPayload]:
    """Write a rank's files.

    Args:
        publication: Publication to write to.
        payloads: Layouts of the files.
        source: Returns the contents of a file.
        checksums: Hash every written block.
        digests: Hash every chunk too.
        stats: Compute statistics of the values of every chunk.

    Raises:
        FormatError: The safetensors library refuses a file that was written.
        StorageError: The storage failed.
    """
    written = []
    with closing(_Hashing()) as hashing:
        for payload in payloads:
            hasher = FileHasher(payload, blocks=checksums, chunks=digests)
            meter = ChunkMeter(payload.chunks, len(payload.header)) if stats else None
            digesters: list[_Digester] = [hasher] if checksums or digests else []
            if meter is not None:
                digesters.append(meter)
            with create_checked(publication, payload.name) as writer:
                stream = _Stream(writer, digesters, hashing)
                stream.add(memoryview(payload.header))
                for part in source(payload):
                    stream.add(part)
                stream.finish()
            measured = None if meter is None else meter.stats()
            written.append(WrittenPayload(payload, hasher.hashes, hasher.digests, measured))
    return written


def iter_contents(payload: PayloadFile, state: TensorSource) -> Iterator[memoryview]:
    """Yield the bytes of a file after its header, from memory.

    Each part is valid until the next one is requested.

    Args:
        payload: Layout of the file.
        state: Tensors of this rank.
    """
    return iter_bytes(state.views(payload.chunks), payload.nbytes)


class _Hashing:
    """Hashing threads next to the writing thread, started at their first use."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, tasks: Iterable[HashTask]) -> list[Future[None]]:
        """Start tasks on the threads."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="shardckpt-hash")
        return [self._pool.submit(task) for task in tasks]

    def close(self) -> None:
        """Wait for the threads to end."""
        if self._pool is not None:
            self._pool.shutdown()


class _Stream:
    """Writer of one file: joins small parts and hashes bytes while they are written."""

    def __init__(self, writer: Writer, digesters: Sequence[_Digester], hashing: _Hashing) -> None:
        self._writer, self._digesters, self._hashing = writer, digesters, hashing
        self._small = bytearray()

    def add(self, data: memoryview) -> None:
        """Append bytes, which may change after this returns."""
        if len(data) <= SMALL_BYTES:
            self._small += data
            if len(self._small) >= _GATHERED_BYTES:
                self.finish()
            return
        self.finish()
        for start in range(0, len(data), SLICE_BYTES):
            self._put(data[start : start + SLICE_BYTES])

    def finish(self) -> None:
        """Write the remaining bytes."""
        if self._small:
            self._put(memoryview(self._small))
            self._small = bytearray()

    def _put(self, data: memoryview) -> None:
        hashed: list[Future[None]] = []
        if self._digesters and len(data) > SMALL_BYTES:
            hashed = self._hashing.submit(
                task for digester in self._digesters for task in digester.split(data, _HASH_THREADS)
            )
        else:
            for digester in self._digesters:
                for task in digester.split(data, 1):
                    task()
        self._writer.write(data)
        for future in hashed:
            future.result()
