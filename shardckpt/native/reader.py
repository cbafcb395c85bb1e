"""Reader of the native format: safetensors files, a manifest, and `COMMIT`."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from contextlib import suppress
from functools import cached_property
from math import prod

from shardckpt.boxes import Box
from shardckpt.encodings import tagged_json
from shardckpt.encodings.budget import gc_paused
from shardckpt.encodings.tagged_json import ArrayRef
from shardckpt.encodings.value_stats import ValueStats, merge_stats, unpack_stats
from shardckpt.errors import FormatError, ShardckptError
from shardckpt.manifest import Manifest, ObjectEntry, Path, TensorEntry, dotted
from shardckpt.native.base_store import BasedStore, FilePlace, FoundBases, find_bases
from shardckpt.native.commit import COMMIT, MANIFEST_SUFFIX, Commit, find_model_files, read_commit, read_contents
from shardckpt.native.manifest_json import ManifestContents, Topology, read_topology
from shardckpt.native.payload import BLOCK_BYTES, GROUP_BYTES, KEY
from shardckpt.native.records import ArrayRecord, FileRecord
from shardckpt.native.verified_store import Hashed, VerifiedStore
from shardckpt.reader import XXH3, XXH3_OF_BLOCKS, Checksum, Evidence, Format, Reader, Source
from shardckpt.storage.store import Store

_PAYLOAD = re.compile(r"[0-9a-z]+-\d{5,}-\d{2,}\.safetensors")
_HEAD_BYTES = 64
_MARK = b'{"format":"shardckpt"'


def recognize(source: Source) -> Evidence:
    """Recognize a step by `COMMIT`, which may itself be the source, or by the remaining files without it."""
    if source.file is not None:
        named = source.file == COMMIT and _starts(source, COMMIT, _MARK)
        return Evidence.STRUCTURE if named else Evidence.NONE
    files = source.files
    payload = next((name for name in files if _PAYLOAD.fullmatch(name)), None)
    manifests = any(name.endswith(MANIFEST_SUFFIX) for name in files)
    if COMMIT in source.listing and (payload or manifests or _starts(source, COMMIT, _MARK)):
        return Evidence.STRUCTURE
    if payload is not None and _starts(source, payload, f'"{KEY}"'.encode()):
        return Evidence.STRUCTURE
    return Evidence.NONE


def _starts(source: Source, name: str, mark: bytes) -> bool:
    with suppress(ShardckptError, OSError):
        return mark in source.head(name, _HEAD_BYTES)
    return False


def open_source(source: Source) -> NativeReader:
    """Open a recognized step."""
    store = source.store
    entries = source.listing.values() if source.file is None else store.list()
    sizes = {entry.name: entry.size for entry in entries if not entry.is_folder}
    commit = read_commit(store, sizes)
    with gc_paused():
        contents = read_contents(store, sizes, commit)
        is_based = bool(commit.bases or source.bases)
        bases = find_bases(store.url, commit.bases, source.bases, contents.bases) if is_based else None
        return NativeReader(store, commit, contents, sizes, bases)


class NativeReader(Reader):
    """An open native step. Reads through its store are checked against the block hashes."""

    def __init__(
        self,
        store: Store,
        commit: Commit,
        contents: ManifestContents,
        sizes: Mapping[str, int],
        bases: FoundBases | None = None,
    ) -> None:
        self.commit = commit  # content of `COMMIT`
        # Content of the manifest as stored: files with their hashes, tensors as rows, the saved state as tagged JSON.
        self.contents = contents
        stored: Store = store if bases is None else BasedStore(store, bases.places)
        files = {file.place: hashed for file in contents.files if (hashed := find_hashes(file)) is not None}
        changed = {} if bases is None else {name: files[name] for name in files if name in bases.changed}
        self._stored = stored
        self._unverified = VerifiedStore(stored, changed) if changed else stored
        super().__init__(VerifiedStore(stored, files), build_manifest(store, contents, sizes, bases))

    @property
    def raw_store(self) -> Store:
        """The files, without hash checks."""
        return self._stored

    @property
    def unverified_store(self) -> Store:
        """The files without hash checks, except files in folders that changed since the step was saved."""
        return self._unverified

    @property
    def model_files(self) -> Mapping[str, int]:
        """Sizes of config and tokenizer files that were saved with the step, by their names for the model."""
        return {name: file.nbytes for name, file in find_model_files(self.contents.files).items()}

    @property
    def model_store(self) -> Store:
        """The step's files, with `model_files` under their names for the model."""
        files = find_model_files(self.contents.files)
        return BasedStore(self.store, {name: FilePlace(self.store, file.place) for name, file in files.items()})

    @property
    def saved_sizes(self) -> Mapping[str, int]:
        """Sizes of all files as they were saved."""
        return {file.place: file.nbytes for file in self.contents.files}

    def value_stats(self, path: Path) -> ValueStats | None:
        """Return the statistics that the save stored for an array; None without them, or if they are wrong."""
        record = self._records_with_stats.get(path)
        if record is None:
            return None
        found = merge_stats(unpack_stats(record.stats))
        return found if found.may_describe(prod(record.shape)) else None

    def piece_stats(self, path: Path) -> Mapping[Box, ValueStats]:
        """Return the statistics that the save stored for each piece; empty without them."""
        record = self._records_with_stats.get(path)
        if record is None:
            return {}
        return dict(zip(record.boxes(), unpack_stats(record.stats), strict=True))

    @cached_property
    def _records_with_stats(self) -> Mapping[Path, ArrayRecord]:
        arrays = self.contents.arrays
        tied = {path: arrays[index] for path, index in self.contents.ties.items()}
        return {path: record for path, record in ({a.path: a for a in arrays} | tied).items() if record.stats}

    def decode_state(self, decode_ref: tagged_json.DecodeRef) -> object:
        """Return the saved state in its saved containers."""
        return tagged_json.decode(self.contents.tree, decode_ref, where=self.store.url)

    def list_hashed_files(self) -> list[str]:
        """Return the names of files that were saved with checksums."""
        return [file.place for file in self.contents.files if file.hashes is not None]

    def checksums(self) -> Iterator[Checksum]:
        """Yield every file's hashes, by block or by group of blocks."""
        for file in self.contents.files:
            hashed = find_hashes(file)
            if hashed is None:
                continue
            algorithm = XXH3_OF_BLOCKS if hashed.is_grouped else XXH3
            for number, value in enumerate(hashed.split()):
                start, nbytes = hashed.extent(number)
                label = f"{hashed.describe(number)}, "
                yield Checksum(file.place, start, nbytes, algorithm, int.from_bytes(value, "big"), label)


