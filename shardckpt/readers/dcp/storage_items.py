"""Locate tensors' elements in slices of `.distcp` files, in batches.

A slice is a complete torch archive that was written as a stream, so its local headers have no sizes. A plain slice is
located through the directory at its end. A compressed slice is located by parsing the start of the decoded stream.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from shardckpt.boxes import strides
from shardckpt.dtypes import bits, nbytes
from shardckpt.encodings import pickle_reader
from shardckpt.encodings.budget import ReadBudget
from shardckpt.encodings.codecs import MAX_WINDOW_BYTES, DecodedStream
from shardckpt.encodings.pickle_reader import InstanceStub, Limits, TensorStub
from shardckpt.encodings.safetensors import MAX_HEADER_BYTES, Header, parse_header, parse_json
from shardckpt.encodings.zip_archive import (
    STORED,
    ArchivePlace,
    WantedEntry,
    ZipArchive,
    ZipEntry,
    locate,
    open_archives,
    read_entries,
    walk_front,
)
from shardckpt.errors import FormatError, IncompleteError, TruncatedError, UnsafeError, UnsupportedError
from shardckpt.manifest import Encoded, Lazy, Piece, Span, Strided
from shardckpt.reader import Checksum
from shardckpt.readers.torchsave.storages import StorageRef, Storages, element_bytes, require_little
from shardckpt.storage.store import Read, Store

SHARDING_INFO = "DCP_SHARDING_INFO"
_BATCH = 512
# Bytes that are read from an archive's start: all its small entries, and its elements' header.
_FRONT_BYTES = 1 << 10

_ENCODED_HEAD_BYTES = 1 << 13
_HEAD_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
_MAX_PICKLE_BYTES = 1 << 16
_PICKLE_LIMITS = Limits(nbytes=_MAX_PICKLE_BYTES)


class Blob(NamedTuple):
    """A safetensors file that contains slices."""

    header: Header  # the file's header; offsets count from its start
    # Tensor name to the offset of its only chunk in this file, if torch stores it.
    offsets: dict[str, tuple[int, ...]]


class StoredSlice(NamedTuple):
    """Details of a slice in a `Lazy` layout."""

    name: str  # flat name of the tensor
    stored: str  # stored dtype
    is_zstd: bool  # whether the slice is compressed

    def is_safetensors(self, piece: Piece) -> bool:
        """Return True if the slice is in a safetensors file: then torch stores its elements' size only."""
        assert isinstance(piece.layout, Lazy)
        return not self.is_zstd and piece.layout.nbytes == nbytes(self.stored, piece.box.volume)


class OpenedSlice(NamedTuple):
    """A slice that is being resolved."""

    piece: Piece  # piece with a `Lazy` layout
    layout: Lazy  # the layout of `piece`
    slice: StoredSlice  # details of the slice
    url: str  # URL of the store, for messages

    @property
    def where(self) -> str:
        """File, tensor and box, for messages."""
        return f"{self.url}/{self.piece.file}: {self.slice.name!r} {self.piece.box}"


Blobs = dict[tuple[str, int], Blob]  # file name and offset to the safetensors file that starts there


def resolve_slices(
    store: Store, files: Mapping[str, int], pieces: Sequence[Piece], blobs: Blobs, budget: ReadBudget
) -> list[Piece]:
    """Return DCP pieces in order, with every `Lazy` layout resolved."""
    out = list(pieces)
    lazy = ((i, piece) for i, piece in enumerate(pieces) if isinstance(piece.layout, Lazy))
    while batch := list(islice(lazy, _BATCH)):
        opened = [_open_slice(store, files, piece) for _, piece in batch]
        for (i, piece), layout in zip(batch, _layouts(store, files, opened, blobs, budget), strict=True):
            out[i] = piece._replace(layout=layout)
    return out


def _open_slice(store: Store, files: Mapping[str, int], piece: Piece) -> OpenedSlice:
    layout = piece.layout
    assert isinstance(layout, Lazy) and isinstance(layout.detail, StoredSlice)
    known, end = layout.detail, layout.offset + layout.nbytes
    if end > files.get(piece.file, -1):
        require_bytes(store, files, piece.file, end, f"{known.name!r} {piece.box}")
    return OpenedSlice(piece, layout, known, store.url)


