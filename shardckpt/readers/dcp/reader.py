"""Reader of torch's distributed checkpoints (DCP).

`.metadata` maps boxes of tensors to slices of `.distcp` files. Written by `torch.distributed.checkpoint.save` since
torch 2.0; tested up to torch 2.13. A slice is a complete torch archive, a tensor of a safetensors file
(`SerializationFormat.SAFETENSORS`), or a zstd stream of an archive. Without rank coordination each rank writes its own
`__{rank}.metadata`, and the checkpoint is the union of these; data of several ranks is compared where it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import is_known
from shardckpt.encodings import pickle_reader
from shardckpt.encodings.budget import CHUNK_BYTES, ReadBudget, check_paths, gc_paused, require_small
from shardckpt.encodings.pickle_reader import Dtype, InstanceStub
from shardckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    UnsupportedError,
    UsageError,
    describe_missing,
)
from shardckpt.manifest import UNREAD, Encoded, Lazy, Manifest, ObjectEntry, Path, Piece, Span, TensorEntry, dotted
from shardckpt.reader import Checksum, Evidence, Format, Reader, Source
from shardckpt.readers.dcp.storage_items import Blobs, StoredSlice, require_bytes, resolve_slices, slice_checksums
from shardckpt.readers.torchsave.objects import read_object
from shardckpt.readers.torchsave.replicas import combine_values, join_replicas, list_replicas, resolve_replicas
from shardckpt.storage.store import Store, check_name, read_bytes

METADATA = ".metadata"
SUFFIX = ".distcp"
_RANK_METADATA = re.compile(r"__(?P<rank>\d{1,9})\.metadata")
_HEAD_BYTES = 256
_MAX_METADATA_BYTES = 1 << 30
_MAX_INT = 1 << 62
_MAX_DIMS = 64
_MAX_DEPTH = 100
_ZSTD = re.compile(r"stream\.zstd(@[^/]*)?(/1(\..*)?)?")


def recognize(source: Source) -> Evidence:
    """Recognize a folder by `.metadata`, rank metadata, or `.distcp` files alone."""
    if source.file is not None:
        is_named = source.file.endswith(SUFFIX) or bool(metadata_names([source.file]))
        return Evidence.NAME if is_named else Evidence.NONE
    names = metadata_names(source.files)
    if not names:
        return Evidence.NAME if any(name.endswith(SUFFIX) for name in source.files) else Evidence.NONE
    try:
        head = source.head(names[0], _HEAD_BYTES)
    except (CheckpointError, OSError):
        return Evidence.NAME
    return Evidence.STRUCTURE if head.startswith(b"\x80") and b"Metadata" in head else Evidence.NAME


def metadata_names(files: Sequence[str]) -> list[str]:
    """Return the metadata files among names without folders: one, or one for each rank in rank order."""
    if METADATA in files:
        return [METADATA]
    ranks = {int(match["rank"]): name for name in files if (match := _RANK_METADATA.fullmatch(name))}
    return [ranks[rank] for rank in sorted(ranks)]


def open_source(source: Source) -> Reader:
    """Open a recognized source."""
    if source.file is not None:
        raise UsageError(
            "this file is one part of a DCP checkpoint", where=source.url, fix="Point at the folder that holds it."
        )
    return open_folder(source.store)


def open_folder(store: Store, folder: str = "") -> Reader:
    """Open the DCP checkpoint in a store's folder."""
    prefix = f"{folder}/" if folder else ""
    sizes = {e.name[len(prefix) :]: e.size for e in store.list(folder) if not e.is_folder}
    names = metadata_names(list(sizes))
    if not names:
        raise IncompleteError(
            f"the folder has no {METADATA}, which torch writes last",
            where=f"{store.url}/{folder}",
            found=f"{sum(n.endswith(SUFFIX) for n in sizes)} {SUFFIX} files",
            fix="The save never finished; use an earlier checkpoint.",
        )
    found = _Union()
    budget = ReadBudget(sum(sizes.values()), sum(sizes[name] for name in names), where=f"{store.url}/{folder}")
    with gc_paused():
        for name in names:
            where = f"{store.url}/{prefix}{name}"
            root = _load(store, prefix + name, sizes[name], where, budget)
            _Metadata(root, prefix, where, budget).add_to(found)
            del root  # with metadata of many ranks, keep one at a time in memory
        manifest = _manifest(store, prefix, sizes, names, found)
        copies = [[_object((), place) for place in places] for places in found.objects.values() if len(places) > 1]
        return DcpReader(store, manifest, ReadBudget(sum(sizes.values())), copies, [prefix + name for name in names])


