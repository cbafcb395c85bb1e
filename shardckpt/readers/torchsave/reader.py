"""Reader for `torch.save` files: zip and legacy containers, and plain pickles.

The zip container has `{root}/data.pkl` and one entry for each storage, `{root}/data/{key}`. The legacy container is
five pickles: magic number, version, machine description, object, and storage keys. Each storage follows, as an element
count in 8 bytes and its bytes. Tensors are located, not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardckpt.encodings.budget import ReadBudget, gc_paused
from shardckpt.encodings.pickle_reader import Limits, load_at
from shardckpt.encodings.zip_archive import (
    LOCAL_SIGNATURE,
    STORED,
    ArchivePlace,
    WantedEntry,
    ZipArchive,
    ZipEntry,
    locate,
    open_archives,
    read_entries,
    require_known_method,
)
from shardckpt.errors import FormatError, TruncatedError, UnsupportedError
from shardckpt.manifest import Encoded, Lazy, Manifest, Path, Piece, Span, Strided, dotted
from shardckpt.reader import Checksum, Reader, require_size
from shardckpt.readers.torchsave.dtensor_spec import ShardInfo
from shardckpt.readers.torchsave.pickle_series import PickleSeries
from shardckpt.readers.torchsave.replicas import resolve_replicas
from shardckpt.readers.torchsave.storages import (
    UNORDERED,
    StorageRef,
    Storages,
    UnreadableTensor,
    big_endian_error,
    element_bytes,
    require_little,
)
from shardckpt.readers.torchsave.tensor_views import LegacyView, RankNote, StateTree, View, ZipView
from shardckpt.storage.store import Read, Store, read_bytes

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

# Files in a `transformers` folder that contain only a configuration object.
CONFIGURATION = frozenset({"training_args.bin"})

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_MAGIC = b"\x8a\n" + _MAGIC_NUMBER.to_bytes(10, "little") + b"."
_LEGACY_VERSION = 1001
_LIMITS = Limits(nbytes=1 << 29)
# Bytes to read first from a file whose pickles have an unknown length, by `is_local`.
_FIRST_FRONT_BYTES = {True: 1 << 12, False: 1 << 16}

_TAR_MAGIC_AT = 257


@dataclass(frozen=True, slots=True)
class _ZipContainer:
    """A zip container's storages."""

    entries: Mapping[str, ZipEntry]  # entries by storage key
    where: str

    def storage_bytes(self, ref: StorageRef) -> int:
        entry = self.entries.get(ref.key)
        if entry is None:
            raise FormatError(f"storage {ref.key!r} is not in the file", where=self.where, fix="Copy the file again.")
        wanted = ref.count * element_bytes(ref.dtype)
        if entry.size != wanted:
            raise FormatError(
                f"storage {ref.key!r} has a wrong size",
                where=self.where,
                found=f"{entry.size} bytes",
                expected=f"{wanted} bytes",
            )
        return entry.size

    def layout(self, ref: StorageRef, view: View) -> Lazy:
        entry = self.entries[ref.key]
        return Lazy(entry.header, entry.limit - entry.header, ZipView(entry, view))


@dataclass(frozen=True, slots=True)
class _LegacyContainer:
    """A legacy container's storages."""

    roots: Mapping[str, StorageRef]  # storages by key as first named; the file stores their element counts
    starts: Mapping[str, int]  # offset of each element count, by key
    where: str

    def storage_bytes(self, ref: StorageRef) -> int:
        if ref.key not in self.starts:
            raise FormatError(f"storage {ref.key!r} is not in the file", where=self.where)
        return (ref.base + ref.count) * element_bytes(ref.dtype)

    def layout(self, ref: StorageRef, view: View) -> Lazy:
        root = self.roots[ref.key]
        nbytes = root.count * element_bytes(root.dtype)
        return Lazy(self.starts[ref.key], 8 + nbytes, LegacyView(root.count, nbytes, view))


@dataclass(slots=True)
class _OpenedFiles:
    """Content of one checkpoint's files while they are opened."""

    tree: StateTree = field(default_factory=StateTree)
    archives: dict[str, ZipArchive] = field(default_factory=dict)
    budgets: dict[str, ReadBudget] = field(default_factory=dict)


