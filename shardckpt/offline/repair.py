"""Implement `repair`: rebuild a step's manifest or `COMMIT` from its payload."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

from shardckpt.boxes import Box
from shardckpt.encodings import tagged_json
from shardckpt.encodings.budget import check_paths
from shardckpt.encodings.safetensors import Header, parse_json, read_headers, require_dims
from shardckpt.encodings.tagged_json import ArrayRef
from shardckpt.encodings.typed_json import OMITTED, decode
from shardckpt.errors import (
    AmbiguousError,
    CheckpointError,
    ChecksumError,
    FormatError,
    IncompleteError,
    UnsupportedError,
    UsageError,
    escape,
)
from shardckpt.manifest import Path, Span, dotted, unflatten
from shardckpt.native.base_store import find_bases
from shardckpt.native.commit import (
    COMMIT,
    MAX_MANIFEST_BYTES,
    encode_commit,
    is_model_file_name,
    is_of_save,
    manifest_name,
    read_commit,
    read_contents,
)
from shardckpt.native.manifest_json import ManifestContents, decode_manifest, encode_manifest
from shardckpt.native.payload import GROUP_BYTES, HF_INDEX, KEY, BlockHasher, PayloadChunk
from shardckpt.native.reader import build_manifest
from shardckpt.native.records import (
    ArrayRecord,
    Counts,
    Dtype,
    FileRecord,
    SaveId,
    Version,
    group_files_by_base,
)
from shardckpt.notebook import Result
from shardckpt.offline.results.contents import Problem
from shardckpt.plan.layout.coverage import require_complete
from shardckpt.reader import NamedBases, Source
from shardckpt.readers.registry import open_source, resolve_step
from shardckpt.storage.store import Read, Store, read_bytes

_UNCHECKED = "checksums were computed again: bytes that changed since the save cannot be detected"

_PAYLOAD = re.compile(r"(?P<save>[0-9a-z]+)-\d{5,}-\d{2,}\.safetensors")


@dataclass(frozen=True, slots=True, repr=False)
class Repair(Result):
    """Result of a repair.

    Attributes:
        source: Path or URL of the step.
        save: Id of the save.
        tensor_count: Number of arrays in the step.
        file_count: Number of its payload files.
        written: Names of the written files; empty if nothing was wrong.
        warnings: Oddities and lost data, one sentence each.
        problems: Files that did not match their old sizes or checksums, and were taken as they are.
        dry_run: Whether nothing was written.
    """

    source: str
    save: str
    tensor_count: int
    file_count: int
    written: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    dry_run: bool = False


def repair(
    src: str | os.PathLike[str],
    *,
    save: str = "",
    rehash: bool = False,
    base: NamedBases = "",
    dry_run: bool = False,
) -> Repair:
    """Rebuild manifest and `COMMIT` of a native step from its payload files.

    All bytes are read. Nothing is written if the step is complete already, or if tensors are missing, since files
    cannot be reconstructed.

    Args:
        src: Path or URL of the step's folder.
        save: Id of the save, if the folder contains several complete ones.
        rehash: Accept bytes that do not match the checksums of the manifest, and files of other sizes.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        dry_run: Check everything and write nothing.

    Returns:
        Report of the written files.

    Raises:
        UsageError: The folder does not exist or has no payload files.
        AmbiguousError: The folder contains several complete saves.
        CheckpointError: Tensors are missing, or files are damaged; without `rehash` also if checksums do not match.
        StorageError: Reading or writing failed.

    Examples:
        >>> shardckpt.repair("run/step-100")  # doctest: +SKIP
    """
    src = resolve_step(src)
    source = open_source(src)
    if source.file is not None:
        raise UsageError("this is a file", where=src, fix="Name the step's folder.")
    store, sizes = source.store, _sizes(source)
    intact = _open_intact(store, sizes, base)
    if intact is not None and not _list_differing(store, sizes, intact):
        return _report(src, intact, dry_run=dry_run)
    contents, notes = (intact, ()) if intact is not None else _choose(store, sizes, save, base)
    content, hash_notes, problems = _with_hashes(store, sizes, contents, rehash)
    data = encode_manifest(content)
    written = (manifest_name(content.save), COMMIT)
    if not dry_run:
        commit = encode_commit(content.save, data, content.files, content.about)
        for name, body in zip(written, (data, commit), strict=True):
            with store.create(name) as writer:
                writer.write(body)
    return _report(src, content, written, (*notes, *hash_notes), problems, dry_run=dry_run)


def _report(
    src: str,
    contents: ManifestContents,
    written: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    problems: tuple[Problem, ...] = (),
    *,
    dry_run: bool,
) -> Repair:
    payload = sum(_PAYLOAD.fullmatch(file.name) is not None for file in contents.files)
    return Repair(src, contents.save, len(contents.arrays), payload, written, warnings, problems, dry_run)


def _sizes(source: Source) -> dict[str, int]:
    return {name: entry.size for name, entry in source.listing.items() if not entry.is_folder}


def _open_intact(store: Store, sizes: Mapping[str, int], base: NamedBases) -> ManifestContents | None:
    """Return the manifest if a step needs no repair; None for any other step."""
    try:
        commit = read_commit(store, sizes)
        contents = read_contents(store, sizes, commit)
    except UnsupportedError:
        raise
    except CheckpointError:
        return None
    _require_complete(store, contents, sizes, base)
    return contents


def _list_differing(store: Store, sizes: Mapping[str, int], contents: ManifestContents) -> list[str]:
    """Return a step's files whose size or bytes contradict its manifest."""
    own = [file for file in contents.files if not file.base]
    return [
        file.name
        for file in own
        if sizes.get(file.name) != file.nbytes
        or (file.hashes is not None and not _agrees(file, _hash(store, file.name, file.nbytes)))
    ]


