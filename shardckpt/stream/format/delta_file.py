"""Files of changes: safetensors with one tensor of encoded bytes for each changed box.

The commit has the hash of the header, and the header has the hash of each change. So a reader of some changes verifies
them without the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardckpt.boxes import Box, full_box
from shardckpt.encodings.safetensors import HeaderTensor, encode_header, parse_header
from shardckpt.encodings.typed_json import dump, load
from shardckpt.errors import CheckpointError, ChecksumError, FormatError, TruncatedError
from shardckpt.storage.store import Read, Store
from shardckpt.stream.format.stream_records import KEY, DeltaFile, DeltaIndex, StoredChange, StreamTensor, Version

__all__ = ["EncodedChange", "LocatedChange", "read_changes", "read_index", "write_changes"]

_MAX_HEADER_BYTES = 100_000_000
_BATCH_BYTES = 64 << 20


class EncodedChange(NamedTuple):
    """A box's change, as its file has it."""

    name: str
    box: Box
    data: bytes


class LocatedChange(NamedTuple):
    """A change in a file."""

    name: str
    box: Box
    file: str  # name in the stream's folder
    start: int  # first byte in the file
    nbytes: int
    sha256: str


def write_changes(
    store: Store, folder: str, name: str, stream: str, version: Version, changes: Sequence[EncodedChange]
) -> DeltaFile:
    """Write a file of changes, durably, and return its record."""
    stored = tuple(
        StoredChange(each.name, each.box.offset, each.box.size, hashlib.sha256(each.data).hexdigest())
        for each in changes
    )
    index = dump(DeltaIndex(stream, version, stored)).decode("ascii")
    tensors = [HeaderTensor(str(at), "uint8", (len(each.data),)) for at, each in enumerate(changes)]
    header = encode_header(tensors, {KEY: index})
    with store.create(f"{folder}/{name}") as writer:
        writer.write(header)
        for each in changes:
            writer.write(each.data)
    nbytes = len(header) + sum(len(each.data) for each in changes)
    return DeltaFile(name, nbytes, len(header), hashlib.sha256(header).hexdigest())


def read_index(
    store: Store, version: Version, files: Sequence[DeltaFile], stream: str, tensors: Mapping[str, StreamTensor]
) -> list[LocatedChange]:
    """Return the changes in a version's files, verified against its commit, in one batch of requests."""
    headers = [bytearray(_require_size(store, version, file)) for file in files]
    names = [f"{version.folder}/{file.name}" for file in files]
    store.read([Read(name, 0, memoryview(header)) for name, header in zip(names, headers, strict=True)])
    located: list[LocatedChange] = []
    for file, name, header in zip(files, names, headers, strict=True):
        where = f"{store.url}/{name}"
        if hashlib.sha256(header).hexdigest() != file.header_sha256:
            raise ChecksumError(
                "the header differs from the commit's hash", where=where, fix="Take a newer version, or an anchor."
            )
        located += _locate(file, name, header, stream, version, tensors, where)
    _require_disjoint(located, tensors, f"{store.url}/{version.folder}")
    return located


def _require_disjoint(changes: Sequence[LocatedChange], tensors: Mapping[str, StreamTensor], where: str) -> None:
    """Refuse changes that overlap: many short ones of one large box would take the memory of as many boxes."""
    left = {name: full_box(tuple(tensor.shape)).volume for name, tensor in tensors.items()}
    for change in changes:
        left[change.name] -= change.box.volume
        if left[change.name] < 0:
            raise FormatError("changes of one tensor overlap", where=where, found=change.name)


def _require_size(store: Store, version: Version, file: DeltaFile) -> int:
    name = f"{version.folder}/{file.name}"
    size = store.size(name)
    if size != file.nbytes:
        raise TruncatedError(
            "a file of changes has another size than its commit says",
            where=f"{store.url}/{name}",
            found=f"{size} bytes",
            expected=file.nbytes,
        )
    if not 8 <= file.header_bytes <= min(size, _MAX_HEADER_BYTES):
        raise FormatError("the commit gives an impossible header", where=f"{store.url}/{name}", found=file.header_bytes)
    return file.header_bytes


def _locate(
    file: DeltaFile,
    name: str,
    data: bytearray,
    stream: str,
    version: Version,
    tensors: Mapping[str, StreamTensor],
    where: str,
) -> Iterator[LocatedChange]:
    header = parse_header(data[8:], where=where)
    index = load(DeltaIndex, header.metadata.get(KEY, "").encode(), where=where)
    if (index.stream, index.version) != (stream, version):
        raise CheckpointError("the file is for another version or stream", where=where, found=str(index.version))
    if len(index.changes) != len(header.tensors) or header.data_start + header.data_bytes != file.nbytes:
        raise FormatError("the header does not fit the file", where=where)
    for at, change in enumerate(index.changes):
        dtype, _, start, end = header.tensors.get(str(at), ("", (), 0, 0))
        tensor = tensors.get(change.name)
        box = Box(tuple(change.offset), tuple(change.size))
        if tensor is None or dtype != "uint8" or not _fits(box, tensor):
            raise FormatError("the file has a change that fits no tensor", where=where, found=f"{change.name} {box}")
        yield LocatedChange(change.name, box, name, header.data_start + start, end - start, change.sha256)


def _fits(box: Box, tensor: StreamTensor) -> bool:
    shape = tuple(tensor.shape)
    return len(box.offset) == len(box.size) == len(shape) and box.within(shape)


def read_changes(store: Store, changes: Iterable[LocatedChange]) -> Iterator[list[tuple[LocatedChange, memoryview]]]:
    """Yield batches, bounded in bytes, of changes with their bytes, verified."""
    batch: list[LocatedChange] = []
    nbytes = 0
    for change in changes:
        if batch and nbytes + change.nbytes > _BATCH_BYTES:
            yield _read_batch(store, batch)
            batch, nbytes = [], 0
        batch.append(change)
        nbytes += change.nbytes
    if batch:
        yield _read_batch(store, batch)


def _read_batch(store: Store, batch: Sequence[LocatedChange]) -> list[tuple[LocatedChange, memoryview]]:
    buffers = [memoryview(bytearray(each.nbytes)) for each in batch]
    store.read([Read(each.file, each.start, buffer) for each, buffer in zip(batch, buffers, strict=True)])
    for change, buffer in zip(batch, buffers, strict=True):
        if hashlib.sha256(buffer).hexdigest() != change.sha256:
            raise ChecksumError(
                "a change differs from its hash",
                where=f"{store.url}/{change.file}",
                found=change.name,
                fix="Take a newer version, or an anchor.",
            )
    return [*zip(batch, buffers, strict=True)]