class TorchReader(Reader):
    """Reader of `torch.save` files."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        archives: Mapping[str, ZipArchive],
        notes: Sequence[RankNote] = (),
        shards: Mapping[Path, ShardInfo] | None = None,
    ) -> None:
        super().__init__(store, manifest)
        self._archives = archives
        self._notes = tuple(notes)
        self._shards = shards or {}
        self._starts: dict[tuple[str, int], int] = {}

    @property
    def notes(self) -> Sequence[RankNote]:
        """Metadata of LOCAL states in the files."""
        return self._notes

    @property
    def shards(self) -> Mapping[Path, ShardInfo]:
        """Layouts of rank shards, by path."""
        return self._shards

    @property
    def archives(self) -> Mapping[str, ZipArchive]:
        """File name to its open archive, for zip containers."""
        return self._archives

    def with_manifest(self, manifest: Manifest) -> TorchReader:
        """Return a reader for the same files with another manifest."""
        return TorchReader(self.store, manifest, self._archives)

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Locate the pieces' storages in one batch of reads, and compare replicas that may differ."""
        return resolve_replicas(self, pieces, self._resolve)

    def _resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        self._locate_entries(pieces)
        self._check_counts(pieces)
        return [self._resolve_piece(piece) for piece in pieces]

    def checksums(self) -> Iterator[Checksum]:
        """Yield the CRC-32 of each uncompressed storage in a zip container, if known."""
        for file, archive in self._archives.items():
            root = _root(archive, file)
            if not archive.entries[f"{root}/data.pkl"].crc32:
                continue
            data = f"{root}/data/"
            entries = [e for n, e in archive.entries.items() if n.startswith(data) and e.size and e.method == STORED]
            entries.sort(key=lambda entry: entry.header)
            starts = locate(self.store, [WantedEntry(file, entry) for entry in entries])
            for entry, start in zip(entries, starts, strict=True):
                yield Checksum(file, start, entry.size, "crc32", entry.crc32)

    def _locate_entries(self, pieces: Sequence[Piece]) -> None:
        wanted = {
            (p.file, p.layout.offset): WantedEntry(p.file, p.layout.detail.entry)
            for p in pieces
            if isinstance(p.layout, Lazy) and isinstance(p.layout.detail, ZipView)
        }
        missing = [key for key in wanted if key not in self._starts]
        starts = locate(self.store, [wanted[key] for key in missing])
        self._starts.update(zip(missing, starts, strict=True))

    def _check_counts(self, pieces: Sequence[Piece]) -> None:
        """Compare the element counts before legacy storages with the pickle."""
        wanted = {
            (p.file, p.layout.offset): p.layout.detail
            for p in pieces
            if isinstance(p.layout, Lazy) and isinstance(p.layout.detail, LegacyView)
        }
        missing = [key for key in wanted if key not in self._starts]
        for file, offset in missing:
            end = offset + 8 + wanted[file, offset].nbytes
            require_size(self.store, file, self.manifest.files[file], end)
        buffers = [bytearray(8) for _ in missing]
        self.store.read([Read(f, o, memoryview(b)) for (f, o), b in zip(missing, buffers, strict=True)])
        for (file, offset), raw in zip(missing, buffers, strict=True):
            found, expected = int.from_bytes(raw, "little", signed=True), wanted[file, offset].elements
            if found != expected:
                raise FormatError(
                    f"the storage at byte {offset} has a wrong length",
                    where=f"{self.store.url}/{file}",
                    found=f"{found} elements",
                    expected=expected,
                )
            self._starts[file, offset] = offset + 8

    def _resolve_piece(self, piece: Piece) -> Piece:
        layout = piece.layout
        if not isinstance(layout, Lazy):
            return piece
        detail = layout.detail
        if isinstance(detail, UnreadableTensor):
            raise detail.error(f"{self.store.url}/{piece.file}")
        start = self._starts[piece.file, layout.offset]
        if isinstance(detail, LegacyView):
            return piece._replace(layout=_make_layout(detail.view, start, detail.nbytes, piece))
        assert isinstance(detail, ZipView)
        entry, view = detail
        require_known_method(entry, f"{self.store.url}/{piece.file}")
        if entry.method == STORED:
            return piece._replace(layout=_make_layout(view, start, entry.size, piece))
        inner = _make_layout(view, 0, entry.size, piece)
        return piece._replace(layout=Encoded("deflate", start, entry.compressed, inner))


