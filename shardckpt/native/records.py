"""Records of a native step's files, arrays and base folders, and fields in its JSON.

Pieces are stored as concatenated integer rows, `[file, offset, *box offset, *box size]`, since a manifest may have a
million of them.
"""

from __future__ import annotations

import os
import re
import reprlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.dtypes import bits, is_known
from shardckpt.encodings.budget import check_paths
from shardckpt.encodings.safetensors import require_dims
from shardckpt.encodings.value_stats import STATS_BYTES
from shardckpt.errors import FormatError, UnsafeError, UnsupportedError, UsageError
from shardckpt.manifest import Path, Piece, Span, dotted
from shardckpt.native.payload import BLOCK_BYTES, GROUP_BYTES, HASH_BYTES, VERSION, BlockHasher, group_hashes
from shardckpt.storage.resolve_url import local_path

MAX_BYTES = 1 << 62  # upper limit of a stated file size, larger than any real file

NEWER = "Read it with a newer release of shardckpt."

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SAVE = re.compile(r"[0-9a-z]{1,64}")
_SHA256 = re.compile("[0-9a-f]{64}")

FEATURE = "bases"  # feature in `COMMIT` that a reader needs if files of the step are in other folders

_SIBLING = re.compile(r"\.\./([^/\0]+)")
_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
_HOST = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.\-]*::)*[A-Za-z][A-Za-z0-9+.\-]*://[^/]*)(?!.*::)", re.DOTALL)
_LONGEST = 4096


def read_fields(value: object, kinds: Mapping[str, type], where: object) -> dict[str, Any]:
    """Return a JSON object that has the given fields."""
    if not isinstance(value, dict):
        raise field_error("not a JSON object", value, "", where)
    for name, kind in kinds.items():
        if name not in value:
            raise FormatError(f"the field {name!r} is missing", where=where)
        if not isinstance(value[name], kind):
            raise field_error(f"the field {name!r} must be a {kind.__name__}", value[name], "", where)
    return value


def read_list(value: object, name: str, where: object) -> list[Any]:
    """Return a list. Raises FormatError for any other value."""
    if not isinstance(value, list):
        raise field_error(f"{name!r} must be a list", value, "", where)
    return value


def read_fixed(value: object, length: int, name: str, where: object) -> list[Any]:
    """Return a list with a given length. Raises FormatError for any other value."""
    if not isinstance(value, list) or len(value) != length:
        raise field_error(f"invalid entry in {name!r}", value, f"a list with {length} values", where)
    return value


def read_integer(value: object, name: str, where: object, *, below: int) -> int:
    """Return an integer in `[0, below)`. Raises FormatError for any other value."""
    if type(value) is not int or not 0 <= value < below:
        raise field_error(f"invalid number in {name!r}", value, f"0 to {below - 1}", where)
    return value


def read_path(value: object, where: object) -> Path:
    """Return a path, which JSON stores as a list with texts and integers."""
    for key in read_list(value, "path", where):
        if type(key) is not str and type(key) is not int:
            raise field_error("a path must be a list with texts and integers", value, "", where)
    return tuple(value)  # type: ignore[arg-type]


def plain_name(value: object, where: object) -> str:
    """Return a file's name if it is directly in the step's folder."""
    if not isinstance(value, str) or not _PLAIN_NAME.fullmatch(value):
        raise UnsafeError("this name is not a file's in the step's folder", where=where, found=format_value(value))
    return value


def read_save(value: object, where: object) -> str:
    """Return a save's id. Raises FormatError for any other value."""
    if not isinstance(value, str) or not _SAVE.fullmatch(value):
        raise field_error("invalid save id", value, "digits and small letters", where)
    return value


def read_sha256(value: object, whose: str, where: object) -> str:
    """Return a SHA-256 in hexadecimal digits. Raises FormatError for any other value."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise field_error(f"invalid {whose}", value, "64 hexadecimal digits", where)
    return value


def require_version(value: object, where: object) -> None:
    """Refuse every version but ours, whatever form it has: a step that we cannot read is never taken for damaged."""
    if value is None:
        raise FormatError("the field 'version' is missing", where=where)
    if type(value) is not int or value != VERSION:
        found = format_value(value)
        raise UnsupportedError(
            f"this step has version {found} of the format",
            where=where,
            found=found,
            expected=VERSION,
            fix=NEWER,
        )


def format_value(value: object) -> str:
    """Return a value for a message, shortened if it is long."""
    return value if isinstance(value, str) else reprlib.repr(value)  # reprlib shortens before it formats


def field_error(what: str, found: object, expected: str, where: object) -> FormatError:
    """Return the error for a field with an unexpected value."""
    return FormatError(what, where=where, found=format_value(found), expected=expected)


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
    dtype: str  # dtype in torch's spelling
    shape: Shape
    rows: array[int]  # for each piece: file index, byte offset, box offset, box size
    digests: bytes = b""  # concatenated xxh3-128 of the pieces; empty if not computed
    stats: bytes = b""  # concatenated packed statistics of the pieces' values; empty if not computed

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


def files_json(files: Sequence[FileRecord], bases: Sequence[str]) -> list[object]:
    """Return files as JSON values, with group hashes if there were too many block hashes."""
    number = {url: at for at, url in enumerate(bases)}
    if sum(len(f.hashes or b"") for f in files) > MAX_HASH_BYTES:
        files = [f.with_groups() for f in files]
    return [
        [f.name, f.nbytes, None if f.hashes is None else f.hashes.hex(), *([number[f.base]] if f.base else [])]
        for f in files
    ]


def arrays_json(arrays: Iterable[ArrayRecord]) -> list[object]:
    """Return arrays as JSON values, without digests."""
    return [[list(a.path), a.dtype, list(a.shape), a.rows.tolist()] for a in arrays]


def digests_json(arrays: Sequence[ArrayRecord]) -> dict[str, object]:
    """Return the JSON field with the arrays' digests; empty without any."""
    return {"digests": [a.digests.hex() for a in arrays]} if any(a.digests for a in arrays) else {}