def require_bytes(store: Store, files: Mapping[str, int], file: str, end: int, what: str) -> None:
    """Require that a file exists and has a minimum size."""
    size = files.get(file, -1)
    if size < 0:
        raise IncompleteError(
            f"the file that holds {what} is missing",
            where=f"{store.url}/{file}",
            fix="Copy it next to the others, or use an earlier checkpoint.",
        )
    if end > size:
        raise TruncatedError(
            f"the file ends before {what} does",
            where=f"{store.url}/{file}",
            found=f"{size} bytes",
            expected=f"at least {end}",
            fix="Copy the file again.",
        )


def _layouts(
    store: Store, files: Mapping[str, int], opened: Sequence[OpenedSlice], blobs: Blobs, budget: ReadBudget
) -> list[Span | Strided | Encoded]:
    """Locate each slice's elements; `blobs` caches safetensors headers between batches."""
    found: dict[int, Span | Strided | Encoded] = {}
    tensors = {i: o for i, o in enumerate(opened) if o.slice.is_safetensors(o.piece)}
    streams = {i: o for i, o in enumerate(opened) if o.slice.is_zstd}
    archives = {i: o for i, o in enumerate(opened) if i not in tensors and i not in streams}
    _read_headers(store, files, list(tensors.values()), blobs)
    for i, o in tensors.items():
        found[i] = _locate_in_safetensors(o, blobs[o.piece.file, o.layout.offset])
    found |= zip(archives, _locate_in_archives(store, list(archives.values()), budget), strict=True)
    found |= zip(streams, _locate_in_streams(store, list(streams.values()), budget), strict=True)
    return [found[i] for i in range(len(opened))]


def _read_headers(store: Store, files: Mapping[str, int], opened: Sequence[OpenedSlice], blobs: Blobs) -> None:
    """Read the safetensors headers that are not cached."""
    # Torch stores the header's offset, not the tensor's.
    places = {(o.piece.file, o.layout.offset): o.where for o in opened}
    missing = {place: where for place, where in places.items() if place not in blobs}
    starts = {place: bytearray(8) for place in missing}
    for (file, offset), where in missing.items():
        require_bytes(store, files, file, offset + 8, f"a safetensors header ({where})")
    store.read([Read(file, offset, memoryview(buffer)) for (file, offset), buffer in starts.items()])
    bodies = {}
    for (file, offset), buffer in starts.items():
        length = int.from_bytes(buffer, "little")
        if length > MAX_HEADER_BYTES:
            raise FormatError(
                "neither a torch archive nor a safetensors header starts here",
                where=missing[file, offset],
                found=f"byte {offset}",
            )
        require_bytes(store, files, file, offset + 8 + length, f"a safetensors header ({missing[file, offset]})")
        bodies[file, offset] = bytearray(length)
    store.read([Read(file, offset + 8, memoryview(body)) for (file, offset), body in bodies.items()])
    for (file, offset), body in bodies.items():
        header = parse_header(body, where=f"{store.url}/{file}")
        blobs[file, offset] = Blob(header, _saved_offsets(header, f"{store.url}/{file}"))


def _locate_in_safetensors(opened: OpenedSlice, blob: Blob) -> Span:
    piece, name = opened.piece, opened.slice.name
    entry, saved_at = blob.header.tensors.get(name), blob.offsets.get(name, opened.piece.box.offset)
    if entry is None or saved_at != piece.box.offset:
        raise IncompleteError(
            "the file does not hold this chunk: torch's writer keeps one chunk per tensor in each file",
            where=opened.where,
            found="no such tensor" if entry is None else f"the chunk at {saved_at}",
            fix="Its elements are lost; use an earlier checkpoint, or save in torch_save form.",
        )
    dtype, shape, start, end = entry
    if (dtype, shape) != (opened.slice.stored, piece.box.size):
        raise _mismatch_error(opened, dtype, shape)
    return Span(opened.layout.offset + blob.header.data_start + start, end - start)


def _saved_offsets(header: Header, where: str) -> dict[str, tuple[int, ...]]:
    raw = header.metadata.get(SHARDING_INFO)
    info = parse_json(raw.encode("utf-8", "surrogatepass"), where=where) if raw is not None else {}
    found = {}
    for name, entry in info.items() if isinstance(info, dict) else ():
        offset = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if isinstance(offset, list) and all(type(n) is int for n in offset):
            found[name] = tuple(offset)
    return found


def _mismatch_error(opened: OpenedSlice, dtype: str, shape: tuple[int, ...]) -> FormatError:
    return FormatError(
        "the slice holds another tensor than the metadata says",
        where=opened.where,
        found=f"{dtype} {shape}",
        expected=f"{opened.slice.stored} {opened.piece.box.size}",
    )


