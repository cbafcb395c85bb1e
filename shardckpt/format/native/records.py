"""Records of a native step's files and arrays, and their JSON form.

Pieces are stored as concatenated rows of integers, `[file, offset, *box offset, *box size]`, since a manifest may
have a million of them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import bits, is_known
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.format.budget import check_paths
from shardckpt.format.encodings.safetensors import require_dims
from shardckpt.format.native.json_fields import (
    MAX_BYTES,
    NEWER,
    field_error,
    plain_name,
    read_fixed,
    read_integer,
    read_list,
    read_path,
)
from shardckpt.format.native.payload import BLOCK_BYTES, BlockHasher
from shardckpt.manifest import Path, Piece, Span, dotted

DIGEST_BYTES = 16
"""Bytes of a chunk's xxh3-128."""


class FileRecord(NamedTuple):
    """One file with bytes of a step.

    Attributes:
        name: Name in its folder.
        nbytes: Size in bytes.
        hashes: xxh3-64 of each block; None if not computed.
        base: Reference of the step to the file's folder; empty for the step's own folder.
    """

    name: str
    nbytes: int
    hashes: tuple[int, ...] | None
    base: str = ""

    @property
    def place(self) -> str:
        """Name of the file in the store of the step's reader."""
        return f"{self.base}/{self.name}" if self.base else self.name


