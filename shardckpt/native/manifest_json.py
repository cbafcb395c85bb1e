"""Manifest of a native step as canonical JSON, and the parts that ranks send."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from shardckpt.encodings.safetensors import parse_json, require_affordable
from shardckpt.encodings.typed_json import OMITTED, UNSTORED, decode, dump, encode
from shardckpt.encodings.value_stats import STATS_BYTES, ValueStats
from shardckpt.errors import FormatError, UnsafeError, UnsupportedError
from shardckpt.manifest import Path, dotted
from shardckpt.native.payload import VERSION, PayloadFile, encode_canonical
from shardckpt.native.records import (
    DIGEST_BYTES,
    ArrayRecord,
    Base,
    Count,
    FileRecord,
    SaveId,
    Version,
    build_table,
    read_table,
)

PRETRAINED = "pretrained"  # field in `topology`


@dataclass(frozen=True, slots=True)
class Topology:
    """Fields in a manifest's `topology` that readers use; others are free."""

    keeps_order: Annotated[bool, OMITTED] = True  # whether the arrays are in the state dicts' order
    # Dimensions from the slowest to the fastest, by the index of an array that was not row-major in memory.
    memory_orders: Annotated[Mapping[Count, tuple[Count, ...]], OMITTED] = field(default_factory=dict)
    # Paths of optimizers whose own `state_dict()` has other keys than `state` and `param_groups`.
    optimizers: Annotated[tuple[Path, ...], OMITTED] = ()
    # Path to the model that the config describes, the last key as an FQN; empty if it is the state's model.
    pretrained: Annotated[Path, OMITTED] = ()


@dataclass(frozen=True, slots=True)
class _Head:
    """First fields of a manifest."""

    format: Literal["shardckpt manifest"] = "shardckpt manifest"
    version: Version = VERSION


@dataclass(frozen=True, slots=True)
class ManifestContents:
    """A manifest's fields, in the JSON's order except for `files` and `arrays`, whose form is a `PieceTable`."""

    save: SaveId
    files: Annotated[tuple[FileRecord, ...], UNSTORED] = ()  # all except the manifest and `COMMIT`
    arrays: Annotated[tuple[ArrayRecord, ...], UNSTORED] = ()  # in the order of the saved state
    about: Mapping[str, str] = field(default_factory=dict, kw_only=True)  # describes the writer
    topology: Mapping[str, object] = field(default_factory=dict, kw_only=True)  # describes the ranks
    bases: Annotated[tuple[Base, ...], OMITTED] = field(default=(), kw_only=True)  # folders with some of the files
    ties: Mapping[Path, Count] = field(default_factory=dict, kw_only=True)  # further path of an array to its index
    # Path to a model's further weights, such as averaged ones, to the model's path; None if it was not saved.
    variants: Annotated[Mapping[Path, Path | None], OMITTED] = field(default_factory=dict, kw_only=True)
    # Saved state as tagged JSON, with tensors as indexes.
    tree: Annotated[object, "nest"] = field(default=None, kw_only=True)

    def carried(self) -> dict[str, object]:
        """Return the content that payload headers lack, for `plan_payloads(carry=...)`."""
        fields = encode(replace(self, bases=()))
        first = {"arrays": [list(a.path) for a in self.arrays], **{name: fields.pop(name) for name in _CARRIED_FIRST}}
        return first | {name: fields[name] for name in fields if name != "save"}

    def require_consistent(self, where: object) -> ManifestContents:
        """Check the fields that refer to arrays; return the contents."""
        paths = {record.path for record in self.arrays}
        for path, index in self.ties.items():
            if path in paths or index >= len(self.arrays):
                what = "a path in 'ties' must be new and refer to an array"
                raise FormatError(what, where=where, found=f"{dotted(path)}: {index}")
        return self


_CARRIED_FIRST = ("nest", "ties", "topology", "about")
_AFTER_ARRAYS = ("ties", "variants", "nest")


def encode_manifest(contents: ManifestContents) -> bytes:
    """Return the manifest's bytes."""
    table = build_table(contents.files, contents.arrays, [base.url for base in contents.bases])
    fields = encode(_Head()) | encode(contents)
    last = {name: fields.pop(name) for name in _AFTER_ARRAYS if name in fields}
    data = encode_canonical(fields | encode(table) | last)
    try:
        require_affordable(data, where="")
    except UnsafeError as error:
        raise UnsupportedError(
            "the values to save consist of very many small lists and dicts, which no reader takes",
            found=f"{len(data)} bytes of JSON",
            fix="Save them as tensors or arrays.",
        ) from error
    return data