def _locate_in_archives(store: Store, opened: Sequence[OpenedSlice], budget: ReadBudget) -> Iterator[Span | Strided]:
    places = [ArchivePlace(o.piece.file, o.layout.offset, o.layout.nbytes) for o in opened]
    distinct = list(dict.fromkeys(places))  # open a slice once even if thousands of names share it
    found = dict(zip(distinct, open_archives(store, distinct, front_bytes=_FRONT_BYTES), strict=True))
    archives = [found[place] for place in places]
    records = [
        WantedEntry(archive.place.file, _entry(archive, "data.pkl", o), archive)
        for archive, o in zip(archives, opened, strict=True)
    ]
    known: dict[bytes, TensorStub] = {}
    budgets = {place.file: budget for place in distinct}
    pickled = read_entries(store, records, most=_MAX_PICKLE_BYTES, budgets=budgets)
    stubs = [_stub(data, known, o) for data, o in zip(pickled, opened, strict=True)]
    wanted = []
    for archive, stub, o in zip(archives, stubs, opened, strict=True):
        assert isinstance(stub.storage, StorageRef)
        wanted.append(WantedEntry(archive.place.file, _entry(archive, f"data/{stub.storage.key}", o), archive))
    _check_byte_order(store, archives, opened)
    for start, (_, entry, _), stub, o in zip(locate(store, wanted), wanted, stubs, opened, strict=True):
        if entry.method != STORED:
            raise UnsupportedError("the slice's elements are compressed inside its archive", where=o.where)
        yield locate_view(stub, Span(start, entry.size), o)


def _entry(archive: ZipArchive, name: str, opened: OpenedSlice) -> ZipEntry:
    """Return the entry with a name below the archive's only root folder."""
    first = next(iter(archive.entries), "")
    entry = archive.entries.get(f"{first.partition('/')[0]}/{name}")
    if entry is None:
        raise FormatError(f"the torch archive of the slice has no {name}", where=opened.where, found=first)
    return entry


def _check_byte_order(store: Store, archives: Sequence[ZipArchive], opened: Sequence[OpenedSlice]) -> None:
    """Reject big-endian elements."""
    # One check per file suffices, since one process wrote all its slices.
    wanted, where = {}, {}
    for archive, o in zip(archives, opened, strict=True):
        root = next(iter(archive.entries)).partition("/")[0]
        entry = archive.entries.get(f"{root}/byteorder")
        if entry is not None and archive.place.file not in wanted:
            wanted[archive.place.file] = WantedEntry(archive.place.file, entry, archive)
            where[archive.place.file] = o.where
    for file, order in zip(wanted, read_entries(store, list(wanted.values()), most=16), strict=True):
        require_little(order, where[file])


def _stub(data: bytes, known: dict[bytes, TensorStub], opened: OpenedSlice) -> TensorStub:
    """Return the tensor in a slice's pickle, cached by its bytes."""
    # The bytes are equal for layers with equal shapes.
    stub = known.get(data)
    if stub is None:
        value = pickle_reader.load(data, where=opened.where, persistent=Storages(), limits=_PICKLE_LIMITS)
        if not isinstance(value, TensorStub) or not isinstance(value.storage, StorageRef):
            raise UnsupportedError(
                "the slice holds something other than a plain tensor",
                where=opened.where,
                found=value.name if isinstance(value, InstanceStub) else type(value).__name__,
                fix="Read what is next to it: `--part model`, or a load into a state without this tensor.",
            )
        stub = known[data] = value
    return stub


def _storage_bytes(stub: TensorStub) -> int:
    assert isinstance(stub.storage, StorageRef)
    return (stub.storage.base + stub.storage.count) * element_bytes(stub.storage.dtype)