def _load(store: Store, name: str, size: int, where: str, budget: ReadBudget) -> InstanceStub:
    require_small("the metadata", size, _MAX_METADATA_BYTES, where)
    limits = pickle_reader.Limits(nbytes=_MAX_METADATA_BYTES, depth=0)
    root = pickle_reader.load(read_bytes(store, name, 0, size), where=where, limits=limits, budget=budget)
    if not isinstance(root, InstanceStub) or not isinstance(root.state, dict) or not root.name.endswith("Metadata"):
        raise FormatError("this pickle holds no DCP metadata", where=where, found=_format_value(root))
    return root


class _Stored(NamedTuple):
    """A slice's location: file name in the store, and byte range."""

    file: str
    offset: int
    nbytes: int
    is_zstd: bool


@dataclass(slots=True)
class _Union:
    """Union of all ranks' metadata."""

    # Name to global shape, dtype, and chunks by box: the slices of the ranks that stored it.
    tensors: dict[str, tuple[Shape, str, dict[Box, list[Piece]]]] = field(default_factory=dict)
    # Name to where its bytes are in the files by each rank that stored it.
    objects: dict[str, list[_Stored]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)  # name to path in the saved state, if known
    warnings: list[str] = field(default_factory=list)  # oddities, one sentence each


class _Metadata:
    """A pickled `Metadata` object, checked while it is parsed."""

    def __init__(self, root: InstanceStub, prefix: str, where: str, budget: ReadBudget) -> None:
        state = root.state
        assert isinstance(state, dict)
        self._where = where
        self._prefix = prefix
        self._budget = budget
        self._files: dict[object, str] = {}
        self._dtypes: dict[str, str] = {}
        self._chunk_lists: set[int] = set()
        self._records = _mapping(state.get("state_dict_metadata"), "state_dict_metadata", where)
        self._stored = self._index(_mapping(state.get("storage_data"), "storage_data", where))
        self._planner_data = state.get("planner_data")
        self._version = state.get("version")

    def add_to(self, union: _Union) -> None:
        """Add the tensors and objects to `union`."""
        for name, record in self._records.items():
            if not isinstance(name, str):
                raise FormatError("a tensor name must be a string", where=self._where, found=_format_value(name))
            if not isinstance(record, InstanceStub):
                raise self._bad(name, "is neither a tensor nor an object", _format_value(record))
            kind = record.name.rpartition(".")[2]
            if kind == "TensorStorageMetadata":
                self._add_tensor(union, name, record)
            elif kind == "BytesStorageMetadata":
                self._budget.spend_entry(0)
                stored = self._stored.get((name, None))
                union.objects.setdefault(name, []).extend(() if stored is None else (stored,))
            else:
                raise self._bad(name, "is neither a tensor nor an object", _format_value(record))
            if name in union.objects and name in union.tensors:
                raise self._bad(name, "is a tensor on one rank and an object on another", "both")
        self._add_paths(union)
        if isinstance(self._version, str) and self._version.partition(".")[0] != "1":
            union.warnings.append(f"the metadata has version {self._version}; this reader knows 1")

    def _bad(self, name: str, what: str, found: object, expected: object = "") -> FormatError:
        return FormatError(f"{name!r} {what}", where=self._where, found=found, expected=expected)

    def _index(self, storage: Mapping[object, object]) -> dict[tuple[str, Shape | None], _Stored]:
        """Return the storage records by name and offset, from torch's key objects."""
        stored: dict[tuple[str, Shape | None], _Stored] = {}
        for key, info in storage.items():
            index = key.state if isinstance(key, InstanceStub) else None
            if not isinstance(index, dict) or not isinstance(info, InstanceStub) or not isinstance(info.state, dict):
                raise FormatError(
                    "storage_data must map indices to storage", where=self._where, found=_format_value(key)
                )
            name, offset = index.get("fqn"), index.get("offset")
            if not isinstance(name, str):
                raise FormatError(
                    "storage_data has an index without a name", where=self._where, found=_format_value(name)
                )
            place = None if offset is None else self._shape(name, offset)
            if place and prod(place) > _MAX_INT:  # larger than any shape, and hashes of such offsets can be chosen
                raise self._bad(name, "is stored for an impossible offset", place)
            stored[name, place] = self._storage(name, info.state)
        return stored

    def _storage(self, name: str, info: Mapping[object, object]) -> _Stored:
        relative, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not (type(offset) is int and type(length) is int and 0 <= offset < _MAX_INT and 0 <= length < _MAX_INT):
            raise self._bad(name, "is stored at an impossible place", f"{offset} + {length} bytes")
        file = self._files.get(relative) if isinstance(relative, str) else None
        if file is None:
            file = self._files[relative] = self._file(name, relative)
        descriptors = info.get("transform_descriptors")
        return _Stored(file, offset, length, bool(descriptors) and self._is_zstd(name, descriptors))

    def _file(self, name: str, relative: object) -> str:
        if not isinstance(relative, str):
            raise self._bad(name, "is stored in a file without a name", _format_value(relative))
        check_name(relative, self._where)
        return self._prefix + relative

    def _is_zstd(self, name: str, descriptors: object) -> bool:
        names = descriptors if isinstance(descriptors, list | tuple) else []
        if len(names) == 1 and isinstance(names[0], str) and _ZSTD.fullmatch(names[0]):
            return True
        raise UnsupportedError(
            f"{name!r} is stored through a transform that this reader does not know",
            where=self._where,
            found=", ".join(_format_value(d) for d in names[:4]) or _format_value(descriptors),
            expected="stream.zstd/1",
        )

    def _add_tensor(self, union: _Union, name: str, record: InstanceStub) -> None:
        state = record.state if isinstance(record.state, dict) else {}
        chunks = state.get("chunks")
        shape, stored = self._shape(name, state.get("size")), self._dtype(name, state.get("properties"))
        if not isinstance(chunks, list | tuple):
            raise self._bad(name, "has no list of chunks", _format_value(chunks))
        if id(chunks) in self._chunk_lists:  # a small pickle could refer to the same million chunks a million times
            raise self._bad(name, "shares its chunks with another tensor", f"{len(chunks)} chunks")
        self._chunk_lists.add(id(chunks))
        if prod(shape) > _MAX_INT:
            raise self._bad(name, "is larger than any tensor can be", shape)
        self._budget.spend_tensor(CHUNK_BYTES * len(chunks))
        known = union.tensors.setdefault(name, (shape, stored, {}))
        if known[:2] != (shape, stored):
            raise self._bad(name, "differs between ranks", f"{stored} {shape}", f"{known[1]} {known[0]}")
        boxes = known[2]
        for chunk in chunks:
            box = self._box(name, chunk, shape)
            if box.volume:
                piece = self._piece(name, box, stored, is_only=len(chunks) == 1)
                boxes.setdefault(box, []).extend(() if piece is None else (piece,))

    def _piece(self, name: str, box: Box, stored: str, *, is_only: bool) -> Piece | None:
        found = self._stored.get((name, box.offset))
        if found is None and is_only:
            found = self._stored.get((name, None))
        if found is None:
            return None
        file, offset, length, is_zstd = found
        return Piece(box, file, Lazy(offset, length, StoredSlice(name, stored, is_zstd)))

    def _box(self, name: str, chunk: object, shape: Shape) -> Box:
        state = chunk.state if isinstance(chunk, InstanceStub) else None
        if not isinstance(state, dict):
            raise self._bad(name, "has a chunk without a place", _format_value(chunk))
        offset, size = state.get("offsets"), state.get("sizes")
        box = Box(self._shape(name, offset), shape if size == shape else self._shape(name, size))
        if not box.within(shape):
            raise self._bad(name, "has a chunk outside its shape", f"offsets {offset}, sizes {size}", shape)
        return box

    def _shape(self, name: str, value: object) -> Shape:
        if isinstance(value, tuple | list) and len(value) <= _MAX_DIMS:
            for n in value:
                if type(n) is not int or not 0 <= n < _MAX_INT:
                    break
            else:
                return tuple(value)
        raise self._bad(name, "has an impossible size or offset", _format_value(value))

    def _dtype(self, name: str, properties: object) -> str:
        state = properties.state if isinstance(properties, InstanceStub) else None
        if isinstance(state, dict):
            dtype = state.get("dtype")
        else:
            dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, Dtype):
            raise self._bad(name, "has no dtype", _format_value(dtype))
        if not is_known(dtype.name):
            raise UnsupportedError(
                f"{name!r} has a dtype that cannot be converted",
                where=self._where,
                found=dtype.name,
                fix="Exclude it with --exclude, or dequantise it before saving.",
            )
        return self._dtypes.setdefault(dtype.name, dtype.name)

    def _add_paths(self, union: _Union) -> None:
        """Add the paths that torch's planner stored."""
        # Planners of other libraries store other values, or none.
        if not isinstance(self._planner_data, dict):
            return
        for name, path in self._planner_data.items():
            if not isinstance(name, str) or not isinstance(path, tuple | list):
                return
            if not 0 < len(path) <= _MAX_DEPTH or not all(
                type(key) is str or (type(key) is int and key >= 0) for key in path
            ):
                raise self._bad(name, "has an impossible path", _format_value(path))
            self._budget.spend_entry(sum(len(key) for key in path if isinstance(key, str)))
            union.paths[name] = tuple(path)


