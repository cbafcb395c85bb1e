"""Write payload files from memory and hash them: 4 MiB at a time, or on threads during the writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from time import perf_counter
from typing import Protocol

from shardckpt.checkpoint.save.chunk_meter import ChunkMeter
from shardckpt.checkpoint.stateful.tensor_bytes import SMALL_BYTES, TensorSource, iter_bytes
from shardckpt.encodings.safetensors_check import create_checked
from shardckpt.native.manifest_json import WrittenPayload
from shardckpt.native.payload import GROUP_BYTES, FileHasher, HashTask, PayloadFile
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import Writer
from shardckpt.storage.thread_pool import ThreadPool

# Maximum bytes per write; threads hash them at the same time. While other threads run Python code, each call that
# releases the interpreter's lock waits 5 ms to get it back (docs/decisions/0033).
SLICE_BYTES = 256 << 20

# Threads that hash a slice; they wait for the lock at the same time, so their number does not depend on the cores.
_HASH_THREADS = 4

_GATHERED_BYTES = 1 << 20


# Returns a file's contents after its header; each part is valid until the next request.
Source = Callable[[PayloadFile], Iterable[memoryview]]


class _Digester(Protocol):
    """Computes something from a file's bytes while they are written."""

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
    has_idle_core: bool = False,
) -> list[WrittenPayload]:
    """Write a rank's files."""
    written = []
    with closing(_Hashing(prefers_threads=stats or has_idle_core)) as hashing:
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
    """Yield a file's bytes after its header, from memory; each part is valid until the next request."""
    return iter_bytes(state.views(payload.chunks), payload.nbytes)


class _Hashing:
    """Hashes on the writing thread, or on other threads, which start at their first use."""

    # One thread writes each 4 MiB while they are in the processor's cache, and takes no other core from the training.
    # But next to Python code it would wait for the interpreter's lock after each 4 MiB.

    def __init__(self, *, prefers_threads: bool) -> None:
        self._prefers_threads = self.needs_threads = prefers_threads  # for the next bytes
        self._pool: ThreadPool | None = None

    def start(self, tasks: Iterable[HashTask]) -> list[Future[float]]:
        """Start tasks on the threads; each returns its seconds."""
        if self._pool is None:
            self._pool = ThreadPool(_HASH_THREADS, thread_name_prefix="shardckpt-hash")
        return [self._pool.submit(_measure, task) for task in tasks]

    def run(self, tasks: Iterable[HashTask]) -> float:
        """Run tasks on this thread; return the seconds."""
        return sum(_measure(task) for task in tasks)

    def choose(self, hashed_s: float, nbytes: int) -> None:
        """Hash the next bytes on other threads if hashes wait for the interpreter's lock."""
        is_late = hashed_s >= max(nbytes / GROUP_BYTES, 1) * sys.getswitchinterval() / 2
        self.needs_threads = self._prefers_threads or is_late

    def close(self) -> None:
        """Wait for the threads to end."""
        if self._pool is not None:
            self._pool.shutdown()


def _measure(task: HashTask) -> float:
    """Run a task; return its seconds."""
    start = perf_counter()
    task()
    return perf_counter() - start


class _Stream:
    """Writes one file: joins small parts, and hashes what it writes."""

    def __init__(self, writer: Writer, digesters: Sequence[_Digester], hashing: _Hashing) -> None:
        self._writer, self._digesters, self._hashing = writer, digesters, hashing
        self._small = bytearray()
        self._at = 0

    def add(self, data: memoryview) -> None:
        """Append bytes, which may change after this returns."""
        if len(data) <= SMALL_BYTES:
            self._small += data
            if len(self._small) >= _GATHERED_BYTES:
                self.finish()
            return
        self.finish()
        self._put(data)

    def finish(self) -> None:
        """Write the remaining bytes."""
        if self._small:
            self._put(memoryview(self._small))
            self._small = bytearray()

    def _put(self, data: memoryview) -> None:
        while data:
            is_parallel = self._hashing.needs_threads and len(data) > SMALL_BYTES
            is_sliced = is_parallel or not self._digesters
            part = data[: SLICE_BYTES if is_sliced else GROUP_BYTES - self._at % GROUP_BYTES]
            hashed_s = self._put_parallel(part) if is_parallel else self._put_next(part)
            self._hashing.choose(hashed_s, len(part))
            self._at += len(part)
            data = data[len(part) :]

    def _put_next(self, data: memoryview) -> float:
        """Hash bytes, then write them; return the seconds for hashing."""
        hashed_s = self._hashing.run(task for digester in self._digesters for task in digester.split(data, 1))
        self._writer.write(data)
        return hashed_s

    def _put_parallel(self, data: memoryview) -> float:
        """Write bytes while threads hash them; return the seconds for hashing."""
        started = self._hashing.start(
            task for digester in self._digesters for task in digester.split(data, _HASH_THREADS)
        )
        self._writer.write(data)
        wait(started)  # once for all of them, since after each wait this thread needs the interpreter's lock
        return sum(future.result() for future in started)
