"""Compute statistics for the values in chunks from the bytes that are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from shardckpt.checkpoint.stateful.tensor_bytes import tensor_bytes, view_box
from shardckpt.dtypes import bits
from shardckpt.encodings.element_values import measure_values
from shardckpt.encodings.value_stats import ValueStats, merge_stats
from shardckpt.manifest import Path
from shardckpt.native.payload import HashTask, PayloadChunk
from shardckpt.state.local.tensor_shards import TensorShards

_PART_BYTES = 16 << 20  # bytes that one task measures


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
