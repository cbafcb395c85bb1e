"""Manifest of a native step as canonical JSON, and the parts that ranks send."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardckpt.encodings.budget import check_paths
from shardckpt.encodings.safetensors import parse_json, require_affordable
from shardckpt.encodings.value_stats import STATS_BYTES, ValueStats
from shardckpt.errors import FormatError, UnsafeError, UnsupportedError
from shardckpt.manifest import Path, dotted
from shardckpt.native.payload import VERSION, PayloadFile, encode_canonical
from shardckpt.native.records import (
    DIGEST_BYTES,
    ArrayRecord,
    Base,
    FileRecord,
    arrays_json,
    digests_json,
    field_error,
    files_json,
    read_arrays,
    read_fields,
    read_files,
    read_fixed,
    read_integer,
    read_list,
    read_path,
    read_save,
    read_sha256,
    require_base_url,
    require_version,
    stats_json,
    with_piece_data,
)

# Key of `topology`: false if arrays were converted from a checkpoint in another order than the state dicts.
KEEPS_ORDER = "keeps_order"

# Key of `topology`: `[index, [dimensions from the slowest to the fastest]]` of arrays not row-major in memory.
MEMORY_ORDERS = "memory_orders"

# Key of `topology`: paths of optimizers whose own `state_dict()` has other keys than `state` and `param_groups`.
OPTIMIZERS = "optimizers"

_MANIFEST_FIELDS: Mapping[str, type] = {
    "format": str,
    "save": str,
    "about": dict,
    "topology": dict,
    "files": list,
    "arrays": list,
    "ties": list,
    "nest": object,
}


@dataclass(frozen=True, slots=True)
class ManifestContents:
    """A manifest's fields."""

    save: str  # id of the save
    files: tuple[FileRecord, ...]  # every file of the step except the manifest and `COMMIT`
    arrays: tuple[ArrayRecord, ...]  # arrays in the order of the saved state
    tree: object = None  # saved state as tagged JSON, with tensors as indexes. Stored under the key `nest`
    ties: Mapping[Path, int] = field(default_factory=dict)  # further path of an array to its index
    topology: Mapping[str, object] = field(default_factory=dict)  # JSON value that describes the ranks
    about: Mapping[str, str] = field(default_factory=dict)  # text by name, which describes the writer
    bases: tuple[Base, ...] = ()  # folders that contain some of the files
    # Path to a model's further weights, such as averaged ones, to the model's path; None if it was not saved.
    variants: Mapping[Path, Path | None] = field(default_factory=dict)

    def carried(self) -> dict[str, object]:
        """Return the content that payload headers lack, for `plan_payloads(carry=...)`."""
        return {
            "arrays": [list(a.path) for a in self.arrays],
            "nest": self.tree,
            "ties": [[list(path), index] for path, index in self.ties.items()],
            "topology": dict(self.topology),
            "about": dict(self.about),
            **_variants_json(self.variants),
        }


def encode_manifest(contents: ManifestContents) -> bytes:
    """Return the manifest's bytes."""
    data = encode_canonical(
        {
            "format": "shardckpt manifest",
            "version": VERSION,
            "save": contents.save,
            "about": dict(contents.about),
            "topology": dict(contents.topology),
            **({"bases": [list(base) for base in contents.bases]} if contents.bases else {}),
            "files": files_json(contents.files, [base.url for base in contents.bases]),
            "arrays": arrays_json(contents.arrays),
            **digests_json(contents.arrays),
            **stats_json(contents.arrays),
            "ties": [[list(path), index] for path, index in contents.ties.items()],
            **_variants_json(contents.variants),
            "nest": contents.tree,
        }
    )
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
    raw = read_fields(parse_json(data, where=str(where)), _MANIFEST_FIELDS, where)
    if raw["format"] != "shardckpt manifest":
        raise field_error("this is not a manifest", raw["format"], "shardckpt manifest", where)
    require_version(raw.get("version"), where)
    bases = _read_bases(raw.get("bases", []), where)
    files = read_files(raw["files"], [base.url for base in bases], where)
    arrays = _read_arrays(raw, len(files), where)
    if not all(isinstance(v, str) for v in raw["about"].values()):
        raise field_error("`about` maps no names to text", raw["about"], "", where)
    return ManifestContents(
        save=read_save(raw["save"], where),
        files=files,
        arrays=arrays,
        tree=raw["nest"],
        ties=read_ties(raw["ties"], [a.path for a in arrays], where),
        topology=raw["topology"],
        about=raw["about"],
        bases=bases,
        variants=read_variants(raw.get("variants", []), where),
    )


