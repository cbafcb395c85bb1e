"""Payload files of a native step: one writer's ordinary safetensors files, and block hashes."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import xxhash

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import SAFETENSORS_NAMES, bits, is_known, nbytes
from shardckpt.errors import UnsupportedError
from shardckpt.format.encodings.safetensors import HeaderTensor, encode_entries, join_header
from shardckpt.manifest import Path, dotted

VERSION = (1, 0)
"""Of the format: a reader refuses a larger first number, and ignores what a larger second one adds."""

BLOCK_BYTES = 1 << 22
"""Bytes of a file that one hash covers."""

DATA_ALIGNMENT = 4096
"""Where a file's data starts: direct I/O wants it, no reader relies on it."""

KEY = "shardckpt"
"""Key in a payload file's `__metadata__`."""

HF_INDEX = "model.safetensors.index.json"

MOST_BYTES = 1 << 30
"""Bytes of data after which a writer begins another file."""

_TENSOR_ALIGNMENT = 64
_MOST_CHUNKS = 100_000
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class PayloadChunk(NamedTuple):
    """A box of a tensor that is written to one file.

    Attributes:
        path: Path of the tensor in the saved state.
        shape: Full shape, in elements.
        dtype: Name of the torch dtype.
        box: The elements; written in row-major order.
    """

    path: Path
    shape: Shape
    dtype: str
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return nbytes(self.dtype, self.box.volume)


@dataclass(frozen=True, slots=True)
class PayloadFile:
    """One file to write: `header`, then the bytes of its chunks.

    Attributes:
        name: In the step's folder.
        header: First bytes of the file.
        chunks: In the order of the file.
        offsets: First byte of each chunk in the file.
        keys: Name of each chunk in the file.
    """

    name: str
    header: bytes
    chunks: tuple[PayloadChunk, ...]
    offsets: tuple[int, ...]
    keys: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.offsets[-1] + self.chunks[-1].nbytes if self.chunks else len(self.header)


def new_save_id() -> str:
    """Return a name for a save: digits and small letters, sortable by the time it began, different for each."""
    stamp, digits = time.time_ns() // 1_000_000, ""
    while stamp:
        stamp, digit = divmod(stamp, 36)
        digits = _DIGITS[digit] + digits
    return digits.rjust(9, "0") + "".join(secrets.choice(_DIGITS) for _ in range(6))


def plan_payloads(
    save: str,
    writer: int,
    chunks: Sequence[PayloadChunk],
    *,
    most_bytes: int = MOST_BYTES,
    model: Path | None = None,
    carry: Mapping[str, object] | None = None,
) -> tuple[PayloadFile, ...]:
    """Decide which files a writer writes, and their headers. Pure.

    Args:
        save: The save's id.
        writer: Which writer, from 0.
        chunks: In the order of the saved state.
        most_bytes: Bytes of data after which another file begins; a larger chunk gets a file of its own.
        model: Where the model is, when this writer writes everything: its tensors get files of their own under their
            own names, as Hugging Face's libraries read them.
        carry: JSON that the header of the first file holds besides, so that a lost manifest can be rebuilt in full; the
            file is there then even without chunks.

    Raises:
        UnsupportedError: A type that the format has no name for; the message names the array.
    """
    for chunk in chunks:
        if not is_known(chunk.dtype):
            raise UnsupportedError(f"a tensor of type {chunk.dtype} cannot be saved", where=dotted(chunk.path))
    files = _arrange(tuple(chunks), most_bytes, model)
    if carry is not None and not files:
        files = (_File((), (), "[]", ""),)
    return tuple(_payload(save, writer, number, file, None if number else carry) for number, file in enumerate(files))


class _File(NamedTuple):
    """What of a file is the same in every save of a run.

    Attributes:
        chunks: In the order of the file.
        keys: Name of each in the file.
        listed: The chunks in JSON, as the metadata has them.
        entries: The chunks in JSON, as the header has them.
    """

    chunks: tuple[PayloadChunk, ...]
    keys: tuple[str, ...]
    listed: str
    entries: str


