"""Payload files of a native step: safetensors files with block hashes."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import xxhash

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import HALF_BYTE_PAIR, SAFETENSORS_NAMES, bits, is_known, nbytes
from shardckpt.encodings.safetensors import HeaderTensor, encode_entries, join_header
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Path, dotted

VERSION = 1  # version of the format; readers refuse every other one
HASH_BYTES = 8  # bytes of an xxh3-64
BLOCK_BYTES = 1 << 17  # bytes of a file that one hash covers
GROUP_BLOCKS = 32  # blocks that share one hash in a very large step
GROUP_BYTES = GROUP_BLOCKS * BLOCK_BYTES  # bytes in a group; writers hash and write this much at a time
DATA_ALIGNMENT = 4096  # alignment of a file's data, in bytes, for direct I/O; readers do not depend on it

# Data with at least these bytes starts at a block. Then a rank that loads some blocks of an array reads no other bytes
# to verify them. Smaller files stay small.
BLOCK_ALIGNED_BYTES = 1 << 24

KEY = "shardckpt"  # key in a payload file's `__metadata__`

HF_INDEX = "model.safetensors.index.json"

MAX_BYTES = 1 << 30  # bytes of data after which a writer starts another file

_TENSOR_ALIGNMENT = 64
# Bytes that xxhash hashes without releasing the interpreter's lock. Beside a loop in Python it waits 5 ms to take the
# lock again, longer than it hashes many blocks. Divides a block.
_LOCKED_BYTES = 1 << 16

_MAX_CHUNKS = 100_000
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class PayloadChunk(NamedTuple):
    """A box that is written to one file."""

    path: Path  # path of the tensor in the saved state
    shape: Shape
    dtype: str  # dtype in torch's spelling
    box: Box  # box in the full tensor, written in row-major order

    @property
    def nbytes(self) -> int:
        """Bytes in the box."""
        return nbytes(self.dtype, self.box.volume)


@dataclass(frozen=True, slots=True)
class PayloadFile:
    """A file to write: `header`, followed by its chunks' bytes."""

    name: str  # file name in the step's folder
    header: bytes  # first bytes of the file
    chunks: tuple[PayloadChunk, ...]  # chunks in file order
    offsets: tuple[int, ...]  # offset in the file of each chunk's first byte
    keys: tuple[str, ...]  # tensor name of each chunk in the file
    nbytes: int  # size of the file in bytes

    @property
    def has_data(self) -> bool:
        """Whether anything follows the header."""
        return self.nbytes > len(self.header)