class ArrayRecord(NamedTuple):
    """One array of a step.

    Attributes:
        path: Path in the saved state.
        dtype: Dtype in torch's spelling.
        shape: Shape in elements.
        rows: For each piece: file index, byte offset, box offset, box size.
        digests: Concatenated xxh3-128 of the pieces; empty if not computed.
    """

    path: Path
    dtype: str
    shape: Shape
    rows: array[int]
    digests: bytes = b""

    @property
    def width(self) -> int:
        """Integers in one row."""
        return 2 + 2 * len(self.shape)

    def pieces(self, places: Sequence[str]) -> tuple[Piece, ...]:
        """Return the pieces, with the byte ranges of their boxes.

        Args:
            places: Names of the files in the reader's store.
        """
        rows, n, width, element = self.rows.tolist(), 2 + len(self.shape), self.width, bits(self.dtype)
        found = []
        for at in range(0, len(rows), width):
            box = Box(tuple(rows[at + 2 : at + n]), tuple(rows[at + n : at + width]))
            span = Span(rows[at + 1], (prod(box.size) * element + 7) // 8)
            found.append(Piece(box, places[rows[at]], span))
        return tuple(found)


def make_record(name: str, content: bytes, *, checksums: bool = True) -> FileRecord:
    """Return the record of a small file without arrays.

    An example is `model.safetensors.index.json`. Append such records after those of `merge_partials`, since rows
    contain file indexes.
    """
    hasher = BlockHasher()
    hasher.update(content)
    return FileRecord(name, len(content), hasher.digests() if checksums else None)


def group_files_by_base(files: Iterable[FileRecord]) -> dict[str, dict[str, int]]:
    """Return, for each base, the names and sizes of its files."""
    bases: dict[str, dict[str, int]] = {}
    for file in files:
        if file.base:
            bases.setdefault(file.base, {})[file.name] = file.nbytes
    return bases


# JSON form


def files_json(files: Iterable[FileRecord], bases: Sequence[str]) -> list[object]:
    """Return files as JSON values.

    Args:
        files: Files to store.
        bases: Base folders, by index.
    """
    number = {url: at for at, url in enumerate(bases)}
    return [
        [f.name, f.nbytes, None if f.hashes is None else _hex(f.hashes), *([number[f.base]] if f.base else [])]
        for f in files
    ]


def _hex(hashes: Sequence[int]) -> str:
    return struct.pack(f">{len(hashes)}Q", *hashes).hex()


def arrays_json(arrays: Iterable[ArrayRecord]) -> list[object]:
    """Return arrays as JSON values, without digests."""
    return [[list(a.path), a.dtype, list(a.shape), a.rows.tolist()] for a in arrays]


def digests_json(arrays: Sequence[ArrayRecord]) -> dict[str, object]:
    """Return the JSON field with the arrays' digests; empty if there are none."""
    return {"digests": [a.digests.hex() for a in arrays]} if any(a.digests for a in arrays) else {}


def read_files(value: object, bases: Sequence[str], where: object) -> tuple[FileRecord, ...]:
    """Check and return files.

    Args:
        value: Parsed JSON.
        bases: Base folders, by index.
        where: Name of the file, for messages.

    Raises:
        FormatError: An entry does not follow the format.
        UnsafeError: A name could refer to another folder.
    """
    files = tuple(_read_file(entry, bases, where) for entry in read_list(value, "files", where))
    if len({(f.base, f.name) for f in files}) != len(files):
        raise FormatError("a file is listed twice", where=where)
    return files


def _read_file(entry: object, bases: Sequence[str], where: object) -> FileRecord:
    base = ""
    if isinstance(entry, list) and len(entry) == 4 and bases:
        base = bases[read_integer(entry[3], "files", where, below=len(bases))]
        entry = entry[:3]
    name, size, digests = read_fixed(entry, 3, "files", where)
    size = read_integer(size, "files", where, below=MAX_BYTES)
    if digests is None and base:
        raise field_error("a file of a base has no hashes", name, "hashes: nothing else says that it is the one", where)
    if digests is None:
        return FileRecord(plain_name(name, where), size, None)
    blocks = -(-size // BLOCK_BYTES)
    if not isinstance(digests, str) or len(digests) != 16 * blocks:
        raise field_error(f"the hashes of {str(name)[:200]!r} do not fit its size", "", f"{blocks} of 16 digits", where)
    try:
        hashes = struct.unpack(f">{blocks}Q", bytes.fromhex(digests))
    except (ValueError, struct.error) as error:
        raise field_error("a hash is not a hexadecimal number", digests[:40], "", where) from error
    return FileRecord(plain_name(name, where), size, hashes, base)


def read_arrays(value: object, files: int, where: object) -> tuple[ArrayRecord, ...]:
    """Check and return arrays, without digests.

    Args:
        value: Parsed JSON.
        files: Number of files.
        where: Name of the file, for messages.

    Raises:
        FormatError: An entry does not follow the format.
        UnsupportedError: A dtype is unknown to this release.
    """
    arrays = tuple(_read_array(entry, files, where) for entry in read_list(value, "arrays", where))
    check_paths([a.path for a in arrays], where)
    if len({a.path for a in arrays}) != len(arrays):
        raise FormatError("an array is listed twice", where=where)
    return arrays


def _read_array(entry: object, files: int, where: object) -> ArrayRecord:
    raw_path, dtype, raw_shape, raw_rows = read_fixed(entry, 4, "arrays", where)
    path = read_path(raw_path, where)
    shape, rows = tuple(_integers(raw_shape, where)), _integers(raw_rows, where)
    if not isinstance(dtype, str) or not is_known(dtype):
        raise UnsupportedError(f"array {dotted(path)!r} has an unknown type", where=where, found=dtype, fix=NEWER)
    require_dims(dotted(path), shape, where)
    width = 2 + 2 * len(shape)
    if len(rows) % width or (rows and max(rows[::width]) >= files):
        raise FormatError(f"the pieces of {dotted(path)!r} must be rows", where=where)
    return ArrayRecord(path, dtype, shape, rows)


def _integers(value: object, where: object) -> array[int]:
    """Return a list of integers in `[0, 2^64)`.

    `plan.coverage` checks their meaning after all fields are read.
    """
    try:
        found: array[int] = array("Q", read_list(value, "numbers", where))
    except (TypeError, OverflowError, ValueError) as error:
        raise field_error("no list of counts", value, "", where) from error
    return found


def with_digests(arrays: tuple[ArrayRecord, ...], raw: Mapping[str, Any], where: object) -> tuple[ArrayRecord, ...]:
    """Return arrays with the digests of their pieces, if stored.

    Raises FormatError for malformed digests.
    """
    if "digests" not in raw:
        return arrays
    texts = read_fixed(raw["digests"], len(arrays), "digests", where)
    return tuple(
        record._replace(digests=_read_digests(text, record, where)) for record, text in zip(arrays, texts, strict=True)
    )


def _read_digests(text: object, record: ArrayRecord, where: object) -> bytes:
    length = 2 * DIGEST_BYTES * (len(record.rows) // record.width)
    if not isinstance(text, str) or len(text) not in (0, length):
        raise field_error(
            f"the digests of {dotted(record.path)!r} do not fit its pieces", "", f"{length} digits", where
        )
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise field_error("a digest is not a hexadecimal number", text[:40], "", where) from error