@lru_cache(maxsize=4)  # a run saves the same thing again and again, and perhaps a variant or two
def _arrange(chunks: tuple[PayloadChunk, ...], most_bytes: int, model: Path | None) -> tuple[_File, ...]:
    """Decide which chunk goes where, and by what name."""
    keys = _Keys(model)
    files = [*_files([c for c in chunks if not keys.is_model(c)], most_bytes)]
    files += _files([c for c in chunks if keys.is_model(c)], most_bytes)
    return tuple(_file(file, keys) for file in files)


def _file(chunks: Sequence[PayloadChunk], keys: _Keys) -> _File:
    names = tuple(keys.next(chunk) for chunk in chunks)
    listed = [[list(c.path), c.dtype, list(c.shape), list(c.box.offset), list(c.box.size)] for c in chunks]
    entries = encode_entries([_header_tensor(n, c) for n, c in zip(names, chunks, strict=True)])
    return _File(tuple(chunks), names, encode_canonical(listed).decode("ascii"), entries)


def _files(chunks: Sequence[PayloadChunk], most_bytes: int) -> Iterator[list[PayloadChunk]]:
    """Split chunks into files, in order, and sort each file so that every chunk is aligned to its dtype at least."""
    file: list[PayloadChunk] = []
    size = 0
    for chunk in chunks:
        nbytes_ = chunk.nbytes
        if file and (size + nbytes_ > most_bytes or len(file) == _MOST_CHUNKS):
            yield sorted(file, key=_by_alignment)
            file, size = [], 0
        file.append(chunk)
        size += nbytes_
    if file:
        yield sorted(file, key=_by_alignment)


def _by_alignment(chunk: PayloadChunk) -> tuple[bool, int]:
    return chunk.nbytes % _TENSOR_ALIGNMENT != 0, -bits(chunk.dtype)


class _Keys:
    """Names of chunks in a writer's files: `{fqn}@{n}`, or an array's own name where one writer writes all of it."""

    def __init__(self, model: Path | None) -> None:
        self._model = model
        self._counts: Counter[str] = Counter()
        self._taken = {"", "__metadata__"}

    def is_model(self, chunk: PayloadChunk) -> bool:
        return self._model is not None and chunk.path[: len(self._model)] == self._model

    def next(self, chunk: PayloadChunk) -> str:
        if self._model is not None and self.is_model(chunk):
            own = _printable(dotted(chunk.path[len(self._model) :]))
            if own not in self._taken:
                self._taken.add(own)
                return own
        name = _printable(dotted(chunk.path))
        while (key := f"{name}@{self._counts[name]}") in self._taken:
            self._counts[name] += 1
        self._taken.add(key)
        return key