def _format_value(value: object) -> str:
    """Return a short text for an error."""
    # Omits the content of containers, which a hostile pickle can make endless.
    if isinstance(value, InstanceStub):
        return value.name
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _mapping(value: object, what: str, where: str) -> Mapping[object, object]:
    if not isinstance(value, dict):
        raise FormatError(f"the metadata has no {what}", where=where, found=type(value).__name__)
    return value


def _manifest(store: Store, prefix: str, sizes: Mapping[str, int], names: Sequence[str], found: _Union) -> Manifest:
    check_paths(found.paths.values(), f"{store.url}/{prefix}")
    tensors: dict[Path, TensorEntry] = {}
    objects: dict[Path, ObjectEntry] = {}
    used: dict[str, None] = {}
    lost: list[str] = []
    for name, (shape, stored, boxes) in found.tensors.items():
        path = found.paths.get(name, (name,))
        if path in tensors:
            raise FormatError(f"{name!r} has the path of another tensor", where=f"{store.url}/{prefix}", found=path)
        pieces = tuple(_join_slices(name, stored, slices) for slices in boxes.values() if slices)
        used.update(dict.fromkeys(piece.file for piece in _list_slices(pieces)))
        if len(pieces) < len(boxes):
            lost.append(name)
        tensors[path] = TensorEntry(path, shape, stored, pieces)
    for name, places in found.objects.items():
        path = found.paths.get(name, (name,))
        if path in tensors or path in objects:
            raise FormatError(f"{name!r} has the path of another value", where=f"{store.url}/{prefix}", found=path)
        objects[path] = _object(path, places[0] if places else None)
        used.update(dict.fromkeys(place.file for place in places))
    if lost:
        found.warnings.append(f"torch listed chunks of {len(lost)} tensors that it never stored, first of {lost[0]!r}")
    known = _sizes(store, prefix, sizes, used)
    return Manifest(
        format="dcp",
        files=known,
        tensors=tensors,
        objects=objects,
        aliases=_aliases(tensors),
        warnings=(*found.warnings, *_notes(prefix, sizes, names, known)),
    )