def _require_complete(store: Store, contents: ManifestContents, sizes: Mapping[str, int], base: NamedBases) -> None:
    bases = find_bases(store.url, group_files_by_base(contents.files), base) if contents.bases else None
    manifest = build_manifest(store, contents, sizes, bases)
    require_complete(manifest, manifest.tensors.values(), store.url)


def _choose(
    store: Store, sizes: Mapping[str, int], save: str, base: NamedBases
) -> tuple[ManifestContents, tuple[str, ...]]:
    """Return what the folder's only complete save contains."""
    named: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        if match := _PAYLOAD.fullmatch(name):
            named.setdefault(match["save"], {})[name] = size
    if not named or (save and save not in named):
        raise UsageError(
            f"found no payload files of save {save!r}" if save else "found no payload files of shardckpt",
            where=store.url,
            found=", ".join(sorted(named)) or f"{len(sizes)} files",
        )
    found: list[tuple[ManifestContents, tuple[str, ...]]] = []
    errors: list[CheckpointError] = []
    for each in [save] if save else sorted(named):
        try:
            files = read_described(store, named[each])
            old = _read_based(store, sizes, each, files)
            contents, notes = rebuild_manifest(each, files, store.url) if old is None else (old, ())
            _require_complete(store, contents, sizes, base)
            found.append((contents, notes))
        except CheckpointError as error:
            errors.append(error)
    if not found:
        raise errors[-1]
    if len(found) > 1:
        raise AmbiguousError(
            "the folder contains several complete saves",
            where=store.url,
            found=", ".join(contents.save for contents, _ in found),
            fix="Choose one with --save: the ids sort by time.",
        )
    return found[0]


def _with_hashes(
    store: Store, sizes: Mapping[str, int], contents: ManifestContents, rehash: bool
) -> tuple[ManifestContents, tuple[str, ...], tuple[Problem, ...]]:
    """Hash the files; return the manifest with hashes, warnings, and files that differ from an old manifest."""
    own = [file for file in contents.files if not file.base]
    small = {file.name for file in own if _has_no_tensors(file.name, contents.save)}
    payload = [file for file in contents.files if file.base or file.name not in small]
    hashed = [file if file.base else _hash(store, file.name, sizes[file.name]) for file in payload]
    found = sorted(name for name in sizes if _has_no_tensors(name, contents.save))
    hashed += [_hash(store, name, sizes[name]) for name in found]  # after the payload, whose positions the rows have
    notes = tuple(f"{name} is gone, and the step no longer lists it" for name in sorted(small.difference(sizes)))
    full = replace(contents, files=tuple(hashed))
    old = _old_manifest(store, sizes, contents.save)
    same = old is not None and [_without_digests(a) for a in old.arrays] == [
        _without_digests(a) for a in contents.arrays
    ]
    if old is None or not same:
        return full, (*notes, _UNCHECKED), ()
    known = {file.name: file for file in old.files}
    differing = [file.name for file in full.files if file.name in known and not _agrees(known[file.name], file)]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    if differing and not rehash:
        raise ChecksumError(
            f"{differing[0]}{more}: size or bytes differ from the step's manifest",
            where=store.url,
            fix="Restore the file from another copy, or pass --rehash to take the bytes as they are.",
        )
    arrays = tuple(map(_without_digests, full.arrays)) if differing else old.arrays
    full = replace(full, arrays=arrays)
    unchecked = (_UNCHECKED,) if all(file.hashes is None for file in old.files) else ()
    return full, (*notes, *unchecked), tuple(_describe_change(known[name], sizes[name]) for name in differing)


