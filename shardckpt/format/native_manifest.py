"""A native step's manifest and its COMMIT: canonical JSON, checked field by field before anything is believed.

Rows of pieces are flat lists of integers, `[file, offset, *box offset, *box size]` after one another, since a manifest
may hold a million of them. What a rank tells the one that commits is the same rows without the nest: a part.
"""

from __future__ import annotations

import hashlib
import re
import reprlib
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import bits, is_known
from shardckpt.errors import ChecksumError, FormatError, TruncatedError, UnsafeError, UnsupportedError
from shardckpt.format import native_references
from shardckpt.format.native_payload import BLOCK_BYTES, VERSION, BlockHasher, Payload, canonical
from shardckpt.format.native_references import Base
from shardckpt.format.safetensors import MAX_DIMS, parse_json
from shardckpt.manifest import Path, Piece, Span, dotted

COMMIT = "COMMIT"
MANIFEST_SUFFIX = ".manifest.json"
FEATURES: frozenset[str] = frozenset({native_references.FEATURE})
"""Names of what a reader must understand beyond version 1.0, and this one does."""

DIGEST_BYTES = 16
"""Of a chunk's xxh3-128."""

MAX_COMMIT_BYTES = 1 << 26
MAX_MANIFEST_BYTES = 1 << 29
MAX_BASES = 4096
"""Folders that a step may refer to: each of them is looked into when it is opened."""

_MAX_BYTES = 1 << 62
_MAX_INT = (1 << 63) - 1
_MANIFEST_FIELDS: Mapping[str, type] = {
    "format": str,
    "version": list,
    "save": str,
    "about": dict,
    "topology": dict,
    "files": list,
    "arrays": list,
    "ties": list,
    "nest": object,
}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SAVE = re.compile(r"[0-9a-z]{1,64}")
_SHA256 = re.compile("[0-9a-f]{64}")
_NEWER = "Read it with a newer release of shardckpt."


@dataclass(frozen=True, slots=True)
class Written:
    """One payload file as it was written.

    Attributes:
        payload: Its layout.
        hashes: Of its blocks; None where none were made.
        digests: Of its chunks, in their order; None where none were made.
    """

    payload: Payload
    hashes: tuple[int, ...] | None = None
    digests: tuple[bytes, ...] | None = None


class FileRecord(NamedTuple):
    """One file that holds bytes of a step.

    Attributes:
        name: In its folder.
        nbytes: Its size.
        hashes: xxh3-64 of each of its blocks; None where none were made.
        base: The folder, as the step refers to it; empty for the step's own.
    """

    name: str
    nbytes: int
    hashes: tuple[int, ...] | None
    base: str = ""

    @property
    def place(self) -> str:
        """Name in the store of the step's reader."""
        return f"{self.base}/{self.name}" if self.base else self.name