def _aliases(tensors: Mapping[Path, TensorEntry]) -> dict[Path, Path]:
    """Return the tensors with exactly the slices of an earlier tensor: its aliases."""
    first: dict[tuple[object, ...], Path] = {}
    aliases: dict[Path, Path] = {}
    for path, entry in tensors.items():
        pieces = _list_slices(entry.pieces)
        if not pieces or not all(map(_is_archive, pieces)):
            continue
        places = [(p.box, p.file, p.layout.offset) for p in pieces if isinstance(p.layout, Lazy)]
        kept = first.setdefault((entry.shape, entry.stored, *places), path)
        if kept != path:
            aliases[path] = kept
    return aliases


def _object(path: Path, stored: _Stored | None) -> ObjectEntry:
    if stored is None:
        return ObjectEntry(path)
    span = Span(stored.offset, stored.nbytes)
    layout = Encoded("zstd", stored.offset, stored.nbytes, Span(0, 0)) if stored.is_zstd else span
    return ObjectEntry(path, UNREAD, stored.file, layout)


def _sizes(store: Store, prefix: str, sizes: Mapping[str, int], used: Mapping[str, None]) -> dict[str, int]:
    """Return each required file's size; -1 for a missing one. Each subfolder is listed once."""
    known = {prefix + name: size for name, size in sizes.items()}
    folders = {file.rpartition("/")[0] for file in used if file not in known}
    for folder in folders - {prefix.rstrip("/")}:
        known |= {entry.name: entry.size for entry in store.list(folder) if not entry.is_folder}
    return {file: known.get(file, -1) for file in sorted(used)}