def new_save_id() -> str:
    """Return a new save id: digits and lower-case letters, sortable by start time."""
    stamp, digits = min(max(time.time_ns() // 1_000_000, 0), 36**9 - 1), ""  # the clock may be wrong
    while stamp:
        stamp, digit = divmod(stamp, 36)
        digits = _DIGITS[digit] + digits
    return digits.rjust(9, "0") + "".join(secrets.choice(_DIGITS) for _ in range(6))


def plan_payloads(
    save: str,
    writer: int,
    chunks: Sequence[PayloadChunk],
    *,
    most_bytes: int = MAX_BYTES,
    model: Path | None = None,
    carry: Mapping[str, object] | None = None,
) -> tuple[PayloadFile, ...]:
    """Plan a writer's files, with their headers, without I/O."""
    return build_payloads(save, writer, arrange_files(tuple(chunks), most_bytes, model), carry)


class FileLayout(NamedTuple):
    """The parts of a file that are equal in every save of a run."""

    chunks: tuple[PayloadChunk, ...]  # chunks in file order
    keys: tuple[str, ...]  # tensor name of each chunk in the file
    ends: tuple[int, ...]  # end of each chunk in bytes, counted from the first chunk
    listed: str  # JSON of the chunks in the metadata
    entries: str  # JSON of the chunks in the header

    @property
    def nbytes(self) -> int:
        """Bytes in the chunks."""
        return self.ends[-1] if self.ends else 0


@lru_cache(maxsize=4)  # a run saves the same arrays repeatedly, possibly with a few variants
def arrange_files(
    chunks: tuple[PayloadChunk, ...], most_bytes: int = MAX_BYTES, model: Path | None = None
) -> tuple[FileLayout, ...]:
    """Assign chunks to files and give them names, without I/O."""
    for chunk in chunks:
        if not is_known(chunk.dtype):
            raise UnsupportedError(f"a tensor of type {chunk.dtype} cannot be saved", where=dotted(chunk.path))
    keys = _Keys(model)
    files = [*_files([c for c in chunks if not keys.is_model(c)], most_bytes)]
    files += _files([c for c in chunks if keys.is_model(c)], most_bytes)
    return tuple(_file(file, keys) for file in files)


def build_payloads(
    save: str, writer: int, files: Sequence[FileLayout], carry: Mapping[str, object] | None = None
) -> tuple[PayloadFile, ...]:
    """Return a writer's files with their headers, without I/O."""
    if carry is not None and not files:
        files = (FileLayout((), (), (), "[]", ""),)
    return tuple(_payload(save, writer, number, file, None if number else carry) for number, file in enumerate(files))


def _file(chunks: Sequence[PayloadChunk], keys: _Keys) -> FileLayout:
    names = tuple(keys.next(chunk) for chunk in chunks)
    listed = [[list(c.path), c.dtype, list(c.shape), list(c.box.offset), list(c.box.size)] for c in chunks]
    entries = encode_entries([_header_tensor(n, c) for n, c in zip(names, chunks, strict=True)])
    ends = tuple(accumulate(chunk.nbytes for chunk in chunks))
    return FileLayout(tuple(chunks), names, ends, encode_canonical(listed).decode("ascii"), entries)


def _files(chunks: Sequence[PayloadChunk], most_bytes: int) -> Iterator[list[PayloadChunk]]:
    """Split chunks into files, in order, and sort each so that every chunk is aligned to its dtype at least."""
    file: list[PayloadChunk] = []
    size = 0
    for chunk in chunks:
        nbytes_ = chunk.nbytes
        if file and (size + nbytes_ > most_bytes or len(file) == _MAX_CHUNKS):
            yield sorted(file, key=_by_alignment)
            file, size = [], 0
        file.append(chunk)
        size += nbytes_
    if file:
        yield sorted(file, key=_by_alignment)


def _by_alignment(chunk: PayloadChunk) -> tuple[bool, bool, int]:
    size = chunk.nbytes
    return size % BLOCK_BYTES != 0, size % _TENSOR_ALIGNMENT != 0, -bits(chunk.dtype)


class _Keys:
    """Chunk names in a writer's files: `{fqn}@{n}`, or the array's own name if one writer writes all of it."""

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
    """Escape unpaired surrogates; the metadata contains the exact path."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _payload(save: str, writer: int, number: int, file: FileLayout, carry: Mapping[str, object] | None) -> PayloadFile:
    first = encode_canonical({"version": VERSION, "save": save, "writer": writer}).decode("ascii")
    last = "" if carry is None else f',"carry":{encode_canonical(carry).decode("ascii")}'
    metadata = {"format": "pt", KEY: f'{first[:-1]},"chunks":{file.listed}{last}}}'}
    align = BLOCK_BYTES if file.nbytes >= BLOCK_ALIGNED_BYTES else DATA_ALIGNMENT
    header = join_header(file.entries, metadata, align=align)
    start = len(header)
    offsets = tuple([start + end for end in (0, *file.ends[:-1])]) if file.chunks else ()
    name = f"{save}-{writer:05d}-{number:02d}.safetensors"
    return PayloadFile(name, header, file.chunks, offsets, file.keys, start + file.nbytes)


def _header_tensor(name: str, chunk: PayloadChunk) -> HeaderTensor:
    """Return a chunk's header entry; dtypes without a name in safetensors are stored as bytes."""
    is_scalar_pair = chunk.dtype == HALF_BYTE_PAIR and not chunk.box.size
    if chunk.dtype in SAFETENSORS_NAMES and chunk.box.volume * bits(chunk.dtype) % 8 == 0 and not is_scalar_pair:
        return HeaderTensor(name, chunk.dtype, chunk.box.size)
    return HeaderTensor(name, "uint8", (chunk.nbytes,))


_CANONICAL = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encode_canonical(content: object) -> bytes:
    """Return JSON in canonical form: ASCII, no white space, keys in given order."""
    return _CANONICAL.encode(content).encode("ascii")


def hf_index(payloads: Sequence[PayloadFile], model: Path) -> bytes:
    """Return the content of `model.safetensors.index.json` for a save by one writer."""
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


HashTask = Callable[[], None]  # hashes a part of some bytes


def group_hashes(hashes: bytes) -> bytes:
    """Return the hashes of a file's groups, packed like block hashes."""
    # A group's hash is the xxh3-64 of its blocks' hashes. A group of one block has the hash of that block.
    size = GROUP_BLOCKS * HASH_BYTES
    groups = (hashes[at : at + size] for at in range(0, len(hashes), size))
    return b"".join(each if len(each) == HASH_BYTES else xxhash.xxh3_64_digest(each) for each in groups)


class GroupHasher:
    """Hashes one group's blocks, or a part that starts with a block."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._current = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Hash the group's next bytes, in parts for which xxhash keeps the interpreter's lock."""
        # Only the last part may be larger: so others wait for the lock no longer than a group is hashed.
        at = 0
        while at < len(data):
            rest = BLOCK_BYTES - self._filled
            is_last = len(data) - at <= rest
            part = data[at : at + (rest if is_last else _LOCKED_BYTES - self._filled % _LOCKED_BYTES)]
            self._current.update(part)
            self._filled += len(part)
            at += len(part)
            if self._filled == BLOCK_BYTES:
                self._done.append(self._current.digest())
                self._current.reset()
                self._filled = 0

    def digests(self) -> bytes:
        """Return the hashes, big-endian, back to back. Call it only after the last byte."""
        last = (self._current.digest(),) if self._filled else ()
        return b"".join((*self._done, *last))


class BlockHasher:
    """Hashes a file's blocks with xxh3-64 while the file is written."""

    def __init__(self) -> None:
        self._done: dict[int, bytes] = {}
        self._started = GroupHasher()
        self._at = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Hash the file's next bytes."""
        for task in self.split(memoryview(data).cast("B"), 1):
            task()

    def split(self, data: memoryview, most: int) -> list[HashTask]:
        """Return tasks that hash the file's next bytes; they may run concurrently and must end before the next call."""
        at, self._at = self._at, self._at + len(data)
        start = min(-at % GROUP_BYTES, len(data))
        stop = max(len(data) - self._at % GROUP_BYTES, start)
        groups, first = data[start:stop], (at + start) // GROUP_BYTES
        tasks: list[HashTask] = []
        if len(groups) < len(data):
            tasks.append(partial(self._hash_ends, at, data[:start], data[stop:]))
        numbers = iter(range(len(groups) // GROUP_BYTES))
        return tasks + [partial(self._hash_groups, groups, first, numbers)] * min(most, len(groups) // GROUP_BYTES)

    def digests(self) -> bytes:
        """Return the block hashes, big-endian, back to back. Call it only after the last byte."""
        return b"".join(self._done[number] for number in range(self._at // GROUP_BYTES)) + self._started.digests()

    def _hash_ends(self, at: int, head: memoryview, tail: memoryview) -> None:
        """Hash the started group's next bytes, and start another group."""
        self._started.update(head)
        if len(head) and (at + len(head)) % GROUP_BYTES == 0:
            self._done[at // GROUP_BYTES] = self._started.digests()
            self._started = GroupHasher()
        self._started.update(tail)

    def _hash_groups(self, groups: memoryview, first: int, numbers: Iterator[int]) -> None:
        """Hash some complete groups."""
        # Tasks share `numbers`, so that no task has several left at the end, and waits for the lock before each.
        for number in numbers:
            hasher = GroupHasher()
            hasher.update(groups[number * GROUP_BYTES : (number + 1) * GROUP_BYTES])
            self._done[first + number] = hasher.digests()


class ChunkHasher:
    """Computes the xxh3-128 of each chunk in a file while it is written."""

    def __init__(self, payload: PayloadFile) -> None:
        self._ends = [offset + c.nbytes for offset, c in zip(payload.offsets, payload.chunks, strict=True)]
        self._start = payload.offsets[0] if payload.offsets else payload.nbytes
        self._at = 0
        self._done: list[bytes] = []
        self._current = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Hash the file's next bytes."""
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
        """Return all chunks' hashes, after the complete file has been hashed."""
        self._close(self._at)
        return tuple(self._done)

    def _close(self, at: int) -> None:
        """Finish the chunk that ends at an offset, and empty chunks after it."""
        while len(self._done) < len(self._ends) and self._ends[len(self._done)] == at:
            self._done.append(self._current.digest())
            self._current.reset()


class FileHasher:
    """Computes a file's hashes while it is written."""

    def __init__(self, payload: PayloadFile, *, blocks: bool, chunks: bool) -> None:
        self._blocks = BlockHasher() if blocks else None
        self._chunks = ChunkHasher(payload) if chunks else None

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Hash the file's next bytes."""
        for task in self.split(memoryview(data).cast("B"), 1):
            task()

    def split(self, data: memoryview, most: int) -> list[HashTask]:
        """Return tasks that hash the file's next bytes; they may run concurrently and must end before the next call."""
        # One task hashes the chunks, since a chunk may have all bytes.
        tasks = [] if self._blocks is None else self._blocks.split(data, most)
        return tasks if self._chunks is None else [partial(self._chunks.update, data), *tasks]

    @property
    def hashes(self) -> bytes | None:
        """Block hashes; None if not computed. Read it only after the last byte."""
        return None if self._blocks is None else self._blocks.digests()

    @property
    def digests(self) -> tuple[bytes, ...] | None:
        """Chunk digests; None if not computed. Read it only after the last byte."""
        return None if self._chunks is None else self._chunks.digests()