def decode_manifest(data: bytes | bytearray, *, where: object = "") -> ManifestContents:
    """Parse a manifest and check every field."""
    raw = parse_json(data, where=str(where))
    decode(_Head, raw, where=where, is_open=True)
    contents = decode(ManifestContents, raw, where=where, is_open=True)
    urls = [base.url for base in contents.bases]
    if len(set(urls)) != len(urls) or any(bool(base.save) != bool(base.sha256) for base in contents.bases):
        raise FormatError("a base is listed twice, or has only a save or a SHA-256", where=where, found=urls)
    files, arrays = read_table(raw, where, urls)
    return replace(contents, files=files, arrays=arrays).require_consistent(where)


def read_topology(contents: ManifestContents, where: object) -> Topology:
    """Check and return the fields in `topology` that readers use."""
    found = decode(Topology, contents.topology, where=where, is_open=True)
    for index, order in found.memory_orders.items():
        if index >= len(contents.arrays) or sorted(order) != [*range(len(contents.arrays[index].shape))]:
            what = "an entry in 'memory_orders' must be an array's index and a permutation"
            raise FormatError(what, where=where, found=f"{index}: {order}")
    return found


@dataclass(frozen=True, slots=True)
class WrittenPayload:
    """A payload file that has been written."""

    payload: PayloadFile  # layout of the file
    hashes: bytes | None = None  # hashes of its blocks, big-endian, back to back; None if not computed
    digests: tuple[bytes, ...] | None = None  # digests of its chunks, in file order; None if not computed
    stats: tuple[ValueStats, ...] | None = None  # statistics of its chunks, in file order; None if not computed


@dataclass(frozen=True, slots=True)
class PartialManifest:
    """Records of the files and arrays that one writer wrote."""

    files: tuple[FileRecord, ...]
    arrays: tuple[ArrayRecord, ...]  # records of the arrays, whose file indexes count in `files`


def build_partial(written: Sequence[WrittenPayload]) -> PartialManifest:
    """Build the records for the files that a writer wrote."""
    files = tuple(FileRecord(w.payload.name, w.payload.nbytes, w.hashes) for w in written)
    found: dict[Path, ArrayRecord] = {}
    digests: dict[Path, list[bytes]] = {}
    stats: dict[Path, list[bytes]] = {}
    for number, each in enumerate(written):
        for chunk, offset in zip(each.payload.chunks, each.payload.offsets, strict=True):
            record = found.get(chunk.path)
            if record is None:
                record = found[chunk.path] = ArrayRecord(chunk.path, chunk.dtype, chunk.shape, array("Q"))
            record.rows.extend((number, offset, *chunk.box.offset, *chunk.box.size))
        for chunk, digest in zip(each.payload.chunks, each.digests or (), strict=each.digests is not None):
            digests.setdefault(chunk.path, []).append(digest)
        for chunk, measured in zip(each.payload.chunks, each.stats or (), strict=each.stats is not None):
            stats.setdefault(chunk.path, []).append(measured.pack())
    for path, parts in digests.items():
        found[path] = found[path]._replace(digests=b"".join(parts))
    for path, parts in stats.items():
        found[path] = found[path]._replace(stats=b"".join(parts))
    return PartialManifest(files, tuple(found.values()))


def encode_partial(written: Sequence[WrittenPayload]) -> bytes:
    """Encode a writer's file records for the rank that commits."""
    part = build_partial(written)
    return dump(build_table(part.files, part.arrays))


def decode_partial(data: bytes, *, where: object = "") -> PartialManifest:
    """Decode what `encode_partial` returned."""
    return PartialManifest(*read_table(parse_json(data, where=str(where)), where))


def merge_partials(
    parts: Sequence[PartialManifest], order: Sequence[Path]
) -> tuple[tuple[FileRecord, ...], tuple[ArrayRecord, ...]]:
    """Merge all writers' files and arrays."""
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
            if record.digests or record.stats:
                found[record.path] = known._replace(
                    digests=known.digests + record.digests, stats=known.stats + record.stats
                )
    if set(found) != set(order) or len(set(order)) != len(order):
        wrong = next(iter(set(found) ^ set(order)), order[0] if order else ())
        raise FormatError("what was written is not what was planned", where=dotted(wrong))
    return tuple(files), tuple(_for_all_or_no_pieces(found[path]) for path in order)


def _for_all_or_no_pieces(record: ArrayRecord) -> ArrayRecord:
    """Return an array without digests or statistics that some pieces lack."""
    count = len(record.rows) // record.width
    if len(record.digests) != count * DIGEST_BYTES:
        record = record._replace(digests=b"")
    return record if len(record.stats) == count * STATS_BYTES else record._replace(stats=b"")