def _has_no_tensors(name: str, save: str) -> bool:
    """Return True for a save's index and model files."""
    return name == HF_INDEX or (is_of_save(name, save) and is_model_file_name(name))


def _describe_change(old: FileRecord, nbytes: int) -> Problem:
    """Return the problem that a file is not as its manifest says."""
    message = escape(f"{old.name} did not match its old size or checksums")
    if old.nbytes == nbytes:
        return Problem("checksum", message, file=old.name)
    return Problem("wrong_size", message, file=old.name, expected=f"{old.nbytes} bytes", found=f"{nbytes} bytes")


def _agrees(old: FileRecord, found: FileRecord) -> bool:
    """Return whether a file has the size and the hashes that a manifest stores."""
    return old.nbytes == found.nbytes and old.hashes in (None, found.hashes, found.with_groups().hashes)


def _without_digests(record: ArrayRecord) -> ArrayRecord:
    """Return an array without digests and statistics, which payload headers do not contain."""
    return record._replace(digests=b"", stats=b"")


def _old_manifest(store: Store, sizes: Mapping[str, int], save: str) -> ManifestContents | None:
    """Return a save's manifest in the folder; None if it cannot be read."""
    name = manifest_name(save)
    if not 0 < sizes.get(name, 0) <= MAX_MANIFEST_BYTES:
        return None
    try:
        return decode_manifest(read_bytes(store, name, 0, sizes[name]), where=f"{store.url}/{name}")
    except CheckpointError:
        return None


def _read_based(
    store: Store, sizes: Mapping[str, int], save: str, files: Sequence[_DescribedFile]
) -> ManifestContents | None:
    """Return the manifest of a step with bases, which no other file stores, if it matches the payload files."""
    old = _old_manifest(store, sizes, save)
    if old is None or not old.bases:
        return None
    found_pieces = {
        (file.name, offset, chunk.path, chunk.dtype, chunk.shape, chunk.box)
        for file in files
        for chunk, offset in zip(file.chunks, file.offsets, strict=True)
    }
    own = {file.name for file in old.files if not file.base}
    listed_pieces = {
        (piece.file, piece.layout.offset, a.path, a.dtype, a.shape, piece.box)
        for a in old.arrays
        for piece in a.pieces([file.place for file in old.files])
        if piece.file in own and isinstance(piece.layout, Span)
    }
    return old if found_pieces == listed_pieces else None


def _hash(store: Store, name: str, nbytes: int) -> FileRecord:
    """Return a file's record as it is."""
    hasher = BlockHasher()
    buffer = memoryview(bytearray(min(GROUP_BYTES, nbytes)))
    for start in range(0, nbytes, GROUP_BYTES):
        block = buffer[: min(GROUP_BYTES, nbytes - start)]
        store.read([Read(name, start, block)])
        hasher.update(block)
    return FileRecord(name, nbytes, hasher.digests())


@dataclass(frozen=True, slots=True)
class _DescribedFile:
    """A payload file as described by its header."""

    name: str  # name in the step's folder
    nbytes: int  # size of the file in bytes
    save: str  # id of the save that wrote it
    chunks: tuple[PayloadChunk, ...]  # chunks in file order
    offsets: tuple[int, ...]  # offset of each chunk's first byte in the file
    carry: Mapping[str, Any]  # further content of the manifest; empty except in one file of a save


class _ChunkRow(NamedTuple):
    path: Path
    dtype: Dtype
    shape: Counts
    offset: Counts  # of the box in the array
    size: Counts