def stats_json(arrays: Sequence[ArrayRecord]) -> dict[str, object]:
    """Return the JSON field with the arrays' statistics; empty without any, or with too many."""
    if not 0 < sum(len(a.stats) for a in arrays) <= MAX_STATS_BYTES:
        return {}
    return {"stats": [a.stats.hex() for a in arrays]}


def read_files(value: object, bases: Sequence[str], where: object) -> tuple[FileRecord, ...]:
    """Check and return files."""
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
        raise field_error("a file in a base has no hashes", name, "hashes: nothing else says that it is the one", where)
    if digests is None:
        return FileRecord(plain_name(name, where), size, None)
    lengths = [2 * _count_hash_bytes(size, each) for each in (BLOCK_BYTES, GROUP_BYTES)]
    if not isinstance(digests, str) or len(digests) not in lengths:
        expected = f"{lengths[0]} digits, or {lengths[1]}"
        raise field_error(f"{str(name)[:200]!r} has hashes that do not fit its size", "", expected, where)
    return FileRecord(plain_name(name, where), size, _from_hex(digests, "a hash", where), base)


def _count_hash_bytes(nbytes: int, hashed_bytes: int) -> int:
    """Return how many bytes a file's hashes have."""
    return HASH_BYTES * -(-nbytes // hashed_bytes)


def read_arrays(value: object, files: int, where: object) -> tuple[ArrayRecord, ...]:
    """Check and return arrays, without digests."""
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
        raise FormatError(f"{dotted(path)!r} has pieces that are not rows", where=where)
    return ArrayRecord(path, dtype, shape, rows)


def _integers(value: object, where: object) -> array[int]:
    """Return a list of integers in `[0, 2^64)`; `plan.coverage` checks their meaning."""
    try:
        found: array[int] = array("Q", read_list(value, "numbers", where))
    except (TypeError, OverflowError, ValueError) as error:
        raise field_error("not a list of counts", value, "", where) from error
    return found


def with_piece_data(arrays: tuple[ArrayRecord, ...], raw: Mapping[str, Any], where: object) -> tuple[ArrayRecord, ...]:
    """Return arrays with their pieces' digests and statistics, each if stored."""

    def read(name: str, nbytes: int) -> Iterable[bytes]:
        return _read_of_pieces(raw[name], arrays, nbytes, name, where) if name in raw else [b""] * len(arrays)

    if "digests" not in raw and "stats" not in raw:
        return arrays
    fields = zip(arrays, read("digests", DIGEST_BYTES), read("stats", STATS_BYTES), strict=True)
    return tuple(record._replace(digests=digests, stats=stats) for record, digests, stats in fields)


def _read_of_pieces(
    texts: object, arrays: Sequence[ArrayRecord], nbytes: int, name: str, where: object
) -> Iterator[bytes]:
    """Yield a field's bytes for each array: `nbytes` for each piece, or none."""
    for record, text in zip(arrays, read_fixed(texts, len(arrays), name, where), strict=True):
        length = 2 * nbytes * (len(record.rows) // record.width)
        if not isinstance(text, str) or len(text) not in (0, length):
            raise field_error(
                f"{dotted(record.path)!r} has {name} that do not fit its pieces", "", f"{length} digits", where
            )
        yield _from_hex(text, f"an entry in {name!r}", where)


def _from_hex(text: str, what: str, where: object) -> bytes:
    """Return the bytes for hexadecimal digits. Raises FormatError for other text."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if 2 * len(found) != len(text):  # `fromhex` skips white space
        raise field_error(f"{what} is not a hexadecimal number", text[:40], "", where)
    return found


class Base(NamedTuple):
    """A folder that a step refers to."""

    # `../NAME` for a folder next to the step, so that both can be moved together; else absolute.
    url: str
    save: str = ""  # id of the save that wrote the folder; empty for a checkpoint of another format
    sha256: str = ""  # SHA-256 of its manifest, in hexadecimal digits; empty if `save` is


def is_base_url(url: object) -> bool:
    """Return True if a text is a valid reference to a base folder."""
    if not isinstance(url, str) or not url or len(url) > _LONGEST or "\0" in url:
        return False
    return sibling(url) is not None or _ABSOLUTE.match(url) is not None


def sibling(url: str) -> str | None:
    """Return the name if a folder is next to the step; None for any other folder."""
    match = _SIBLING.fullmatch(url)
    return match[1] if match and match[1] not in {".", ".."} else None


def _parent(url: str) -> tuple[str, str]:
    """Return a folder's parent, with links resolved, and the folder's name there."""
    path = local_path(url)
    if path is not None:
        return os.path.split(os.path.realpath(path))
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


def require_base_url(url: object, where: object) -> str:
    """Return a reference to a base. Raises UnsafeError for any other text."""
    if not isinstance(url, str) or not is_base_url(url):
        what, found = "this is not a reference to a base", url if isinstance(url, str) else reprlib.repr(url)
        raise UnsafeError(what, where=where, found=found, expected="../NAME, or absolute")
    return url


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
