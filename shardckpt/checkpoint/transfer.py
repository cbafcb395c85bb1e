"""From memory to payload files: what is planned is written as it lies, hashed on its way, through a bounded buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from typing_extensions import Self

from shardckpt.boxes import Box, contiguous_blocks, intersect, shift, whole
from shardckpt.format.native_part import Written
from shardckpt.format.native_payload import FileHasher, Payload
from shardckpt.manifest import Path
from shardckpt.state.pieces import LocalArray
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import Writer

STAGED_BYTES = 16 << 20
"""Bytes of what does not lie in one piece in this machine's memory that are copied at a time."""

SLICE_BYTES = 4 << 20
"""Bytes handed to the disk at once: as many are hashed meanwhile."""

_SMALL_BYTES = 64 << 10
_GATHERED_BYTES = 1 << 20


Source = Callable[[Payload], Iterable[memoryview]]
"""Gives the contents of a file from its first byte on; each part is valid until the next one is asked for."""


def write_payloads(
    publication: Publication, payloads: Sequence[Payload], source: Source, *, checksums: bool, digests: bool = False
) -> list[Written]:
    """Write a rank's files.

    Args:
        publication: Where they go.
        payloads: As they were laid out.
        source: Gives their contents.
        checksums: Hash every block of what is written.
        digests: Hash every chunk too.

    Raises:
        StorageError: The storage failed.
    """
    written = []
    with _Hashing() as hashing:
        for payload in payloads:
            hasher = FileHasher(payload, blocks=checksums, chunks=digests)
            with publication.create(payload.name) as writer:
                stream = _Stream(writer, hasher if checksums or digests else None, hashing)
                for part in source(payload):
                    stream.add(part)
                stream.finish()
            written.append(Written(payload, hasher.hashes, hasher.digests))
    return written


def contents(payload: Payload, arrays: Mapping[Path, LocalArray]) -> Iterator[memoryview]:
    """Yield the bytes of a file, as they lie in memory now.

    Args:
        payload: The file as it was laid out.
        arrays: What lies here.
    """
    yield memoryview(payload.header)
    for chunk in payload.chunks:
        yield from tensor_bytes(held(arrays[chunk.path], chunk.box))


class _Hashing:
    """One thread beside the one that writes."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, hasher: FileHasher, data: memoryview) -> Future[None]:
        """Hash some bytes while others do something else."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardckpt-hash")
        return self._pool.submit(hasher.update, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()


class _Stream:
    """One file's bytes in order, small ones gathered, each hashed while it is written."""

    def __init__(self, writer: Writer, hasher: FileHasher | None, hashing: _Hashing) -> None:
        self._writer, self._hasher, self._hashing = writer, hasher, hashing
        self._small = bytearray()

    def add(self, data: memoryview) -> None:
        """Append bytes; they are no longer looked at when this returns."""
        if len(data) <= _SMALL_BYTES:
            self._small += data
            if len(self._small) >= _GATHERED_BYTES:
                self.finish()
            return
        self.finish()
        for start in range(0, len(data), SLICE_BYTES):
            self._put(data[start : start + SLICE_BYTES])

    def finish(self) -> None:
        """Write what was gathered."""
        if self._small:
            self._put(memoryview(self._small))
            self._small = bytearray()

    def _put(self, data: memoryview) -> None:
        hashed = None
        if self._hasher is not None and len(data) > _SMALL_BYTES:
            hashed = self._hashing.submit(self._hasher, data)
        elif self._hasher is not None:
            self._hasher.update(data)
        self._writer.write(data)
        if hashed is not None:
            hashed.result()


def held(array: LocalArray, box: Box) -> torch.Tensor:
    """Return the elements of a box of an array, as a view of what lies here.

    Args:
        array: Of which this rank holds all of the box.
        box: Which elements.
    """
    for portion in array.portions:
        if portion.box == box:
            return portion.tensor
        if box.volume and intersect(portion.box, box) == box:
            return narrowed(portion.tensor, shift(box, portion.box.offset))
    assert not box.volume, "a plan gives a rank only what it holds"
    return torch.empty(0, dtype=torch.uint8)


def narrowed(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of a box of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(box.offset, box.size, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield a tensor's elements in row-major order: as it lies where that is possible, else in staged parts.

    Args:
        tensor: Plain, of any strides, on any device.
    """
    if not tensor.numel():
        return
    if lies_flat(tensor):
        yield copied_bytes(tensor) if tensor.nbytes <= _SMALL_BYTES else flat_bytes(tensor)
        return
    for box in contiguous_blocks(whole(tuple(tensor.shape)), max(STAGED_BYTES // tensor.element_size(), 1)):
        yield flat_bytes(narrowed(tensor, box).resolve_conj().resolve_neg().contiguous().cpu())


def is_flat(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory is its elements in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def lies_flat(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory is its elements in row-major order, on this machine."""
    return tensor.is_cpu and is_flat(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor that is flat, as bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor that lies flat; writing to it changes the tensor."""
    if tensor.dtype in _PLAIN and tensor.numel():
        return memoryview(tensor.detach().numpy()).cast("B")  # type: ignore[arg-type]
    return memoryview(flat(tensor).numpy())  # type: ignore[arg-type]


def copied_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a copy of the memory of a small tensor that lies flat: a tenth of the time that a view takes to make."""
    return memoryview(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


_PLAIN = frozenset(
    {
        *(torch.float16, torch.float32, torch.float64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)
"""Types whose elements memoryview knows."""