def _make_layout(view: View, start: int, nbytes: int, piece: Piece) -> Span | Strided:
    """Return the layout of a view, whose storage has `nbytes` bytes at an offset."""
    if view.strides is None:
        return Span(start + view.start * view.width, prod(piece.box.size) * view.width)
    return Strided(start, nbytes, view.start, view.strides)


def looks_like_torch(head: bytes) -> bool:
    """Return True if `head`, a file's first few hundred bytes, starts a torch container."""
    if head.startswith(LOCAL_SIGNATURE):
        length = int.from_bytes(head[26:28], "little")
        return head[30 : 30 + length].endswith(b"/data.pkl")
    return head[:1] == b"\x80" and _MAGIC in head[:40]


def open_files(
    store: Store,
    sizes: Mapping[str, int],
    prefixes: Mapping[str, Path],
    format_name: str,
    *,
    allow_shards: bool = False,
) -> TorchReader:
    """Open `torch.save` files as one checkpoint, with reads in batches."""
    opened = _OpenedFiles()
    zips = _zips(store, sizes)
    pickles = _zip_pickles(store, {f: sizes[f] for f in zips}, opened)
    series = PickleSeries(Storages, _LIMITS)
    with gc_paused():
        for file, size in sizes.items():
            where = f"{store.url}/{file}"
            if file in opened.archives:
                archive = opened.archives[file]
                root = _root(archive, where)
                data = f"{root}/data/"
                entries = {n[len(data) :]: e for n, e in archive.entries.items() if n.startswith(data)}
                pickled = f"{where}:{root}/data.pkl"
                raw, budget = pickles.pop(file), opened.budgets[file]
                value = series.load(raw, where=pickled, budget=budget)
                opened.tree.add(value, file, prefixes[file], _ZipContainer(entries, where), where, budget)
                del value  # the objects of many ranks' files are much larger than the resulting manifest
            else:
                _add_pickles(store, file, size, prefixes[file], opened.tree)
    tree, zipped = opened.tree, opened.archives.items()
    if tree.shards and (tree.notes or not allow_shards):
        raise _single_rank_error(store, tree)
    manifest = Manifest(
        format_name,
        dict(sizes),
        tree.tensors,
        tree.objects,
        tree.aliases,
        warnings=tuple(tree.warnings),
        keeps_order=not any(f"{_root(archive, file)}/{UNORDERED}" in archive.entries for file, archive in zipped),
    )
    return TorchReader(store, manifest, opened.archives, tree.notes, tree.shards)


def _single_rank_error(store: Store, tree: StateTree) -> UnsupportedError:
    path, shard = next(iter(tree.shards.items()))
    return UnsupportedError(
        f"{dotted(path)!r} is a {shard.kind}: this is one rank's shard, where full tensors belong",
        where=store.url,
        fix="Keep only the ranks' files in one folder, and name that folder.",
    )


def _zips(store: Store, sizes: Mapping[str, int]) -> list[str]:
    """Return the files that start like zip archives."""
    heads = {file: bytearray(len(LOCAL_SIGNATURE)) for file, size in sizes.items() if size >= len(LOCAL_SIGNATURE)}
    store.read([Read(file, 0, memoryview(head)) for file, head in heads.items()])
    return [file for file, head in heads.items() if head == LOCAL_SIGNATURE]


def _zip_pickles(store: Store, sizes: Mapping[str, int], opened: _OpenedFiles) -> dict[str, bytes]:
    """Open zip containers and return their pickles."""
    archives = open_archives(store, [ArchivePlace(file, 0, size) for file, size in sizes.items()])
    wanted: list[WantedEntry] = []
    for archive in archives:
        file = archive.place.file
        root = _root(archive, f"{store.url}/{file}")
        opened.archives[file] = archive
        names = (f"{root}/data.pkl", f"{root}/byteorder")
        wanted += [WantedEntry(file, archive.entries[n]) for n in names if n in archive.entries]
        opened.budgets[file] = ReadBudget(
            sizes[file], archive.entries[names[0]].compressed, where=f"{store.url}/{file}"
        )
    pickles: dict[str, bytes] = {}
    contents = read_entries(store, wanted, most=_LIMITS.nbytes, budgets=opened.budgets)
    for (file, entry, _), raw in zip(wanted, contents, strict=True):
        where = f"{store.url}/{file}"
        if entry.name.endswith("/data.pkl"):
            pickles[file] = raw
        else:
            require_little(raw, where)
    return pickles


