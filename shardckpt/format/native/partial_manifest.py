"""Partial manifests, which ranks send to rank 0, and their merge."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from shardckpt.errors import FormatError
from shardckpt.format.encodings.safetensors import parse_json
from shardckpt.format.native.json_fields import read_fields
from shardckpt.format.native.payload import PayloadFile, encode_canonical
from shardckpt.format.native.records import (
    DIGEST_BYTES,
    ArrayRecord,
    FileRecord,
    arrays_json,
    digests_json,
    files_json,
    read_arrays,
    read_files,
    with_digests,
)
from shardckpt.manifest import Path, dotted


@dataclass(frozen=True, slots=True)
class WrittenPayload:
    """A payload file that has been written.

    Attributes:
        payload: Layout of the file.
        hashes: Hashes of its blocks; None if not computed.
        digests: Digests of its chunks, in file order; None if not computed.
    """

    payload: PayloadFile
    hashes: tuple[int, ...] | None = None
    digests: tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True)
class PartialManifest:
    """Records of the files and arrays that one writer wrote.

    Attributes:
        files: Records of the files.
        arrays: Records of the arrays, whose file indexes count in `files`.
    """

    files: tuple[FileRecord, ...]
    arrays: tuple[ArrayRecord, ...]


def build_partial(written: Sequence[WrittenPayload]) -> PartialManifest:
    """Build the records of the files that a writer wrote."""
    files = tuple(FileRecord(w.payload.name, w.payload.nbytes, w.hashes) for w in written)
    found: dict[Path, ArrayRecord] = {}
    digests: dict[Path, list[bytes]] = {}
    for number, each in enumerate(written):
        for chunk, offset in zip(each.payload.chunks, each.payload.offsets, strict=True):
            record = found.get(chunk.path)
            if record is None:
                record = found[chunk.path] = ArrayRecord(chunk.path, chunk.dtype, chunk.shape, array("Q"))
            record.rows.extend((number, offset, *chunk.box.offset, *chunk.box.size))
        for chunk, digest in zip(each.payload.chunks, each.digests or (), strict=each.digests is not None):
            digests.setdefault(chunk.path, []).append(digest)
    for path, parts in digests.items():
        found[path] = found[path]._replace(digests=b"".join(parts))
    return PartialManifest(files, tuple(found.values()))


def encode_partial(written: Sequence[WrittenPayload]) -> bytes:
    """Encode the records of a writer's files for the rank that commits."""
    part = build_partial(written)
    digests = digests_json(part.arrays)
    return encode_canonical({"files": files_json(part.files, ()), "arrays": arrays_json(part.arrays), **digests})


def decode_partial(data: bytes, *, where: object = "") -> PartialManifest:
    """Decode the result of `encode_partial`.

    Raises:
        FormatError: The bytes are not a result of `encode_partial`.
    """
    raw = read_fields(parse_json(data, where=str(where)), {"files": list, "arrays": list}, where)
    files = read_files(raw["files"], (), where)
    return PartialManifest(files, with_digests(read_arrays(raw["arrays"], len(files), where), raw, where))


def merge_partials(
    parts: Sequence[PartialManifest], order: Sequence[Path]
) -> tuple[tuple[FileRecord, ...], tuple[ArrayRecord, ...]]:
    """Merge the files and arrays of all writers.

    Args:
        parts: Parts, one for each writer.
        order: Paths of the tensors; the saved state refers to them by index.

    Raises:
        FormatError: Writers disagree on an array, or wrote other arrays than those of `order`.
    """
    files: list[FileRecord] = []
    found: dict[Path, ArrayRecord] = {}
    for part in parts:
        first = len(files)
        files += part.files
        for record in part.arrays:
            known = found.get(record.path)
            if known is None:
                known = found[record.path] = ArrayRecord(record.path, record.dtype, record.shape, array("Q"))
            if (known.dtype, known.shape) != (record.dtype, record.shape):
                raise FormatError(
                    "ranks disagree on an array",
                    where=dotted(record.path),
                    found=f"{record.dtype} {list(record.shape)}",
                    expected=f"{known.dtype} {list(known.shape)}",
                )
            rows = record.rows
            if first:
                rows = array("Q", rows)
                for at in range(0, len(rows), record.width):
                    rows[at] += first
            known.rows.extend(rows)
            if record.digests:
                found[record.path] = known._replace(digests=known.digests + record.digests)
    if set(found) != set(order) or len(set(order)) != len(order):
        wrong = next(iter(set(found) ^ set(order)), order[0] if order else ())
        raise FormatError("what was written is not what was planned", where=dotted(wrong))
    return tuple(files), tuple(_all_or_no_digests(found[path]) for path in order)


def _all_or_no_digests(record: ArrayRecord) -> ArrayRecord:
    if not record.digests:
        return record
    count = len(record.rows) // record.width
    return record if len(record.digests) == count * DIGEST_BYTES else record._replace(digests=b"")
