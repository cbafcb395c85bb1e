"""A save's base: an older checkpoint with the bytes of unchanged tensors."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import xxhash

from shardckpt.boxes import Box, contiguous_blocks
from shardckpt.checkpoint.load.load_plan import model_names
from shardckpt.checkpoint.load.source import CheckpointSource
from shardckpt.checkpoint.stateful.tensor_bytes import flat_bytes
from shardckpt.dtypes import nbytes
from shardckpt.encodings.value_stats import STATS_BYTES
from shardckpt.errors import CheckpointError, IncompleteError, MissingFileError, UnsupportedError, UsageError
from shardckpt.manifest import Path, Span, TensorEntry, dotted
from shardckpt.native.commit import COMMIT, find_model_files, read_commit
from shardckpt.native.manifest_json import PartialManifest
from shardckpt.native.payload import GROUP_BYTES, GroupHasher, PayloadChunk
from shardckpt.native.reader import NativeReader
from shardckpt.native.records import (
    DIGEST_BYTES,
    ArrayRecord,
    Base,
    FileRecord,
    group_files_by_base,
    is_same_folder,
    plain_name,
    refer_to,
    resolve_base,
)
from shardckpt.plan.naming.weights import to_base_name
from shardckpt.readers.chunk_reader import PieceReader, ReadItem
from shardckpt.storage.orphans import PARTIAL, list_owned
from shardckpt.storage.resolve_url import file_version, local_path, open_store
from shardckpt.storage.store import Read

_BATCH_BYTES = 64 << 20
_IN_ADAPTED = "base_model.model."  # prefix that PEFT adds to the base's names


class BaseRemovedError(IncompleteError):
    """Another process removed or replaced the base during the save."""


class BaseLocation(NamedTuple):
    """Location in the base for bytes that a save does not write again."""

    file: FileRecord  # file in the base, as the new step refers to it
    offset: int  # offset of the first byte in the file
    digest: bytes = b""  # xxh3-128 of the bytes; empty without a digest
    stats: bytes = b""  # packed statistics of the values; empty without statistics


class BaseCheckpoint:
    """Open checkpoint that a step refers to."""

    def __init__(self, url: str, step: str = "", rules: Mapping[str, str] | None = None) -> None:
        self.url, self.step = url, step
        self._source = CheckpointSource(url)
        self._reader = self._source.reader
        self._contents = self._reader.contents if isinstance(self._reader, NativeReader) else None
        self._rules = [(re.compile(pattern), new) for pattern, new in (rules or {}).items()]
        self._known_names: dict[Path, Mapping[str, Path]] = {}
        if step:
            refer_to(step, self._reader.store.url)  # raises if it is the step itself

    # Arrays with the same name and properties in the base

    @cached_property
    def _stored(self) -> Mapping[Path, ArrayRecord]:
        return {} if self._contents is None else {record.path: record for record in self._contents.arrays}

    @cached_property
    def _records(self) -> Mapping[Path, ArrayRecord]:
        return {path: record for path, record in self._stored.items() if record.digests}

    @cached_property
    def _rows(self) -> dict[Path, dict[Box, _StoredPiece]]:
        return {}

    def get_digest(self, chunk: PayloadChunk) -> bytes | None:
        """Return the digest of a chunk's bytes in the base; None if the base has no such chunk or digest."""
        row = self._row(chunk)
        return None if row is None else row.digest

    def has_stats(self, chunk: PayloadChunk) -> bool:
        """Return True if the base has statistics for a chunk that `get_digest` returned a digest for."""
        row = self._row(chunk)
        return row is not None and bool(row.stats)

    def _row(self, chunk: PayloadChunk) -> _StoredPiece | None:
        record = self._records.get(chunk.path)
        if record is None or (record.dtype, record.shape) != (chunk.dtype, chunk.shape):
            return None
        if chunk.path not in self._rows:
            self._rows[chunk.path] = {row.box: row for row in _iter_rows(record)}
        row = self._rows[chunk.path].get(chunk.box)
        assert self._contents is not None, "only a step has rows"
        return row if row is not None and self._has_file(self._contents.files[row.file]) else None

    def _has_file(self, file: FileRecord) -> bool:
        if file.base and is_same_folder(self._folder(file.place), self.step):
            return False  # a file of an earlier save in the target folder
        return file.hashes is not None and self._source.manifest.files.get(file.place, -1) >= file.nbytes

    def known(self, chunk: PayloadChunk) -> BaseLocation:
        """Return where the base has a chunk's bytes."""
        row = self._row(chunk)
        assert row is not None and self._contents is not None, "only what the base has is not written"
        return BaseLocation(self._file(self._contents.files[row.file].place), row.offset, row.digest, row.stats)

    # Arrays that are frozen

    def find_entry(self, path: Path, names: Sequence[str]) -> TensorEntry:
        """Return the base's entry for a frozen parameter."""
        entry = self._source.arrays.get(path)
        if entry is None:
            there = self._names(path[:-1], names)
            entry = next((self._source.arrays[there[name]] for name in self._spelt(names) if name in there), None)
        if entry is None:
            raise UsageError(
                "a frozen parameter is not in the base",
                where=dotted(path),
                found=self.url,
                fix="Pass base_key_map from the model's names to the base's, or save without trainable_only.",
            )
        return entry

    def _names(self, root: Path, names: Sequence[str]) -> Mapping[str, Path]:
        if root not in self._known_names:
            self._known_names[root] = model_names(self._source, root, names)
        return self._known_names[root]

    def _spelt(self, names: Iterable[str]) -> Iterator[str]:
        """Yield a parameter's possible names in the base."""
        # First with the rules applied, then unchanged, then without what PEFT adds.
        for name in names:
            yield _replaced(name, self._rules)
            yield name
            yield to_base_name(name[max(name.find(_IN_ADAPTED), 0) :])  # another module may hold the adapted one

    def locate(self, frozen: Mapping[Path, Sequence[str]]) -> dict[Path, TensorEntry]:
        """Return the base's entries for frozen parameters, with all elements."""
        wanted = {path: self.find_entry(path, names) for path, names in frozen.items()}
        located = dict(zip(wanted, self._source.locate(list(wanted.values())), strict=True))
        for path, entry in located.items():
            odd = [piece for piece in entry.pieces if not isinstance(piece.layout, Span) or "/" in piece.file]
            if entry.delivered not in ("", entry.stored) or (odd and not self._source.is_native):
                raise UnsupportedError(
                    "a step cannot refer to the storage format that the base uses here",
                    where=dotted(path),
                    found=f"{self.url}: {self._source.manifest.format}",
                    fix="Convert the base first: shardckpt.consolidate(base, ...) writes safetensors.",
                )
        return located

    def rows(self, entry: TensorEntry, hashes: Mapping[str, bytes]) -> Iterator[tuple[Box, BaseLocation]]:
        """Yield the box and location of each piece of an array."""
        stats = _read_piece_stats(self._stored.get(entry.path))
        for box, name, layout in entry.pieces:
            assert isinstance(layout, Span), "as `locate` made sure"
            file = self._file(name)
            file = file if file.hashes is not None else file._replace(hashes=hashes[name])
            yield box, BaseLocation(file, layout.offset, stats=stats.get(box, b""))

    def digests(self, wanted: Sequence[tuple[TensorEntry, Box, str]]) -> Iterator[bytes]:
        """Yield the xxh3-128 of boxes in the base, each cast to a dtype; reads one batch at a time."""
        pieces = PieceReader(self._reader.store)
        batch: list[tuple[int, ReadItem]] = []
        hashers = [_CastHasher(entry.stored, dtype) for entry, _, dtype in wanted]
        size = 0
        for number, (entry, box, _) in enumerate(wanted):
            most = max(_BATCH_BYTES // max(nbytes(entry.stored, 8) // 8, 1), 1)
            for part in contiguous_blocks(box, most) if box.volume else ():
                buffer = memoryview(bytearray(nbytes(entry.stored, part.volume)))
                batch.append((number, ReadItem(entry.pieces, part, entry.stored, buffer)))
                size += len(buffer)
                if size >= _BATCH_BYTES:
                    _hash(pieces, batch, hashers)
                    size = 0
        _hash(pieces, batch, hashers)
        return (hasher.digest() for hasher in hashers)

    # Files

    def is_committed(self) -> bool:
        """Return True if the base was not replaced since it was opened, and no save is about to replace it."""
        # A save that replaces a step on a disk writes `COMMIT` into its temporary folder, lists the files that other
        # steps refer to, and keeps these. So either it sees a manifest that was written before this call, or this call
        # sees its `COMMIT`. On a store without rename it replaces `COMMIT` before it lists them.
        # A base of another format is always committed.
        if not isinstance(self._reader, NativeReader):
            return True
        url = self._reader.store.url
        if _is_being_replaced(url):  # before COMMIT is read, since the save may replace it in between
            return False
        store = open_store(url)
        sizes = {entry.name: entry.size for entry in store.list()}
        try:
            return self._reader.commit.manifest in sizes and read_commit(store, sizes) == self._reader.commit
        except (CheckpointError, MissingFileError):  # another process has removed it
            return False

    def _file(self, place: str) -> FileRecord:
        """Return a base file as the new step refers to it, with stored hashes."""
        if self._contents is None:
            base = refer_to(self.step, self._reader.store.url)
            return FileRecord(plain_name(place, self.url), self._source.manifest.files[place], None, base)
        return self._files[place]._replace(base=refer_to(self.step, self._folder(place)))

    def _folder(self, place: str) -> str:
        """Return the path or URL of a file's folder."""
        here, file = self._reader.store.url, self._files.get(place)
        return resolve_base(here, file.base) if file is not None and file.base else here

    def build_location_key(self, entries: Mapping[Path, TensorEntry]) -> str:
        """Return a digest of arrays' locations; their bytes change only with it."""
        hasher = hashlib.blake2b(digest_size=16)
        sizes = self._source.manifest.files
        for path, entry in entries.items():
            rows = [(p.box, p.layout, self._folder(p.file), p.file.rpartition("/")[2]) for p in entry.pieces]
            hasher.update(repr((path, entry.shape, entry.stored, rows, [sizes[p.file] for p in entry.pieces])).encode())
        if self._contents is None:  # files of a native step never change; their names contain the save's id
            names = dict.fromkeys(piece.file for entry in entries.values() for piece in entry.pieces)
            hasher.update(repr([self.get_file_version(name) for name in names]).encode())
        return hasher.hexdigest()

    def get_file_version(self, name: str) -> str:
        """Return a text that changes when a base file is replaced."""
        # If the store does not have such a text, every call returns a different one, so that nothing counts as
        # unchanged.
        return file_version(self._folder(name), name.rpartition("/")[2]) or secrets.token_hex()

    @cached_property
    def _files(self) -> Mapping[str, FileRecord]:
        return {} if self._contents is None else {file.place: file for file in self._contents.files}

    def find_model_file(self, name: str, record: FileRecord) -> FileRecord | None:
        """Return a model file as the new step refers to it, if the base has one with equal bytes; None otherwise."""
        found = find_model_files(self._files.values()).get(name)
        if found is None or None in (found.hashes, record.hashes) or not self._has_file(found):
            return None
        is_equal = found.nbytes == record.nbytes and found.hashes in (record.hashes, record.with_groups().hashes)
        return self._file(found.place) if is_equal else None

    def find_unhashed_files(self, entries: Iterable[TensorEntry]) -> dict[str, int]:
        """Return the size in bytes, by name, of each array file without stored hashes."""
        names = dict.fromkeys(piece.file for entry in entries for piece in entry.pieces)
        return {
            name: self._source.manifest.files[name]
            for name in names
            if name not in self._files or self._files[name].hashes is None
        }

    def hash_blocks(self, files: Mapping[str, int], share: int, shares: int) -> list[str]:
        """Return hexadecimal hashes for every `shares`-th group of blocks, counted through all files."""
        buffer = memoryview(bytearray(GROUP_BYTES))
        hashes = []
        for number, (name, start, size) in enumerate(_groups(files)):
            if number % shares == share:
                self._reader.raw_store.read([Read(name, start, buffer[:size])])
                hasher = GroupHasher()
                hasher.update(buffer[:size])
                hashes.append(hasher.digests().hex())
        return hashes

    def bases(self, files: Iterable[FileRecord]) -> tuple[Base, ...]:
        """Return records for the other folders that contain the step's files."""
        own, further = Base(refer_to(self.step, self._reader.store.url)), []
        if isinstance(self._reader, NativeReader):
            commit = self._reader.commit
            own = own._replace(save=commit.save, sha256=commit.manifest_sha256)
            here = self._reader.store.url
            further = [(resolve_base(here, base.url), base) for base in self._reader.contents.bases]
        known = {refer_to(self.step, at): base for at, base in further if not is_same_folder(at, self.step)}
        known[own.url] = own
        return tuple(known[url]._replace(url=url) for url in group_files_by_base(files))


class _StoredPiece(NamedTuple):
    """An array piece in the base, with its file's index."""

    box: Box
    file: int
    offset: int
    digest: bytes
    stats: bytes


def _iter_rows(record: ArrayRecord) -> Iterator[_StoredPiece]:
    rows, n, width = record.rows.tolist(), 2 + len(record.shape), record.width
    for number, at in enumerate(range(0, len(rows), width)):
        box = Box(tuple(rows[at + 2 : at + n]), tuple(rows[at + n : at + width]))
        digest = record.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        stats = record.stats[number * STATS_BYTES : (number + 1) * STATS_BYTES]
        yield _StoredPiece(box, rows[at], rows[at + 1], digest, stats)


def _read_piece_stats(record: ArrayRecord | None) -> dict[Box, bytes]:
    """Return the packed statistics of an array's pieces; empty without them."""
    return {} if record is None else {row.box: row.stats for row in _iter_rows(record)}


def _replaced(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in rules:
        name = pattern.sub(new, name)
    return name


class _CastHasher:
    """Hashes elements as they are in memory after an exact cast."""

    def __init__(self, stored: str, dtype: str) -> None:
        self._hasher, self._stored, self._dtype = xxhash.xxh3_128(), stored, dtype

    def update(self, data: memoryview) -> None:
        if self._stored != self._dtype:
            values = torch.frombuffer(data, dtype=getattr(torch, self._stored)).to(getattr(torch, self._dtype))
            data = flat_bytes(values)
        self._hasher.update(data)

    def digest(self) -> bytes:
        return self._hasher.digest()


def _hash(pieces: PieceReader, batch: list[tuple[int, ReadItem]], hashers: Sequence[_CastHasher]) -> None:
    pieces.fill([want for _, want in batch])
    for number, want in batch:
        hashers[number].update(want.buffer)
    batch.clear()


def _groups(files: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for name, size in files.items():
        for start in range(0, size, GROUP_BYTES):
            yield name, start, min(GROUP_BYTES, size - start)


def merge_block_hashes(files: Mapping[str, int], shares: Sequence[Sequence[str]]) -> dict[str, bytes]:
    """Merge the block hashes from all ranks, by file."""
    merged: dict[str, list[str]] = {name: [] for name in files}
    rest = [iter(share) for share in shares]
    for number, (name, _, _) in enumerate(_groups(files)):
        merged[name].append(next(rest[number % len(rest)]))
    return {name: bytes.fromhex("".join(hashes)) for name, hashes in merged.items()}


class BaseReferences:
    """A step's references to files in other folders."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._files: list[FileRecord] = []
        self._arrays: dict[Path, ArrayRecord] = {}

    def add(self, path: Path, dtype: str, shape: tuple[int, ...], box: Box, known: BaseLocation) -> None:
        """Add an array box that the save does not write."""
        number = self._numbers.setdefault((known.file.base, known.file.name), len(self._files))
        if number == len(self._files):
            self._files.append(known.file)
        record = self._arrays.get(path) or ArrayRecord(path, dtype, shape, array("Q"))
        record.rows.extend((number, known.offset, *box.offset, *box.size))
        self._arrays[path] = record._replace(digests=record.digests + known.digest, stats=record.stats + known.stats)

    def part(self) -> PartialManifest:
        """Return the references as the manifest part of one writer."""
        return PartialManifest(tuple(self._files), tuple(self._arrays.values()))


def _is_being_replaced(url: str) -> bool:
    """Return True if another process has written, on a disk, all files for a step that will replace this one."""
    path = local_path(url)
    if path is None:
        return False
    return any(os.path.lexists(os.path.join(each, COMMIT)) for each in list_owned(os.path.realpath(path), PARTIAL))


def has_all_files(step: str, files: Iterable[FileRecord]) -> bool:
    """Return True if a step's files in other folders have their full size."""
    for url, wanted in group_files_by_base(files).items():
        sizes = {entry.name: entry.size for entry in open_store(resolve_base(step, url)).list()}
        if any(sizes.get(name, -1) < size for name, size in wanted.items()):
            return False
    return True