def _root(archive: ZipArchive, where: str) -> str:
    """Return a zip container's root folder."""
    roots = [name.removesuffix("/data.pkl") for name in archive.entries if name.count("/") == 1]
    roots = [root for root in roots if f"{root}/data.pkl" in archive.entries]
    if not roots:
        raise FormatError("a zip archive, but not from torch.save", where=where, expected="an entry */data.pkl")
    if f"{roots[0]}/constants.pkl" in archive.entries:
        raise UnsupportedError(
            "a TorchScript program, not a state dict",
            where=where,
            fix="Load it with torch.jit.load, and save its state_dict() with torch.save.",
        )
    return roots[0]


def _add_pickles(store: Store, file: str, size: int, prefix: Path, tree: StateTree) -> None:
    """Add a file that is not a zip archive. Reads a growing part, since storages may follow the pickles."""
    where = f"{store.url}/{file}"
    front = min(_FIRST_FRONT_BYTES[store.capabilities.is_local], size)
    spent = 0  # the cost of parsing a short part counts for the longer one too
    while True:
        budget = ReadBudget(size, front, where=where)
        budget.left -= spent
        raw = read_bytes(store, file, 0, front)
        _refuse_tar(raw, where)
        try:
            found = _parse(raw, where, budget)
        except TruncatedError:
            if front >= min(size, _LIMITS.nbytes):
                raise
            spent = ReadBudget(size, front).left - budget.left
            front = min(4 * front, size, _LIMITS.nbytes)
        else:
            break
    value, container, end = found
    if end > size:
        tree.warnings.append(f"{file} ends early: it has {size} bytes, and its storages need {end}")
    tree.add(value, file, prefix, container, where, budget)


def _refuse_tar(raw: bytes, where: str) -> None:
    if raw[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar":
        raise UnsupportedError(
            "a tar file, as torch wrote before 0.2",
            where=where,
            fix="Load it with torch and save it again with torch.save.",
        )


def _parse(raw: bytes, where: str, budget: ReadBudget) -> tuple[object, _LegacyContainer | None, int]:
    """Parse the pickles at a file's start; return the object, its storages and the end of the file's content."""
    storages = Storages()
    first, at = load_at(raw, 0, where=where, persistent=storages, limits=_LIMITS, budget=budget)
    if first != _MAGIC_NUMBER:
        return first, None, at
    version, at = load_at(raw, at, where=where, limits=_LIMITS, budget=budget)
    if version != _LEGACY_VERSION:
        raise UnsupportedError("unknown torch.save version", where=where, found=version, expected=_LEGACY_VERSION)
    machine, at = load_at(raw, at, where=where, limits=_LIMITS, budget=budget)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise big_endian_error(where, "big")
    value, at = load_at(raw, at, where=where, persistent=storages, limits=_LIMITS, budget=budget)
    keys, at = load_at(raw, at, where=where, limits=_LIMITS, budget=budget)
    starts, end = _starts(keys, storages, at, where)
    return value, _LegacyContainer(storages.found, starts, where), end


def _starts(keys: object, storages: Storages, at: int, where: str) -> tuple[dict[str, int], int]:
    """Return the offsets of the storages' counts, and the last storage's end."""
    if not isinstance(keys, list):
        raise FormatError("the storage keys must be a list", where=where)
    starts: dict[str, int] = {}
    for raw in keys:
        key = raw.decode("ascii", "replace") if isinstance(raw, bytes) else raw
        if not isinstance(key, str) or key not in storages.found or key in starts:
            raise FormatError("a storage is in the file twice, or no tensor uses it", where=where, found=key)
        starts[key] = at
        ref = storages.found[key]
        at += 8 + ref.count * element_bytes(ref.dtype)
    return starts, at
