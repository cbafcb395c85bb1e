"""Write payload files from memory. Hash and measure them: 4 MiB at a time, or on threads during the writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Protocol

from shardckpt.checkpoint.stateful.tensor_bytes import SMALL_BYTES, TensorSource, iter_bytes, tensor_bytes, view_box
from shardckpt.dtypes import bits
from shardckpt.encodings.element_values import measure_values
from shardckpt.encodings.safetensors_check import create_checked
from shardckpt.encodings.value_stats import ValueStats, merge_stats
from shardckpt.manifest import Path
from shardckpt.native.manifest_json import WrittenPayload
from shardckpt.native.payload import GROUP_BYTES, FileHasher, HashTask, PayloadChunk, PayloadFile
from shardckpt.state.local.tensor_shards import TensorShards
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

_PART_BYTES = 16 << 20  # bytes that one task measures


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


class ChunkMeter:
    """Measures the chunks of a file while it is written."""

    def __init__(self, chunks: Sequence[PayloadChunk], start: int) -> None:
        self._chunks = chunks  # in file order; the first one starts at byte `start`
        self._parts: list[list[ValueStats]] = [[] for _ in chunks]
        self._skipped = start
        self._number = 0
        self._left = chunks[0].nbytes if chunks else 0
        self._rest = b""

    def split(self, data: memoryview, _most: int = 1) -> list[HashTask]:
        """Return concurrent tasks that measure the file's next bytes; all must end before the next call."""
        tasks: list[list[HashTask]] = []
        filled = _PART_BYTES
        for number, values in self._split_elements(data):
            for at in range(0, len(values), _PART_BYTES):
                part = values[at : at + _PART_BYTES]
                if filled + len(part) > _PART_BYTES:
                    tasks.append([])
                    filled = 0
                tasks[-1].append(self._task(number, part))
                filled += len(part)
        return [partial(_run_all, group) for group in tasks]

    def stats(self) -> tuple[ValueStats, ...]:
        """Return the statistics by chunk; call it after the last bytes."""
        return tuple(map(merge_stats, self._parts))

    def _task(self, number: int, data: bytes | memoryview) -> HashTask:
        """Return the task that measures part of a chunk."""
        parts, dtype = self._parts[number], self._chunks[number].dtype
        at = len(parts)
        parts.append(ValueStats())

        def measure() -> None:
            parts[at] = measure_values(data, dtype)

        return measure

    def _split_chunks(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield the next bytes by chunk."""
        skipped = min(self._skipped, len(data))
        self._skipped -= skipped
        data = data[skipped:]
        while len(data):
            while not self._left:
                self._number += 1
                self._left = self._chunks[self._number].nbytes
            part = data[: self._left]
            self._left -= len(part)
            data = data[len(part) :]
            yield self._number, part

    def _split_elements(self, data: memoryview) -> Iterator[tuple[int, bytes | memoryview]]:
        """Yield complete elements by chunk, and keep an incomplete one for the next call."""
        for number, part in self._split_chunks(data):
            width = max(bits(self._chunks[number].dtype) // 8, 1)
            if self._rest:
                missing = width - len(self._rest)
                self._rest, part = self._rest + part[:missing], part[missing:]
                if len(self._rest) < width:
                    continue
                yield number, self._rest
            stop = len(part) - len(part) % width
            self._rest = bytes(part[stop:])
            if stop:
                yield number, part[:stop]


def _run_all(tasks: Sequence[HashTask]) -> None:
    for task in tasks:
        task()


def measure_chunk(chunk: PayloadChunk, arrays: Mapping[Path, TensorShards]) -> ValueStats:
    """Return statistics for a chunk whose elements are all on this rank."""
    meter = ChunkMeter((chunk,), 0)
    for part in tensor_bytes(view_box(arrays[chunk.path], chunk.box)):
        _run_all(meter.split(part))
    return meter.stats()[0]
