"""Records of a native step's files, arrays and base folders, and their form in JSON.

Pieces are stored as concatenated integer rows, `[file, offset, *box offset, *box size]`, since a manifest may have a
million of them.
"""

from __future__ import annotations

import os
import re
import reprlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import bits, is_known
from shardckpt.encodings.budget import check_paths
from shardckpt.encodings.safetensors import MAX_DIMS, require_dims
from shardckpt.encodings.typed_json import OMITTED, UNSTORED, JsonForm, decode, must_be
from shardckpt.encodings.value_stats import STATS_BYTES
from shardckpt.errors import FormatError, UnsafeError, UnsupportedError, UsageError
from shardckpt.manifest import Path, Piece, Span, dotted
from shardckpt.native.payload import BLOCK_BYTES, GROUP_BYTES, HASH_BYTES, VERSION, BlockHasher, group_hashes
from shardckpt.storage.resolve_url import local_path

MAX_BYTES = 1 << 62  # upper limit of a stated file size, larger than any real file

NEWER = "Read it with a newer release of shardckpt."

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")

FEATURE = "bases"  # feature in `COMMIT` that a reader needs if files of the step are in other folders

_SIBLING = re.compile(r"\.\./([^/\0]+)")
_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
_HOST = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.\-]*::)*[A-Za-z][A-Za-z0-9+.\-]*://[^/]*)(?!.*::)", re.DOTALL)
_LONGEST = 4096


def plain_name(value: object, where: object = "") -> str:
    """Return a file's name if it is directly in the step's folder."""
    if not isinstance(value, str) or not _PLAIN_NAME.fullmatch(value):
        raise UnsafeError("this name is not a file's in the step's folder", where=where, found=format_value(value))
    return value


def _require_version(value: object) -> int:
    """Refuse every version but ours, whatever form it has: a step that we cannot read is never taken for damaged."""
    if type(value) is not int or value != VERSION:
        found = format_value(value)
        what = f"this step has version {found} of the format"
        raise UnsupportedError(what, found=found, expected=VERSION, fix=NEWER)
    return value


def _read_dtype(value: object) -> str:
    if not isinstance(value, str) or not is_known(value):
        raise UnsupportedError("an array has an unknown type", found=format_value(value), fix=NEWER)
    return value


def _read_numbers(value: Any) -> array[int]:
    """Return integers in `[0, 2^64)`; `plan.coverage` checks their meaning."""
    try:
        return array("Q", value if type(value) is list else [None])
    except (TypeError, OverflowError) as error:
        raise must_be("a list of counts", value) from error


def format_value(value: object) -> str:
    """Return a value for a message, shortened if it is long."""
    return value if isinstance(value, str) else reprlib.repr(value)  # reprlib shortens before it formats


# Forms of fields

if TYPE_CHECKING:
    _Array = array[int]
else:
    _Array = array  # no generic class at run time
Version = Annotated[int, JsonForm(_require_version)]
SaveId = Annotated[str, re.compile("[0-9a-z]{1,64}")]
Sha256 = Annotated[str, re.compile("[0-9a-f]{64}")]
FileName = Annotated[str, JsonForm(plain_name)]
Dtype = Annotated[str, JsonForm(_read_dtype)]
Count = Annotated[int, range(MAX_BYTES)]
Numbers = Annotated[_Array, JsonForm(_read_numbers, array.tolist)]
Counts = Annotated[Shape, JsonForm(lambda value: tuple(_read_numbers(value)), list)]


DIGEST_BYTES = 16  # bytes of a chunk's xxh3-128

# Maximum bytes for block hashes in a manifest, enough for 512 GiB: every rank reads it. Then groups share hashes.
MAX_HASH_BYTES = 1 << 25

# Maximum bytes for statistics in a manifest, enough for half a million pieces: every rank reads it.
MAX_STATS_BYTES = 1 << 25


class FileRecord(NamedTuple):
    """One file with the step's bytes."""

    name: str  # name in its folder
    nbytes: int  # size in bytes
    hashes: bytes | None  # hashes of its blocks or groups, big-endian, back to back; None if not computed
    base: str = ""  # reference of the step to the file's folder; empty for the step's own folder

    @property
    def is_grouped(self) -> bool:
        """Whether groups share a hash, by the hash count; a file with one block has the same either way."""
        return self.hashes is not None and len(self.hashes) != _count_hash_bytes(self.nbytes, BLOCK_BYTES)

    def with_groups(self) -> FileRecord:
        """Return the file with group hashes."""
        return self if self.hashes is None or self.is_grouped else self._replace(hashes=group_hashes(self.hashes))

    @property
    def place(self) -> str:
        """The file's name in the store of the step's reader."""
        return f"{self.base}/{self.name}" if self.base else self.name