def locate_view(stub: TensorStub, record: Span, opened: OpenedSlice) -> Span | Strided:
    """Return where a slice's elements are in its storage's record."""
    storage = stub.storage
    assert isinstance(storage, StorageRef)
    dtype, box = stub.dtype or storage.dtype, opened.piece.box
    if (dtype, stub.shape) != (opened.slice.stored, box.size):
        raise _mismatch_error(opened, dtype, stub.shape)
    if stub.bits:
        raise UnsupportedError("the slice is a lazily changed view", where=opened.where, found=", ".join(stub.bits))
    width = bits(dtype) // 8
    last = stub.offset + sum((n - 1) * s for n, s in zip(stub.shape, stub.strides, strict=True))
    if _storage_bytes(stub) != record.nbytes or (last + 1) * width > record.nbytes:
        raise FormatError(
            "the slice's tensor is not inside its storage",
            where=opened.where,
            found=f"{record.nbytes} bytes",
            expected=f"{_storage_bytes(stub)} bytes that hold element {last}",
        )
    steps = zip(stub.shape, stub.strides, strides(stub.shape), strict=True)
    if all(n == 1 or step == row_major for n, step, row_major in steps):
        return Span(record.offset + stub.offset * width, box.volume * width)
    return Strided(record.offset, record.nbytes, stub.offset, stub.strides)


def _locate_in_streams(store: Store, opened: Sequence[OpenedSlice], budget: ReadBudget) -> Iterator[Encoded]:
    heads = [bytearray(min(_ENCODED_HEAD_BYTES, o.layout.nbytes)) for o in opened]
    store.read([Read(o.piece.file, o.layout.offset, memoryview(h)) for o, h in zip(opened, heads, strict=True)])
    known: dict[bytes, TensorStub] = {}
    for o, head in zip(opened, heads, strict=True):
        inner = _inner(store, o, bytes(head), known, budget)
        yield Encoded("zstd", o.layout.offset, o.layout.nbytes, inner)


def _inner(
    store: Store, opened: OpenedSlice, encoded: bytes, known: dict[bytes, TensorStub], budget: ReadBudget
) -> Span | Strided:
    """Locate the elements in a decoded stream, decoding as little as possible."""
    stream = DecodedStream(
        store, opened.piece.file, Encoded("zstd", opened.layout.offset, opened.layout.nbytes, Span(0, 0))
    )
    for attempt, most in enumerate(_HEAD_BYTES):
        head = stream.head(most) if attempt else decode_head(encoded, most, opened.where)
        if attempt:  # a slice of a few bytes may decode to many megabytes, and there may be thousands of slices
            budget.spend_once((opened.piece.file, opened.layout.offset, most), len(head))
        try:
            return _walk_head(head, known, opened)
        except TruncatedError:
            if attempt and len(head) < most:
                raise
    raise UnsafeError(
        "the slice's archive does not reach its elements", where=opened.where, found=f"{_HEAD_BYTES[-1]} bytes"
    )


def decode_head(encoded: bytes, most: int, where: str) -> bytes:
    """Decode at most `most` bytes from the start of a zstd stream."""
    import zstandard  # noqa: PLC0415  (most checkpoints are not compressed)

    try:
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(io.BytesIO(encoded))
        return bytes(reader.read(most))
    except zstandard.ZstdError as error:
        raise FormatError(f"the zstd stream cannot be decoded: {error}", where=where) from error


def _walk_head(head: bytes, known: dict[bytes, TensorStub], opened: OpenedSlice) -> Span | Strided:
    front = walk_front(head, lambda name: name.count("/") == 2 and "/data/" in name, where=opened.where)
    root = front.name.partition("/")[0]
    if f"{root}/data.pkl" not in front.contents:
        raise FormatError("the torch archive of the slice has no data.pkl", where=opened.where, found=front.name)
    require_little(front.contents.get(f"{root}/byteorder", b"little"), opened.where)
    stub = _stub(front.contents[f"{root}/data.pkl"], known, opened)
    assert isinstance(stub.storage, StorageRef)
    if front.name != f"{root}/data/{stub.storage.key}":
        raise FormatError("the slice's first storage is not its tensor's", where=opened.where, found=front.name)
    return locate_view(stub, Span(front.start, _storage_bytes(stub)), opened)


def slice_checksums(store: Store, spans: Sequence[tuple[str, Span]]) -> Iterator[Checksum]:
    """Yield the CRC-32 of each record in torch archives, in order; skip records without one."""
    rest = iter(spans)
    while batch := list(islice(rest, _BATCH)):
        archives = open_archives(store, [ArchivePlace(file, span.offset, span.nbytes) for file, span in batch])
        wanted = [
            WantedEntry(a.place.file, e) for a in archives for e in a.entries.values() if e.crc32 and e.method == STORED
        ]
        for start, (file, entry, _) in zip(locate(store, wanted), wanted, strict=True):
            yield Checksum(file, start, entry.compressed, "crc32", entry.crc32)
