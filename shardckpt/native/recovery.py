"""Rebuild a lost manifest from the headers of payload files."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.boxes import Box
from shardckpt.dtypes import is_known
from shardckpt.encodings import tagged_json
from shardckpt.encodings.budget import check_paths
from shardckpt.encodings.safetensors import Header, parse_json, read_headers, require_dims
from shardckpt.encodings.tagged_json import ArrayRef
from shardckpt.errors import FormatError, IncompleteError, UnsupportedError
from shardckpt.manifest import Path, dotted, unflatten
from shardckpt.native.manifest_json import ManifestContents, read_ties, read_variants
from shardckpt.native.payload import KEY, PayloadChunk
from shardckpt.native.records import ArrayRecord, FileRecord, read_fields, read_path, require_version
from shardckpt.storage.store import Store


@dataclass(frozen=True, slots=True)
class DescribedFile:
    """A payload file as described by its header."""

    name: str  # name in the step's folder
    nbytes: int  # size of the file in bytes
    save: str  # id of the save that wrote it
    chunks: tuple[PayloadChunk, ...]  # chunks in file order
    offsets: tuple[int, ...]  # offset of each chunk's first byte in the file
    carry: Mapping[str, Any]  # further content of the manifest; empty except in one file of a save


def read_described(store: Store, sizes: Mapping[str, int]) -> list[DescribedFile]:
    """Read the headers of payload files."""
    headers = read_headers(store, sizes)
    return [_describe(name, header, f"{store.url}/{name}") for name, header in headers.items()]


def _describe(name: str, header: Header, where: str) -> DescribedFile:
    if KEY not in header.metadata:
        raise FormatError("this is not a shardckpt payload file", where=where, expected=f"`{KEY}` in its metadata")
    raw = read_fields(
        parse_json(header.metadata[KEY].encode("utf-8", "surrogatepass"), where=where),
        {"save": str, "chunks": list},
        where,
    )
    require_version(raw.get("version"), where)
    chunks = tuple(_chunk(entry, where) for entry in raw["chunks"])
    check_paths(list({str(chunk.path): chunk.path for chunk in chunks}.values()), where)
    offsets, at = [], 0
    for chunk in chunks:
        offsets.append(at)
        at += chunk.nbytes
    expected = [(offset, offset + chunk.nbytes) for offset, chunk in zip(offsets, chunks, strict=True)]
    if sorted(expected) != sorted((start, end) for _, _, start, end in header.tensors.values()):
        raise FormatError("the file's own description does not fit its header", where=where)
    carry = read_fields(raw.get("carry", {}), {}, where)
    places = tuple(header.data_start + offset for offset in offsets)
    return DescribedFile(name, header.data_start + at, raw["save"], chunks, places, carry)


def _chunk(entry: Any, where: str) -> PayloadChunk:
    try:
        raw_path, dtype, *lists = entry
        shape, offset, size = (tuple(array("Q", numbers)) for numbers in lists)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError("invalid chunk", where=where) from error
    path, box = read_path(raw_path, where), Box(offset, size)
    if not isinstance(dtype, str) or not is_known(dtype):
        raise UnsupportedError(f"a chunk in {dotted(path)!r} has an unknown type", where=where, found=dtype)
    if not len(shape) == len(offset) == len(size):
        raise FormatError(f"a chunk in {dotted(path)!r} has other dimensions", where=where, found=(offset, size))
    require_dims(dotted(path), shape, where)
    if not box.within(shape):
        raise FormatError(f"a chunk is outside {dotted(path)!r}", where=where, found=str(box), expected=shape)
    return PayloadChunk(path, shape, dtype, box)


def rebuild_manifest(save: str, files: Sequence[DescribedFile], where: str) -> tuple[ManifestContents, tuple[str, ...]]:
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
        return ManifestContents(save, records, tuple(found.values()), tree), (note,)
    fields = read_fields(carry, {"arrays": list, "ties": list, "topology": dict, "about": dict}, where)
    order = [read_path(path, where) for path in fields["arrays"]]
    check_paths(order, where)
    _require_all(order, found, where)
    ties = read_ties(fields["ties"], order, where)
    arrays = tuple(found[path] for path in order)
    variants = read_variants(fields.get("variants", []), where)
    return ManifestContents(
        save, records, arrays, carry.get("nest"), ties, fields["topology"], fields["about"], variants=variants
    ), ()


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