class ArrayRecord(NamedTuple):
    """One array in a step."""

    path: Path  # path in the saved state
    dtype: Dtype  # dtype in torch's spelling
    shape: Counts
    rows: Numbers  # for each piece: file index, byte offset, box offset, box size
    digests: Annotated[bytes, UNSTORED] = b""  # concatenated xxh3-128 of the pieces; empty if not computed
    stats: Annotated[bytes, UNSTORED] = b""  # concatenated packed statistics of the pieces; empty if not computed

    @property
    def width(self) -> int:
        """Integers in one row."""
        return 2 + 2 * len(self.shape)

    def pieces(self, places: Sequence[str]) -> tuple[Piece, ...]:
        """Return the pieces, with their boxes' byte ranges."""
        rows, n, width, element = self.rows.tolist(), 2 + len(self.shape), self.width, bits(self.dtype)
        found = []
        for at in range(0, len(rows), width):
            box = Box(tuple(rows[at + 2 : at + n]), tuple(rows[at + n : at + width]))
            span = Span(rows[at + 1], (prod(box.size) * element + 7) // 8)
            found.append(Piece(box, places[rows[at]], span))
        return tuple(found)

    def boxes(self) -> list[Box]:
        """Return the pieces' boxes."""
        rows, n, width = self.rows.tolist(), 2 + len(self.shape), self.width
        starts = range(0, len(rows), width)
        return [Box(tuple(rows[at + 2 : at + n]), tuple(rows[at + n : at + width])) for at in starts]


def make_record(name: str, content: bytes, *, checksums: bool = True) -> FileRecord:
    """Return a small file's record without arrays, such as `model.safetensors.index.json`."""
    # Append such records after the files of `merge_partials`, since rows contain file indexes.
    hasher = BlockHasher()
    hasher.update(content)
    return FileRecord(name, len(content), hasher.digests() if checksums else None)


def group_files_by_base(files: Iterable[FileRecord]) -> dict[str, dict[str, int]]:
    """Return each base's file names and sizes."""
    bases: dict[str, dict[str, int]] = {}
    for file in files:
        if file.base:
            bases.setdefault(file.base, {})[file.name] = file.nbytes
    return bases


# JSON form


_SOME = range(1, MAX_BYTES)


class FileRow(NamedTuple):
    """A file in JSON."""

    name: FileName
    nbytes: Count
    hashes: bytes | None
    base: Annotated[Count, OMITTED] = -1  # index of its base; negative for the step's own folder


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Files and arrays in JSON."""

    files: tuple[FileRow, ...]
    arrays: tuple[ArrayRecord, ...]
    digests: Annotated[tuple[bytes, ...], _SOME, OMITTED] = ()  # for each array; empty if no array has any
    stats: Annotated[tuple[bytes, ...], _SOME, OMITTED] = ()


def build_table(files: Sequence[FileRecord], arrays: Sequence[ArrayRecord], bases: Sequence[str] = ()) -> PieceTable:
    """Return files and arrays in JSON, with group hashes if there were too many block hashes."""
    if sum(len(f.hashes or b"") for f in files) > MAX_HASH_BYTES:
        files = [f.with_groups() for f in files]
    number = {url: at for at, url in enumerate(bases)}
    return PieceTable(
        tuple(FileRow(f.name, f.nbytes, f.hashes, number.get(f.base, -1)) for f in files),
        tuple(arrays),
        tuple(a.digests for a in arrays) if any(a.digests for a in arrays) else (),
        tuple(a.stats for a in arrays) if 0 < sum(len(a.stats) for a in arrays) <= MAX_STATS_BYTES else (),
    )


def read_table(
    value: object, where: object, bases: Sequence[str] = ()
) -> tuple[tuple[FileRecord, ...], tuple[ArrayRecord, ...]]:
    """Return files and arrays from a JSON object with a table's fields, and check them."""
    table = decode(PieceTable, value, where=where, is_open=True)
    files = tuple(_check_file(row, bases, where) for row in table.files)
    if len({(f.base, f.name) for f in files}) != len(files):
        raise FormatError("a file is listed twice", where=where)
    arrays = table.arrays
    check_paths([record.path for record in arrays], where)
    if len({record.path for record in arrays}) != len(arrays):
        raise FormatError("an array is listed twice", where=where)
    for record in arrays:
        require_rows(record, len(files), where)
    if not table.digests and not table.stats:
        return files, arrays
    digests = _check_piece_data(table.digests, arrays, DIGEST_BYTES, "digests", where)
    stats = _check_piece_data(table.stats, arrays, STATS_BYTES, "stats", where)
    fields = zip(arrays, digests, stats, strict=True)
    return files, tuple(record._replace(digests=mine, stats=its) for record, mine, its in fields)


def _check_file(row: FileRow, bases: Sequence[str], where: object) -> FileRecord:
    if row.base >= 0 and (row.base >= len(bases) or row.hashes is None):
        what = f"{row.name!r} must be in a base that is listed, and have hashes"  # nothing else identifies the file
        raise FormatError(what, where=where, found=format_value(row))
    return require_hashes(FileRecord(row.name, row.nbytes, row.hashes, bases[row.base] if row.base >= 0 else ""), where)


def require_hashes(file: FileRecord, where: object) -> FileRecord:
    """Require as many hashes as a file has blocks or groups; return the file. Raises FormatError."""
    lengths = [_count_hash_bytes(file.nbytes, each) for each in (BLOCK_BYTES, GROUP_BYTES)]
    if file.hashes is not None and len(file.hashes) not in lengths:
        expected = f"{2 * lengths[0]} digits, or {2 * lengths[1]}"
        raise FormatError(f"{file.name!r} has hashes that do not fit its size", where=where, expected=expected)
    return file


def _count_hash_bytes(nbytes: int, hashed_bytes: int) -> int:
    """Return how many bytes a file's hashes have."""
    return HASH_BYTES * -(-nbytes // hashed_bytes)


def require_rows(record: ArrayRecord, files: int, where: object) -> None:
    """Require rows that fit an array's shape, and refer to some of `files` files. Raises FormatError."""
    _, _, shape, rows, *_ = record
    width = 2 + 2 * len(shape)
    if len(shape) > MAX_DIMS:
        require_dims(dotted(record.path), shape, where)
    if len(rows) % width or (rows and max(rows[::width]) >= files):
        raise FormatError(f"{dotted(record.path)!r} has pieces that are not rows", where=where)


def _check_piece_data(
    data: Sequence[bytes], arrays: Sequence[ArrayRecord], nbytes: int, name: str, where: object
) -> Sequence[bytes]:
    """Return each array's data: `nbytes` for each piece, or none."""
    if len(data or arrays) != len(arrays):
        raise FormatError(f"the field {name!r} must have an entry for each array", where=where, found=len(data))
    for record, mine in zip(arrays, data, strict=False):
        length = nbytes * (len(record.rows) // record.width)
        if len(mine) not in (0, length):
            what = f"{dotted(record.path)!r} has {name} that do not fit its pieces"
            raise FormatError(what, where=where, expected=f"{2 * length} digits")
    return data or [b""] * len(arrays)


def is_base_url(url: object) -> bool:
    """Return True if a text is a valid reference to a base folder."""
    if not isinstance(url, str) or not url or len(url) > _LONGEST or "\0" in url:
        return False
    return sibling(url) is not None or _ABSOLUTE.match(url) is not None


def sibling(url: str) -> str | None:
    """Return the name if a folder is next to the step; None for any other folder."""
    match = _SIBLING.fullmatch(url)
    return match[1] if match and match[1] not in {".", ".."} else None


def require_base_url(url: object, where: object = "") -> str:
    """Return a reference to a base. Raises UnsafeError for any other text."""
    if not isinstance(url, str) or not is_base_url(url):
        what, found = "this is not a reference to a base", url if isinstance(url, str) else reprlib.repr(url)
        raise UnsafeError(what, where=where, found=found, expected="../NAME, or absolute")
    return url


BaseUrl = Annotated[str, JsonForm(require_base_url)]


class Base(NamedTuple):
    """A folder that a step refers to."""

    # `../NAME` for a folder next to the step, so that both can be moved together; else absolute.
    url: BaseUrl
    # Id of the save that wrote the folder; empty for a checkpoint of another format.
    save: Annotated[str, re.compile("[0-9a-z]{0,64}")] = ""
    # SHA-256 of its manifest, in hexadecimal digits; empty if `save` is.
    sha256: Annotated[str, re.compile("([0-9a-f]{64})?")] = ""


def _parent(url: str) -> tuple[str, str]:
    """Return a folder's parent, with links resolved, and the folder's name there."""
    path = local_path(url)
    if path is not None:
        return os.path.split(os.path.realpath(path))
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


def resolve_base(step: str, url: str) -> str:
    """Return a base's URL."""
    require_base_url(url, step)
    name = sibling(url)
    return url if name is None else f"{_parent(step)[0].rstrip('/')}/{name}"


def refer_to(step: str, base: str) -> str:
    """Return how a step refers to a base."""
    here, there = _parent(step), _parent(base)
    if here == there:
        raise UsageError("a step cannot be its own base", where=step, fix="Save to another folder.")
    if here[0] == there[0] and there[1]:
        return f"../{there[1]}"
    return base if local_path(base) is None else os.path.join(*there)


def is_same_folder(one: str, other: str) -> bool:
    """Return True if two URLs are the same folder."""
    return bool(one and other) and _parent(one) == _parent(other)


def may_open(step: str, folder: str) -> bool:
    """Return True if a folder may be opened although the caller did not name it."""
    # A step's author, who may be untrusted, chooses its references. A step behind a URL must not read local files, or
    # send requests to hosts that the caller does not use.
    try:
        here_is_local, there_is_local = local_path(step) is not None, local_path(folder) is not None
    except UsageError:  # such as `s3:/other`, which names no place
        return False
    if here_is_local or there_is_local:
        return here_is_local and there_is_local
    here, there = _HOST.match(step), _HOST.match(folder)
    return here is not None and there is not None and here[1] == there[1]