def _printable(name: str) -> str:
    """Half a surrogate pair, which no UTF-8 holds, is written as an escape: the exact path stands in the metadata."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _payload(save: str, writer: int, number: int, file: _File, carry: Mapping[str, object] | None) -> PayloadFile:
    first = encode_canonical({"version": list(VERSION), "save": save, "writer": writer}).decode("ascii")
    last = "" if carry is None else f',"carry":{encode_canonical(carry).decode("ascii")}'
    metadata = {"format": "pt", KEY: f'{first[:-1]},"chunks":{file.listed}{last}}}'}
    header = join_header(file.entries, metadata, align=DATA_ALIGNMENT)
    offsets, at = [], len(header)
    for chunk in file.chunks:
        offsets.append(at)
        at += chunk.nbytes
    return PayloadFile(f"{save}-{writer:05d}-{number:02d}.safetensors", header, file.chunks, tuple(offsets), file.keys)


def _header_tensor(name: str, chunk: PayloadChunk) -> HeaderTensor:
    """Types that safetensors has no name for are bytes to it."""
    if chunk.dtype in SAFETENSORS_NAMES and chunk.box.volume * bits(chunk.dtype) % 8 == 0:
        return HeaderTensor(name, chunk.dtype, chunk.box.size)
    return HeaderTensor(name, "uint8", (chunk.nbytes,))


def encode_canonical(content: object) -> bytes:
    """Return JSON in the one form that the format uses: ASCII, no white space, keys in the order given."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def hf_index(payloads: Sequence[PayloadFile], model: Path) -> bytes:
    """Return the content of `model.safetensors.index.json` for the save of one writer.

    Args:
        payloads: Planned with the same `model`.
        model: Where the model is.
    """
    n = len(model)
    placed = [
        (key, payload.name, chunk.nbytes)
        for payload in payloads
        for key, chunk in zip(payload.keys, payload.chunks, strict=True)
        if chunk.path[:n] == model
    ]
    content = {
        "metadata": {"total_size": sum(size for _, _, size in placed)},
        "weight_map": {key: name for key, name, _ in placed},
    }
    return (json.dumps(content, indent=2) + "\n").encode("ascii")


class BlockHasher:
    """Hashes a file as it is written: xxh3-64 of every block from its first byte on, the last one shorter."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._current = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the file's next bytes."""
        rest = memoryview(data).cast("B")
        while len(rest):
            part = rest[: BLOCK_BYTES - self._filled]
            self._current.update(part)
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._close()

    def digests(self) -> tuple[int, ...]:
        """Return the hashes of all blocks. Nothing may be added afterwards."""
        if self._filled:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._current.intdigest())
        self._current.reset()
        self._filled = 0


class ChunkHasher:
    """Hashes each chunk of a file as the file is written: the xxh3-128 of its bytes.

    Args:
        payload: The planned file.
    """

    def __init__(self, payload: PayloadFile) -> None:
        self._ends = [offset + c.nbytes for offset, c in zip(payload.offsets, payload.chunks, strict=True)]
        self._start = payload.offsets[0] if payload.offsets else payload.nbytes
        self._at = 0
        self._done: list[bytes] = []
        self._current = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the file's next bytes."""
        rest = memoryview(data).cast("B")
        if self._at < self._start:
            skipped = min(self._start - self._at, len(rest))
            self._at, rest = self._at + skipped, rest[skipped:]
        while len(rest) and len(self._done) < len(self._ends):
            part = rest[: self._ends[len(self._done)] - self._at]
            self._current.update(part)
            self._at, rest = self._at + len(part), rest[len(part) :]
            self._close(self._at)

    def digests(self) -> tuple[bytes, ...]:
        """Return the hashes of all chunks, once all of the file was taken."""
        self._close(self._at)
        return tuple(self._done)

    def _close(self, at: int) -> None:
        """End the chunk that ends here, and empty ones behind it."""
        while len(self._done) < len(self._ends) and self._ends[len(self._done)] == at:
            self._done.append(self._current.digest())
            self._current.reset()


class FileHasher:
    """What is hashed of a file as it is written.

    Args:
        payload: The planned file.
        blocks: Hash its blocks.
        chunks: Hash its chunks.
    """

    def __init__(self, payload: PayloadFile, *, blocks: bool, chunks: bool) -> None:
        self._blocks = BlockHasher() if blocks else None
        self._chunks = ChunkHasher(payload) if chunks else None

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Take the file's next bytes."""
        if self._blocks is not None:
            self._blocks.update(data)
        if self._chunks is not None:
            self._chunks.update(data)

    @property
    def hashes(self) -> tuple[int, ...] | None:
        """Of the blocks; None where none are made. Nothing may be added afterwards."""
        return None if self._blocks is None else self._blocks.digests()

    @property
    def digests(self) -> tuple[bytes, ...] | None:
        """Of the chunks; None where none are made. Nothing may be added afterwards."""
        return None if self._chunks is None else self._chunks.digests()