def find_hashes(file: FileRecord) -> Hashed | None:
    """Return a file's hashes; None if it was saved without."""
    if file.hashes is None:
        return None
    return Hashed(file.nbytes, GROUP_BYTES if file.is_grouped else BLOCK_BYTES, file.hashes, file.is_grouped)


class _Entries(Mapping[Path, TensorEntry]):
    """Arrays by path; pieces are created on demand, since a step may have a million."""

    def __init__(self, contents: ManifestContents, topology: Topology) -> None:
        self._places = [file.place for file in contents.files]
        self._records: dict[Path, ArrayRecord] = {record.path: record for record in contents.arrays}
        self._records |= {path: contents.arrays[index] for path, index in contents.ties.items()}
        self._orders = {contents.arrays[index].path: order for index, order in topology.memory_orders.items()}
        self._built: dict[Path, TensorEntry] = {}

    def __getitem__(self, path: Path) -> TensorEntry:
        entry = self._built.get(path)
        if entry is None:
            record = self._records[path]
            order = self._orders.get(record.path, ())
            entry = TensorEntry(path, record.shape, record.dtype, record.pieces(self._places), order=order)
            self._built[path] = entry
        return entry

    def items(self) -> ItemsView[Path, TensorEntry]:
        """Return all items, created in one pass."""
        self._build()
        return super().items()

    def values(self) -> ValuesView[TensorEntry]:
        """Return all values, created in one pass."""
        self._build()
        return super().values()

    def _build(self) -> None:
        if len(self._built) < len(self._records):
            with gc_paused():
                for path in self._records:
                    self[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, path: object) -> bool:
        return path in self._records


def build_manifest(
    store: Store, contents: ManifestContents, sizes: Mapping[str, int], bases: FoundBases | None = None
) -> Manifest:
    """Return a step's format-independent manifest."""
    files = {file.place: -1 if file.base else sizes.get(file.name, -1) for file in contents.files}
    longer = [file.name for file in contents.files if files[file.place] > file.nbytes]
    unhashed = sum(file.hashes is None for file in contents.files)
    notes = [f"{name} is longer than when it was committed" for name in longer]
    if unhashed:
        notes.append(f"{unhashed} files were saved without checksums: a changed byte in them is seen by nobody")
    if bases is not None:
        files.update(bases.sizes)
        notes += bases.notes
    topology = read_topology(contents, store.url)
    return Manifest(
        format="native",
        files=files,
        elsewhere={} if bases is None else bases.folders,
        closed={} if bases is None else bases.closed,
        tensors=_Entries(contents, topology),
        objects=_objects(contents, store.url),
        variants={dotted(path): (path, of) for path, of in contents.variants.items()},
        aliases={path: contents.arrays[index].path for path, index in contents.ties.items()},
        warnings=tuple(notes),
        keeps_order=topology.keeps_order,
        optimizers=topology.optimizers,
        pretrained=topology.pretrained,
    )


def _objects(contents: ManifestContents, where: str) -> dict[Path, ObjectEntry]:
    """Return all values that are not tensors; a list without tensors is one value."""
    tree = tagged_json.decode(contents.tree, where=where)
    walk = _ValueCollector(contents, where)
    found: list[ObjectEntry] = []
    walk.add(tree, (), found)
    return {entry.path: entry for entry in found}


class _ValueCollector:
    def __init__(self, contents: ManifestContents, where: str) -> None:
        self._paths = [record.path for record in contents.arrays]
        self._ties = contents.ties
        self._where = where

    def add(self, value: object, path: Path, found: list[ObjectEntry]) -> bool:
        """Collect the values at and below `path`; return True if a tensor is among them."""
        if isinstance(value, ArrayRef):
            self._check(value, path)
            return True
        if isinstance(value, dict) and value:
            inner = [self.add(v, (*path, tagged_json.path_key(key)), found) for key, v in value.items()]
            return any(inner)
        if isinstance(value, (list, tuple)) and not isinstance(value, tagged_json.NamedValue):
            below: list[ObjectEntry] = []
            inner = [self.add(v, (*path, i), below) for i, v in enumerate(value)]
            if any(inner):
                found += below
                return True
        if path or value is not None:
            found.append(ObjectEntry(path, value))
        return False

    def _check(self, ref: ArrayRef, path: Path) -> None:
        if ref.number >= len(self._paths) or (
            self._paths[ref.number] != path and self._ties.get(path, -1) != ref.number
        ):
            raise FormatError(
                "the saved state refers to a tensor with another path", where=self._where, found=dotted(path)
            )


FORMAT = Format(
    name="native",
    title="a shardckpt step",
    looks_for=f"a step of shardckpt ({COMMIT})",
    recognize=recognize,
    open=open_source,
)