class ArrayRecord(NamedTuple):
    """One array of a step.

    Attributes:
        path: Where it sits in the saved nest.
        dtype: Torch's name of its type.
        shape: In elements.
        rows: For each piece: file index, byte offset, box offset, box size.
        digests: For each piece the xxh3-128 of its bytes, back to back; empty where none were made.
    """

    path: Path
    dtype: str
    shape: Shape
    rows: array[int]
    digests: bytes = b""

    @property
    def width(self) -> int:
        """Integers of one row."""
        return 2 + 2 * len(self.shape)

    def pieces(self, places: Sequence[str]) -> tuple[Piece, ...]:
        """Return the pieces, with the bytes their boxes take.

        Args:
            places: Names of the files, as the reader's store has them.
        """
        rows, n, width, element = self.rows.tolist(), 2 + len(self.shape), self.width, bits(self.dtype)
        found = []
        for at in range(0, len(rows), width):
            box = Box(tuple(rows[at + 2 : at + n]), tuple(rows[at + n : at + width]))
            span = Span(rows[at + 1], (prod(box.size) * element + 7) // 8)
            found.append(Piece(box, places[rows[at]], span))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Part:
    """What one writer wrote.

    Attributes:
        files: Its files.
        arrays: Its rows; file indexes count in `files`.
    """

    files: tuple[FileRecord, ...]
    arrays: tuple[ArrayRecord, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a manifest says.

    Attributes:
        save: The save's id.
        files: Every file of the step but the manifest and `COMMIT`.
        arrays: In the order of the saved nest.
        nest: What was saved, as tagged JSON; arrays as indexes.
        ties: Further path of an array to its index.
        topology: Free JSON: how the ranks stood.
        about: Free text: who wrote it.
        bases: Folders in which some of the files lie.
        variants: Where further weights of a model are, with where that is; None where it was not saved.
    """

    save: str
    files: tuple[FileRecord, ...]
    arrays: tuple[ArrayRecord, ...]
    nest: object = None
    ties: Mapping[Path, int] = field(default_factory=dict)
    topology: Mapping[str, object] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    bases: tuple[Base, ...] = ()
    variants: Mapping[Path, Path | None] = field(default_factory=dict)

    def carried(self) -> dict[str, object]:
        """Return what no payload header says by itself, for `lay_out(carry=...)`."""
        return {
            "arrays": [list(a.path) for a in self.arrays],
            "nest": self.nest,
            "ties": [[list(path), index] for path, index in self.ties.items()],
            "topology": dict(self.topology),
            "about": dict(self.about),
            **_variants_json(self.variants),
        }


@dataclass(frozen=True, slots=True)
class Commit:
    """What makes a step exist.

    Attributes:
        save: The save's id.
        manifest: Name of the manifest.
        manifest_bytes: Its size.
        manifest_sha256: Its digest, in hexadecimal.
        files: Name to size of every other file of the step.
        version: Of the format.
        features: What a reader must understand.
        bases: Folders that it refers to, to name and size of the files there.
    """

    save: str
    manifest: str
    manifest_bytes: int
    manifest_sha256: str
    files: Mapping[str, int]
    version: tuple[int, int] = VERSION
    features: tuple[str, ...] = ()
    bases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


# What ranks tell the one that commits


def part_of(written: Sequence[Written]) -> Part:
    """Return what a writer wrote, as records."""
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
    for path, told in digests.items():
        found[path] = found[path]._replace(digests=b"".join(told))
    return Part(files, tuple(found.values()))


def encode_part(written: Sequence[Written]) -> bytes:
    """Return what a writer wrote, as bytes for the one that commits."""
    part = part_of(written)
    digests = _digests_json(part.arrays)
    return canonical({"files": _files_json(part.files, ()), "arrays": _arrays_json(part.arrays), **digests})


def decode_part(data: bytes, *, where: object = "") -> Part:
    """Return what another rank wrote.

    Raises:
        FormatError: The bytes are none of `encode_part`'s.
    """
    raw = read_fields(parse_json(data, where=str(where)), {"files": list, "arrays": list}, where)
    files = _read_files(raw["files"], (), where)
    return Part(files, _with_digests(_read_arrays(raw["arrays"], len(files), where), raw, where))


def join(parts: Sequence[Part], order: Sequence[Path]) -> tuple[tuple[FileRecord, ...], tuple[ArrayRecord, ...]]:
    """Return the files and arrays of all writers together.

    Args:
        parts: One for each writer.
        order: Paths of the arrays as the nest refers to them, by index.

    Raises:
        FormatError: Writers disagree on an array, or wrote others than those of `order`.
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


def record_of(name: str, content: bytes, *, checksums: bool = True) -> FileRecord:
    """Return the record of a small file that holds no array, as `model.safetensors.index.json`.

    Such records stand behind those of `join`, since rows count files.
    """
    hasher = BlockHasher()
    hasher.update(content)
    return FileRecord(name, len(content), hasher.digests() if checksums else None)


# The manifest


def encode_manifest(contents: Contents) -> bytes:
    """Return the manifest's bytes."""
    return canonical(
        {
            "format": "shardckpt manifest",
            "version": list(VERSION),
            "save": contents.save,
            "about": dict(contents.about),
            "topology": dict(contents.topology),
            **({"bases": [list(base) for base in contents.bases]} if contents.bases else {}),
            "files": _files_json(contents.files, [base.url for base in contents.bases]),
            "arrays": _arrays_json(contents.arrays),
            **_digests_json(contents.arrays),
            "ties": [[list(path), index] for path, index in contents.ties.items()],
            **_variants_json(contents.variants),
            "nest": contents.nest,
        }
    )


def decode_manifest(data: bytes | bytearray, *, where: object = "") -> Contents:
    """Return what a manifest says, every field checked.

    Raises:
        FormatError: It does not follow the format.
        UnsupportedError: A version or a type that this release does not know.
    """
    raw = read_fields(parse_json(data, where=str(where)), _MANIFEST_FIELDS, where)
    if raw["format"] != "shardckpt manifest":
        raise _bad("this is no manifest", raw["format"], "shardckpt manifest", where)
    _version(raw["version"], where)
    bases = _read_bases(raw.get("bases", []), where)
    files = _read_files(raw["files"], [base.url for base in bases], where)
    arrays = _with_digests(_read_arrays(raw["arrays"], len(files), where), raw, where)
    if not all(isinstance(v, str) for v in raw["about"].values()):
        raise _bad("`about` maps no names to text", raw["about"], "", where)
    return Contents(
        save=_save(raw["save"], where),
        files=files,
        arrays=arrays,
        nest=raw["nest"],
        ties=read_ties(raw["ties"], [a.path for a in arrays], where),
        topology=raw["topology"],
        about=raw["about"],
        bases=bases,
        variants=read_variants(raw.get("variants", []), where),
    )


def _variants_json(variants: Mapping[Path, Path | None]) -> dict[str, object]:
    rows = [[list(path), None if of is None else list(of)] for path, of in variants.items()]
    return {"variants": rows} if rows else {}


def read_variants(value: object, where: object) -> dict[Path, Path | None]:
    """Check and return where further weights are.

    Args:
        value: As parsed.
        where: The file, for messages.

    Raises:
        FormatError: An entry is none.
    """
    found: dict[Path, Path | None] = {}
    for entry in _list(value, "variants", where):
        raw, of = _fixed(entry, 2, "variants", where)
        path = read_path(raw, where)
        if path in found:
            raise _bad("a variant stands twice", dotted(path), "", where)
        found[path] = None if of is None else read_path(of, where)
    return found


def read_ties(value: object, paths: Sequence[Path], where: object) -> dict[Path, int]:
    """Check and return the further paths of arrays.

    Args:
        value: As parsed.
        paths: Of the arrays.
        where: The file, for messages.

    Raises:
        FormatError: An entry is none.
    """
    taken = set(paths)
    ties: dict[Path, int] = {}
    for entry in _list(value, "ties", where):
        raw, index = _fixed(entry, 2, "ties", where)
        path = read_path(raw, where)
        if path in taken:
            raise _bad("a tied name stands twice", dotted(path), "", where)
        taken.add(path)
        ties[path] = _integer(index, "ties", where, below=len(paths))
    return ties


def _files_json(files: Iterable[FileRecord], bases: Sequence[str]) -> list[object]:
    number = {url: at for at, url in enumerate(bases)}
    return [
        [f.name, f.nbytes, None if f.hashes is None else _hex(f.hashes), *([number[f.base]] if f.base else [])]
        for f in files
    ]


def _digests_json(arrays: Sequence[ArrayRecord]) -> dict[str, object]:
    return {"digests": [a.digests.hex() for a in arrays]} if any(a.digests for a in arrays) else {}


def _with_digests(arrays: tuple[ArrayRecord, ...], raw: Mapping[str, Any], where: object) -> tuple[ArrayRecord, ...]:
    """Return arrays with the digests of their pieces, where there are any."""
    if "digests" not in raw:
        return arrays
    texts = _fixed(raw["digests"], len(arrays), "digests", where)
    return tuple(
        record._replace(digests=_read_digests(text, record, where)) for record, text in zip(arrays, texts, strict=True)
    )


def _read_digests(text: object, record: ArrayRecord, where: object) -> bytes:
    length = 2 * DIGEST_BYTES * (len(record.rows) // record.width)
    if not isinstance(text, str) or len(text) not in (0, length):
        raise _bad(f"the digests of {dotted(record.path)!r} do not fit its pieces", "", f"{length} digits", where)
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise _bad("a digest is no hexadecimal number", text[:40], "", where) from error


def _read_bases(value: object, where: object) -> tuple[Base, ...]:
    bases = tuple(_read_base(entry, where) for entry in _list(value, "bases", where))
    if len({base.url for base in bases}) != len(bases):
        raise FormatError("a base is listed twice", where=where)
    return bases


def _read_base(entry: object, where: object) -> Base:
    url, save, sha256 = _fixed(entry, 3, "bases", where)
    if save == sha256 == "":
        return Base(_base_url(url, where))
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _bad("the digest of a base is none", sha256, "64 hexadecimal digits", where)
    return Base(_base_url(url, where), _save(save, where), sha256)


def _base_url(url: object, where: object) -> str:
    if not native_references.is_base_url(url):
        raise UnsafeError(
            "this is no reference to a base", where=where, found=_shown(url), expected="../NAME, or absolute"
        )
    return str(url)


def _hex(hashes: Sequence[int]) -> str:
    return struct.pack(f">{len(hashes)}Q", *hashes).hex()


def _arrays_json(arrays: Iterable[ArrayRecord]) -> list[object]:
    return [[list(a.path), a.dtype, list(a.shape), a.rows.tolist()] for a in arrays]


def _read_files(value: object, bases: Sequence[str], where: object) -> tuple[FileRecord, ...]:
    files = tuple(_read_file(entry, bases, where) for entry in _list(value, "files", where))
    if len({(f.base, f.name) for f in files}) != len(files):
        raise FormatError("a file is listed twice", where=where)
    return files


def _read_file(entry: object, bases: Sequence[str], where: object) -> FileRecord:
    base = ""
    if isinstance(entry, list) and len(entry) == 4 and bases:
        base = bases[_integer(entry[3], "files", where, below=len(bases))]
        entry = entry[:3]
    name, size, digests = _fixed(entry, 3, "files", where)
    size = _integer(size, "files", where, below=_MAX_BYTES)
    if digests is None and base:
        raise _bad("a file of a base has no hashes", name, "hashes: nothing else says that it is the one", where)
    if digests is None:
        return FileRecord(plain_name(name, where), size, None)
    blocks = -(-size // BLOCK_BYTES)
    if not isinstance(digests, str) or len(digests) != 16 * blocks:
        raise _bad(f"the hashes of {str(name)[:200]!r} do not fit its size", "", f"{blocks} of 16 digits", where)
    try:
        hashes = struct.unpack(f">{blocks}Q", bytes.fromhex(digests))
    except (ValueError, struct.error) as error:
        raise _bad("a hash is no hexadecimal number", digests[:40], "", where) from error
    return FileRecord(plain_name(name, where), size, hashes, base)


def _read_arrays(value: object, files: int, where: object) -> tuple[ArrayRecord, ...]:
    arrays = tuple(_read_array(entry, files, where) for entry in _list(value, "arrays", where))
    if len({a.path for a in arrays}) != len(arrays):
        raise FormatError("an array is listed twice", where=where)
    return arrays


def _read_array(entry: object, files: int, where: object) -> ArrayRecord:
    raw_path, dtype, raw_shape, raw_rows = _fixed(entry, 4, "arrays", where)
    path = read_path(raw_path, where)
    shape, rows = tuple(_integers(raw_shape, where)), _integers(raw_rows, where)
    if not isinstance(dtype, str) or not is_known(dtype):
        raise UnsupportedError(f"array {dotted(path)!r} has an unknown type", where=where, found=dtype, fix=_NEWER)
    if len(shape) > MAX_DIMS:
        raise UnsupportedError(
            f"array {dotted(path)!r} has more dimensions than any library holds",
            where=where,
            found=len(shape),
            expected=f"at most {MAX_DIMS}",
        )
    width = 2 + 2 * len(shape)
    if len(rows) % width or (rows and max(rows[::width]) >= files):
        raise FormatError(f"the pieces of {dotted(path)!r} are no rows", where=where)
    return ArrayRecord(path, dtype, shape, rows)


def _integers(value: object, where: object) -> array[int]:
    """Return a list of numbers from 0 to 2^64; what they mean is checked where all is known: by `plan.coverage`."""
    try:
        found: array[int] = array("Q", _list(value, "numbers", where))
    except (TypeError, OverflowError, ValueError) as error:
        raise _bad("no list of counts", value, "", where) from error
    return found


# COMMIT


def encode_commit(save: str, manifest: bytes, files: Iterable[FileRecord]) -> bytes:
    """Return the bytes of `COMMIT`: a line of JSON, and a line with that line's SHA-256.

    Args:
        save: The save's id.
        manifest: The bytes of the manifest, whose name is `manifest_name(save)`.
        files: Every other file of the step, and those of its bases.
    """
    files = list(files)
    bases = files_of_bases(files)
    content = {
        "format": "shardckpt",
        "version": list(VERSION),
        "features": [native_references.FEATURE] if bases else [],
        "save": save,
        "manifest": [manifest_name(save), len(manifest), hashlib.sha256(manifest).hexdigest()],
        "files": [[f.name, f.nbytes] for f in files if not f.base],
        **({"bases": [[url, list(map(list, named.items()))] for url, named in bases.items()]} if bases else {}),
    }
    line = canonical(content) + b"\n"
    return line + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n"


def files_of_bases(files: Iterable[FileRecord]) -> dict[str, dict[str, int]]:
    """Return for each base the names and sizes of its files."""
    bases: dict[str, dict[str, int]] = {}
    for file in files:
        if file.base:
            bases.setdefault(file.base, {})[file.name] = file.nbytes
    return bases


def manifest_name(save: str) -> str:
    """Return the name of a save's manifest."""
    return save + MANIFEST_SUFFIX


_REPAIR = "Restore the step from another copy, or rebuild its marks with `shardckpt repair`."


def decode_commit(data: bytes, *, where: object = "") -> Commit:
    """Return what `COMMIT` says, every field checked.

    Raises:
        ChecksumError: It does not match its own digest.
        TruncatedError: Its end is missing.
        FormatError: It does not follow the format.
        UnsupportedError: A newer version, or a feature that this release does not know, by name.
    """
    end = data.find(b"\n") + 1
    digest = data[end:]
    if not end or len(digest) < 65:
        raise TruncatedError("the commit mark is cut short", where=where, found=f"{len(data)} bytes", fix=_REPAIR)
    expected = hashlib.sha256(data[:end]).hexdigest()
    if digest != expected.encode("ascii") + b"\n":
        raise ChecksumError(
            "the commit mark does not match its own digest",
            where=where,
            found=expected,
            expected=digest[:80].decode("ascii", "replace").strip(),
            fix=_REPAIR,
        )
    raw = parse_json(data[: end - 1], where=str(where))
    if not isinstance(raw, dict) or raw.get("format") != "shardckpt":
        raise FormatError("this is no commit mark of shardckpt", where=where)
    version = _version(raw.get("version"), where)
    raw = read_fields(raw, {"features": list, "save": str, "manifest": list, "files": list}, where)
    features = _features(raw["features"], where)
    name, size, sha256 = _fixed(raw["manifest"], 3, "manifest", where)
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _bad("the manifest's digest is none", sha256, "64 hexadecimal digits", where)
    sizes = _sizes(raw["files"], where)
    manifest_bytes = _integer(size, "manifest", where, below=_MAX_BYTES)
    if manifest_bytes > MAX_MANIFEST_BYTES:
        raise UnsafeError("the manifest is too large", where=where, found=size, expected=MAX_MANIFEST_BYTES)
    save = _save(raw["save"], where)
    bases = _files_by_base(raw.get("bases", []), where)
    if bool(bases) != (native_references.FEATURE in features):
        raise FormatError("the commit mark's features do not fit its bases", where=where)
    return Commit(save, plain_name(name, where), manifest_bytes, sha256, sizes, version, features, bases)


def _sizes(value: object, where: object) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for entry in _list(value, "files", where):
        file, nbytes = _fixed(entry, 2, "files", where)
        if plain_name(file, where) in sizes:
            raise _bad("a file is listed twice", file, "", where)
        sizes[file] = _integer(nbytes, "files", where, below=_MAX_BYTES)
    return sizes


def _files_by_base(value: object, where: object) -> dict[str, dict[str, int]]:
    bases: dict[str, dict[str, int]] = {}
    if len(_list(value, "bases", where)) > MAX_BASES:
        raise UnsafeError("too many bases", where=where, found=len(_list(value, "bases", where)), expected=MAX_BASES)
    for entry in _list(value, "bases", where):
        url, files = _fixed(entry, 2, "bases", where)
        if _base_url(url, where) in bases:
            raise _bad("a base is listed twice", url, "", where)
        bases[url] = _sizes(files, where)
    return bases


def _version(value: object, where: object) -> tuple[int, int]:
    major, minor = (_integer(n, "version", where, below=_MAX_INT) for n in _fixed(value, 2, "version", where))
    if major != VERSION[0]:
        raise UnsupportedError(
            f"this step has version {major}.{minor} of the format",
            where=where,
            found=f"{major}.{minor}",
            expected=f"{VERSION[0]}.x",
            fix=_NEWER,
        )
    return major, minor


def _features(value: object, where: object) -> tuple[str, ...]:
    features = _list(value, "features", where)
    for name in features:
        if not isinstance(name, str):
            raise _bad("a feature has no name", name, "", where)
        if name not in FEATURES:
            raise UnsupportedError(
                f"this step needs the feature {name!r}, which this release does not know", where=where, fix=_NEWER
            )
    return tuple(features)


# Fields


def read_path(value: object, where: object) -> Path:
    """Return a path as JSON holds it: texts and integers.

    Raises:
        FormatError: It is none.
    """
    for key in _list(value, "path", where):
        if type(key) is not str and type(key) is not int:
            raise _bad("a path is no list of texts and integers", value, "", where)
    return tuple(value)  # type: ignore[arg-type]


def plain_name(value: object, where: object) -> str:
    """Return the name of a file directly in the step's folder.

    Raises:
        UnsafeError: It could mean another place.
    """
    if not isinstance(value, str) or not _PLAIN_NAME.fullmatch(value):
        raise UnsafeError("this is no name of a file in the step's folder", where=where, found=_shown(value))
    return value


def _save(value: object, where: object) -> str:
    if not isinstance(value, str) or not _SAVE.fullmatch(value):
        raise _bad("the save's id is none", value, "digits and small letters", where)
    return value


def read_fields(value: object, kinds: Mapping[str, type], where: object) -> dict[str, Any]:
    """Return a JSON object that has these fields.

    Args:
        value: As parsed.
        kinds: Name to type.
        where: The file, for messages.

    Raises:
        FormatError: It is none, or a field is missing or of another type.
    """
    if not isinstance(value, dict):
        raise _bad("no JSON object", value, "", where)
    for name, kind in kinds.items():
        if name not in value:
            raise FormatError(f"the field {name!r} is missing", where=where)
        if not isinstance(value[name], kind):
            raise _bad(f"the field {name!r} is no {kind.__name__}", value[name], "", where)
    return value


def _list(value: object, name: str, where: object) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(f"{name!r} is no list", value, "", where)
    return value


def _fixed(value: object, length: int, name: str, where: object) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise _bad(f"an entry of {name!r} is none", value, f"a list of {length}", where)
    return value


def _integer(value: object, name: str, where: object, *, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise _bad(f"a number of {name!r} is none", value, f"0 to {below - 1}", where)
    return value


def _shown(value: object) -> str:
    return value if isinstance(value, str) else reprlib.repr(value)  # which cuts, before it is made


def _bad(what: str, found: object, expected: str, where: object) -> FormatError:
    return FormatError(what, where=where, found=_shown(found), expected=expected)