def _notes(prefix: str, sizes: Mapping[str, int], names: Sequence[str], used: Mapping[str, int]) -> Iterator[str]:
    missing = [file for file, size in used.items() if size < 0]
    if missing:
        yield describe_missing(missing)
    stale = sorted(n for n in sizes if n.endswith(SUFFIX) and prefix + n not in used)
    if stale:
        yield f"{len(stale)} {SUFFIX} files hold nothing that the metadata needs and are ignored, first {stale[0]}"
    ranks = [int(match["rank"]) for name in sizes if (match := _RANK_METADATA.fullmatch(name))]
    if ranks and names == [METADATA]:
        yield f"{len(ranks)} rank-local metadata files next to {METADATA} are ignored"
    elif ranks and len(ranks) <= max(ranks):
        present = set(ranks)
        gone = next(rank for rank in range(max(ranks) + 1) if rank not in present)
        yield f"the metadata of {max(ranks) + 1 - len(ranks)} ranks is missing, first __{gone}{METADATA}"


class DcpReader(Reader):
    """An open DCP folder. `resolve` opens slices when their elements are needed."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        budget: ReadBudget | None = None,
        copies: Iterable[Sequence[ObjectEntry]] = (),
        metadata: Iterable[str] = (),
    ) -> None:
        super().__init__(store, manifest)
        self._metadata = tuple(metadata)
        self._copies = {(first.file, first.layout): others for first, *others in copies}
        self._blobs: Blobs = {}
        self._loaded: set[Path] = set()
        self._budget = ReadBudget(sum(filter(lambda n: n > 0, manifest.files.values()))) if budget is None else budget

    @property
    def unverified_files(self) -> tuple[str, ...]:
        """The metadata files: torch stores no checksum for them."""
        return self._metadata

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces in order, with each slice replaced by its elements' location."""

        def resolve(wanted: Sequence[Piece]) -> list[Piece]:
            return resolve_slices(self.store, self.manifest.files, wanted, self._blobs, self._budget)

        return resolve(pieces) if all(map(_is_slice, pieces)) else resolve_replicas(self, pieces, resolve)

    def load_object(self, entry: ObjectEntry) -> object:
        """Return an object's value without executing code; a `PerRankValue` if ranks stored different ones."""
        if entry.value is not UNREAD:
            return entry.value
        others = [replace(other, path=entry.path) for other in self._copies.get((entry.file, entry.layout), ())]
        return combine_values(entry.path, [(each.file, self._load_one(each)) for each in (entry, *others)])

    def _load_one(self, entry: ObjectEntry) -> object:
        if entry.layout is None:
            raise IncompleteError("this object was listed and never stored", where=dotted(entry.path))
        end = entry.layout.offset + entry.layout.nbytes
        require_bytes(self.store, self.manifest.files, entry.file, end, f"the object {dotted(entry.path)!r}")
        is_known = entry.path in self._loaded
        self._loaded.add(entry.path)
        budget = ReadBudget(sum(filter(lambda n: n > 0, self.manifest.files.values()))) if is_known else self._budget
        return read_object(self.store, entry.file, entry.layout, budget)

    def checksums(self) -> Iterator[Checksum]:
        """Yield the CRC-32 of each record in uncompressed slices, in file order; skip records without one."""
        spans: list[tuple[str, Span]] = [
            (piece.file, Span(piece.layout.offset, piece.layout.nbytes))
            for entry in self.manifest.tensors.values()
            for piece in _list_slices(entry.pieces)
            if isinstance(piece.layout, Lazy) and _is_archive(piece)
        ]
        spans += [
            (each.file, each.layout)
            for entry in self.manifest.objects.values()
            for each in (entry, *self._copies.get((entry.file, entry.layout), ()))
            if isinstance(each.layout, Span)
        ]
        return slice_checksums(self.store, sorted(set(spans)))


def _is_slice(piece: Piece) -> bool:
    """Return True if only one rank stored a piece, as without rank-local metadata."""
    return isinstance(piece.layout, Lazy) and isinstance(piece.layout.detail, StoredSlice)


def _join_slices(name: str, stored: str, slices: Sequence[Piece]) -> Piece:
    return slices[0] if len(slices) == 1 else join_replicas(name, stored, slices)


def _list_slices(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces' stored slices, including all replicas."""
    return [each for piece in pieces for each in ((piece,) if _is_slice(piece) else list_replicas(piece))]


def _is_archive(piece: Piece) -> bool:
    assert isinstance(piece.layout, Lazy) and isinstance(piece.layout.detail, StoredSlice)
    return not piece.layout.detail.is_zstd and not piece.layout.detail.is_safetensors(piece)


FORMAT = Format(
    name="dcp",
    title="torch distributed checkpoint (DCP)",
    looks_for="a .metadata file next to *.distcp files",
    recognize=recognize,
    open=open_source,
)