def _read_arrays(raw: Mapping[str, Any], files: int, where: object) -> tuple[ArrayRecord, ...]:
    arrays = read_arrays(raw["arrays"], files, where)
    return with_piece_data(arrays, raw, where)


def _variants_json(variants: Mapping[Path, Path | None]) -> dict[str, object]:
    rows = [[list(path), None if of is None else list(of)] for path, of in variants.items()]
    return {"variants": rows} if rows else {}


def read_memory_orders(contents: ManifestContents, where: object) -> dict[int, tuple[int, ...]]:
    """Check and return the arrays' memory orders, by index."""
    found: dict[int, tuple[int, ...]] = {}
    for entry in read_list(contents.topology.get(MEMORY_ORDERS, []), MEMORY_ORDERS, where):
        index, dims = read_fixed(entry, 2, MEMORY_ORDERS, where)
        number = read_integer(index, MEMORY_ORDERS, where, below=len(contents.arrays))
        rank = len(contents.arrays[number].shape)
        order = [
            read_integer(d, MEMORY_ORDERS, where, below=rank) for d in read_fixed(dims, rank, MEMORY_ORDERS, where)
        ]
        if len(set(order)) != rank:
            raise field_error(f"an entry in {MEMORY_ORDERS!r} must be a permutation", order, "", where)
        found[number] = tuple(order)
    return found


def read_optimizers(contents: ManifestContents, where: object) -> tuple[Path, ...]:
    """Check and return the paths to optimizers with their own keys."""
    return tuple(read_path(raw, where) for raw in read_list(contents.topology.get(OPTIMIZERS, []), OPTIMIZERS, where))


def read_variants(value: object, where: object) -> dict[Path, Path | None]:
    """Check and return the paths to further weights."""
    found: dict[Path, Path | None] = {}
    for path, of in _read_by_path(value, "variants", (), where):
        found[path] = None if of is None else read_path(of, where)
    return found


def read_ties(value: object, paths: Sequence[Path], where: object) -> dict[Path, int]:
    """Check and return arrays' further paths."""
    rows = _read_by_path(value, "ties", paths, where)
    return {path: read_integer(index, "ties", where, below=len(paths)) for path, index in rows}


def _read_by_path(value: object, name: str, taken: Sequence[Path], where: object) -> Iterator[tuple[Path, object]]:
    """Yield a field's rows, each a path and a value; paths must be unique and not in `taken`."""
    rows = [read_fixed(entry, 2, name, where) for entry in read_list(value, name, where)]
    paths = [read_path(raw, where) for raw, _ in rows]
    check_paths(paths, where)
    seen = set(taken)
    for path, (_, other) in zip(paths, rows, strict=True):
        if path in seen:
            raise field_error(f"a path in {name!r} stands twice", dotted(path), "", where)
        seen.add(path)
        yield path, other


def _read_bases(value: object, where: object) -> tuple[Base, ...]:
    bases = tuple(_read_base(entry, where) for entry in read_list(value, "bases", where))
    if len({base.url for base in bases}) != len(bases):
        raise FormatError("a base is listed twice", where=where)
    return bases


def _read_base(entry: object, where: object) -> Base:
    url, save, sha256 = read_fixed(entry, 3, "bases", where)
    if save == sha256 == "":
        return Base(require_base_url(url, where))
    sha256 = read_sha256(sha256, "base digest", where)
    return Base(require_base_url(url, where), read_save(save, where), sha256)


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
    arrays = {"arrays": arrays_json(part.arrays), **digests_json(part.arrays), **stats_json(part.arrays)}
    return encode_canonical({"files": files_json(part.files, ()), **arrays})


def decode_partial(data: bytes, *, where: object = "") -> PartialManifest:
    """Decode what `encode_partial` returned."""
    raw = read_fields(parse_json(data, where=str(where)), {"files": list, "arrays": list}, where)
    files = read_files(raw["files"], (), where)
    return PartialManifest(files, _read_arrays(raw, len(files), where))


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