@dataclass(frozen=True, slots=True)
class _Description:
    """A payload file's own description, in its header."""

    version: Version
    save: SaveId
    chunks: tuple[_ChunkRow, ...]
    carry: Annotated[Mapping[str, object], OMITTED] = field(default_factory=dict)


def read_described(store: Store, sizes: Mapping[str, int]) -> list[_DescribedFile]:
    """Read the headers of payload files."""
    headers = read_headers(store, sizes)
    return [_describe(name, header, f"{store.url}/{name}") for name, header in headers.items()]


def _describe(name: str, header: Header, where: str) -> _DescribedFile:
    if KEY not in header.metadata:
        raise FormatError("this is not a shardckpt payload file", where=where, expected=f"`{KEY}` in its metadata")
    raw = parse_json(header.metadata[KEY].encode("utf-8", "surrogatepass"), where=where)
    described = decode(_Description, raw, where=where, is_open=True)
    chunks = tuple(_check_chunk(row, where) for row in described.chunks)
    check_paths(list({str(chunk.path): chunk.path for chunk in chunks}.values()), where)
    offsets, at = [], 0
    for chunk in chunks:
        offsets.append(at)
        at += chunk.nbytes
    expected = [(offset, offset + chunk.nbytes) for offset, chunk in zip(offsets, chunks, strict=True)]
    if sorted(expected) != sorted((start, end) for _, _, start, end in header.tensors.values()):
        raise FormatError("the file's own description does not fit its header", where=where)
    places = tuple(header.data_start + offset for offset in offsets)
    return _DescribedFile(name, header.data_start + at, described.save, chunks, places, described.carry)


def _check_chunk(row: _ChunkRow, where: str) -> PayloadChunk:
    path, dtype, shape, offset, size = row
    box = Box(offset, size)
    if not len(shape) == len(offset) == len(size):
        raise FormatError(
            f"a chunk in {dotted(path)!r} has other dimensions", where=where, found=(box.offset, box.size)
        )
    require_dims(dotted(path), shape, where)
    if not box.within(shape):
        raise FormatError(f"a chunk is outside {dotted(path)!r}", where=where, found=str(box), expected=shape)
    return PayloadChunk(path, shape, dtype, box)


def rebuild_manifest(
    save: str, files: Sequence[_DescribedFile], where: str
) -> tuple[ManifestContents, tuple[str, ...]]:
    """Rebuild the manifest from payload files, without hashes; also return warnings."""
    found: dict[Path, ArrayRecord] = {}
    for number, file in enumerate(files):
        for chunk, offset in zip(file.chunks, file.offsets, strict=True):
            record = found.setdefault(chunk.path, ArrayRecord(chunk.path, chunk.dtype, chunk.shape, array("Q")))
            if (record.dtype, record.shape) != (chunk.dtype, chunk.shape):
                raise FormatError(f"two files disagree on {dotted(chunk.path)!r}", where=f"{where}/{file.name}")
            record.rows.extend((number, offset, *chunk.box.offset, *chunk.box.size))
    records = tuple(FileRecord(file.name, file.nbytes, None) for file in files)
    carry = next((file.carry for file in files if file.carry), None)
    if carry is None:
        note = "the file with the saved state is gone: values that are not tensors and tied names are lost"
        tree = tagged_json.encode(unflatten({path: ArrayRef(number) for number, path in enumerate(found)}, where))
        return ManifestContents(save, records, tuple(found.values()), tree=tree), (note,)
    order = decode(tuple[Path, ...], carry.get("arrays"), where=where)
    check_paths(order, where)
    _require_all(order, found, where)
    contents = decode(ManifestContents, {**carry, "save": save}, where=where, is_open=True)
    arrays = tuple(found[path] for path in order)
    return replace(contents, files=records, arrays=arrays).require_consistent(where), ()


def _require_all(order: Sequence[Path], found: Mapping[Path, object], where: str) -> None:
    missing = [path for path in order if path not in found]
    if missing:
        raise IncompleteError(
            f"{len(missing)} arrays are in no file, the first is {dotted(missing[0])!r}",
            where=where,
            found=f"{len(found)} arrays",
            expected=len(order),
            fix="Copy the missing files into the folder; only the manifest knows a base's files.",
        )
    if len(set(order)) != len(order) or len(found) != len(order):
        raise FormatError("the files hold arrays that their save did not know", where=where)
