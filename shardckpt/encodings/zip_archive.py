"""Open torch's zip archives, anywhere in files, and locate their entries. APPNOTE 6.3, including zip64.

Torch writes archives as a stream: sizes are in the central directory and after each entry, while local headers contain
zeros. An extra field in the local header aligns the data, so only this header gives the start of an entry's data.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from struct import Struct
from struct import error as StructError  # noqa: N812  # struct spells its exception in lower case
from typing import NamedTuple

from shardckpt.encodings.budget import ReadBudget, require_small
from shardckpt.errors import ChecksumError, FormatError, TruncatedError, UnsafeError, UnsupportedError
from shardckpt.storage.store import Read, Store

LOCAL_SIGNATURE = b"PK\x03\x04"
STORED, DEFLATED = 0, 8

_LOCAL = Struct("<4sHHHHHIIIHH")
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_LENGTHS, _LENGTHS_AT = Struct("<HHH"), 28  # lengths of name, extra field and comment in a directory record

_END = Struct("<4sHHHHIIH")
_END64_LOCATOR = Struct("<4sIQI")
_END64 = Struct("<4sQHHIIQQQQ")
_DESCRIPTOR, _DESCRIPTOR64 = Struct("<4sIII"), Struct("<4sIQQ")
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"

# Bytes read first from the end of an archive, local and remote: remote round trips cost more than bytes.
_TAIL = {True: 1 << 10, False: 1 << 16}

_MAX_DIRECTORY_BYTES = 1 << 28
_MAX_NAME_BYTES = 4096
_MAX_INFLATION = 1040  # maximum expansion factor of deflate

# Maximum decoded bytes of a compressed entry: torch does not compress, so a large one is probably hostile.
_MAX_INFLATED_BYTES = 1 << 26


_MAX_ENDS = 100_000  # maximum end records tried in one entry; an archive stored in another one has one for each entry

# Maximum entries in a directory whose layout is kept for the next one; a tensor's archive has up to 7.
_FEW_ENTRIES = 64

_INFLATED_COST = 16  # budget cost of each inflated byte, which is parsed without being a byte of the file


class ArchivePlace(NamedTuple):
    """An archive's byte range."""

    file: str  # file name relative to the store
    offset: int  # offset of the archive in the file
    nbytes: int  # size of the archive in bytes


class ZipEntry(NamedTuple):
    """One entry in an archive."""

    name: str  # stored name, with forward slashes
    method: int  # compression method: 0 stored, 8 deflated. Others are rejected when the entry is read
    crc32: int  # CRC-32 of the decoded bytes; 0 if torch did not compute it
    compressed: int  # number of encoded bytes
    size: int  # number of decoded bytes
    header: int  # offset of the local header in the file
    limit: int  # upper limit of the entry's end in the file: the next header, or the directory
    streamed: bool  # whether its sizes are after its data, not in the local header


@dataclass(frozen=True, slots=True)
class ZipArchive:
    """An open archive."""

    place: ArchivePlace  # file and range of the archive
    entries: dict[str, ZipEntry]  # name to entry, in the order of the directory
    front: bytes = b""  # first bytes of the archive, which were read with its directory


class WantedEntry(NamedTuple):
    """An entry to read, from an archive in a file."""

    file: str  # file name relative to the store
    entry: ZipEntry  # entry to read
    archive: ZipArchive | None = None  # archive with this entry, whose first bytes are not read again; None to read all

    def known_bytes(self, nbytes: int) -> bytes | None:
        """Return bytes from the entry's header on, if the archive's front has them all; else None."""
        if self.archive is None:
            return None
        start = self.entry.header - self.archive.place.offset
        return self.archive.front[start : start + nbytes] if start + nbytes <= len(self.archive.front) else None


def open_archives(store: Store, places: Sequence[ArchivePlace], *, front_bytes: int = 0) -> list[ZipArchive]:
    """Read several archives' directories in at most two batches."""
    most = _TAIL[store.capabilities.is_local]
    ranges = [(p.file, p.offset + p.nbytes - min(most, p.nbytes), min(most, p.nbytes)) for p in places]
    ranges += [(p.file, p.offset, min(front_bytes, p.nbytes)) for p in places]
    found = _read(store, ranges)
    tails, starts = found[: len(places)], found[len(places) :]
    ends = [_end(p, tail, _where(store, p)) for p, tail in zip(places, tails, strict=True)]
    missing = [
        (p.file, p.offset + end.start, p.nbytes - len(tail) - end.start)
        for p, tail, end in zip(places, tails, ends, strict=True)
        if end.start < p.nbytes - len(tail)
    ]
    fronts = iter(_read(store, missing))
    archives = []
    layouts: dict[tuple[int, int], _DirectoryLayout] = {}
    for p, tail, end, start in zip(places, tails, ends, starts, strict=True):
        known = p.nbytes - len(tail)
        raw = next(fronts) + tail if end.start < known else tail[end.start - known :]
        archives.append(ZipArchive(p, _entries(p, raw[: end.nbytes], end, layouts, _where(store, p)), start))
    return archives


def locate(store: Store, wanted: Sequence[WantedEntry]) -> list[int]:
    """Return where each entry's data starts in its file, in one batch."""
    heads = _read_wanted(store, wanted, [_LOCAL.size + len(w.entry.name.encode()) for w in wanted])
    return [_data_start(w, head, f"{store.url}/{w.file}") for w, head in zip(wanted, heads, strict=True)]


def read_entries(
    store: Store, wanted: Sequence[WantedEntry], *, most: int, budgets: Mapping[str, ReadBudget] | None = None
) -> list[bytes]:
    """Return small entries' decoded bytes, in one batch."""
    extents = []
    for file, entry, _ in wanted:
        accepted = most if entry.method == STORED else min(most, _MAX_INFLATED_BYTES)
        require_small(entry.name, entry.size, accepted, f"{store.url}/{file}")
        if entry.method == DEFLATED and budgets is not None:
            budgets[file].spend(_INFLATED_COST * entry.size)
        extents.append(_extent(entry))
    found = []
    for w, raw in zip(wanted, _read_wanted(store, wanted, extents), strict=True):
        where = f"{store.url}/{w.file}"
        start = _data_start(w, raw, where) - w.entry.header
        found.append(_decode(w.entry, raw[start : start + w.entry.compressed], where))
    return found


def require_known_method(entry: ZipEntry, where: str) -> None:
    """Require a supported compression method."""
    if entry.method not in (STORED, DEFLATED):
        raise UnsupportedError(
            f"{entry.name} is compressed in a way that torch does not write",
            where=where,
            found=f"zip method {entry.method}",
            expected="stored or deflated",
        )


def _where(store: Store, place: ArchivePlace) -> str:
    at = f", archive at byte {place.offset}" if place.offset else ""
    return f"{store.url}/{place.file}{at}"


def _read(store: Store, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
    buffers = [bytearray(nbytes) for _, _, nbytes in ranges]
    store.read([Read(f, o, memoryview(b)) for (f, o, _), b in zip(ranges, buffers, strict=True) if b])
    return [bytes(b) for b in buffers]


def _read_wanted(store: Store, wanted: Sequence[WantedEntry], sizes: Sequence[int]) -> list[bytes]:
    """Return the bytes from each entry's header on."""
    known = [w.known_bytes(nbytes) for w, nbytes in zip(wanted, sizes, strict=True)]
    missing = zip(wanted, sizes, known, strict=True)
    rest = iter(_read(store, [(w.file, w.entry.header, nbytes) for w, nbytes, data in missing if data is None]))
    return [next(rest) if data is None else data for data in known]


def _extent(entry: ZipEntry) -> int:
    """Return the bytes from an entry's header to its end, at most."""
    longest = _LOCAL.size + 2 * 0xFFFF + entry.compressed
    return min(entry.limit - entry.header, longest)


class _End(NamedTuple):
    """End record: directory offset in the archive, its bytes, entry count."""

    start: int
    nbytes: int
    entries: int


def _end(place: ArchivePlace, tail: bytes, where: str) -> _End:
    """Find an archive's end records."""
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0 and (len(tail) - at < _END.size or at + _END.size + _END.unpack_from(tail, at)[7] != len(tail)):
        at = tail.rfind(b"PK\x05\x06", 0, at)
    if at < 0:
        raise TruncatedError(
            "the zip archive has no end record",
            where=where,
            found=f"{place.nbytes} bytes",
            fix="It ends early, or is not a zip archive: copy it again.",
        )
    _, disk, first_disk, here, count, nbytes, start, _ = _END.unpack_from(tail, at)
    if disk not in (0, 0xFFFF) or first_disk not in (0, 0xFFFF) or here != count:
        raise UnsupportedError("the zip archive is spread over several volumes", where=where)
    end, position = _End(start, nbytes, count), place.nbytes - len(tail) + at
    wide = _end64(place, tail, at, where)
    if wide is not None:
        position -= _END64_LOCATOR.size + _END64.size
        wanted = zip((start, nbytes, count), (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFF), wide, strict=True)
        if any(narrow not in (none, full) for narrow, none, full in wanted):
            raise FormatError("the two end records of the zip archive differ", where=where, found=end, expected=wide)
        end = wide
    _check_end(end, position, where)
    return end


def _end64(place: ArchivePlace, tail: bytes, at: int, where: str) -> _End | None:
    """Return the zip64 record before the end record; None without one."""
    at -= _END64_LOCATOR.size
    if at < 0 or tail[at : at + 4] != b"PK\x06\x07":
        return None
    _, disk, position, disks = _END64_LOCATOR.unpack_from(tail, at)
    at -= _END64.size
    if at < 0 or position != place.nbytes - len(tail) + at or disk or disks != 1:
        raise FormatError("the zip64 locator points elsewhere", where=where, found=f"byte {position}")
    signature, size, _, _, disk, first_disk, here, count, nbytes, start = _END64.unpack_from(tail, at)
    if signature != b"PK\x06\x06" or size != _END64.size - 12 or disk or first_disk or here != count:
        raise FormatError("the zip64 end record is damaged", where=where)
    return _End(start, nbytes, count)


def _check_end(end: _End, position: int, where: str) -> None:
    if end.start + end.nbytes != position or end.entries * _CENTRAL.size > end.nbytes:
        raise FormatError(
            "the zip archive's directory is not where its end record says",
            where=where,
            found=f"{end.entries} entries, {end.nbytes} bytes at byte {end.start}",
            expected=f"an end at byte {position}",
        )
    require_small("the zip archive's directory", end.nbytes, _MAX_DIRECTORY_BYTES, where)


@dataclass(frozen=True, slots=True)
class _DirectoryLayout:
    """Bytes that similar archives' directories share."""

    struct: Struct
    common: tuple[tuple[bytes, ...], ...]  # the bytes in common, of all entries
    entries: tuple[ZipEntry, ...]  # the entries of the first such archive

    @classmethod
    def read(cls, raw: bytes, entries: Iterable[ZipEntry]) -> _DirectoryLayout:
        """Return the layout if a directory is valid and has these entries."""
        entries, codes, at = tuple(entries), "<", 0
        for _ in entries:
            size = sum(_LENGTHS.unpack_from(raw, at + _LENGTHS_AT))
            codes += f"12s4xIII14sI{size}s"
            at += _CENTRAL.size + size
        struct = Struct(codes)
        values = struct.unpack(raw)
        return cls(struct, (values[0::7], values[4::7], values[6::7]), entries)

    def parse(self, place: ArchivePlace, raw: bytes, end: _End) -> dict[str, ZipEntry] | None:
        """Return the entries of another directory if it is valid and has this layout; else None."""
        if len(raw) != self.struct.size:
            return None
        values = self.struct.unpack(raw)
        sizes, headers = values[3::7], values[5::7]
        if (values[0::7], values[4::7], values[6::7]) != self.common or values[2::7] != sizes:
            return None
        if 0xFFFFFFFF in sizes or 0xFFFFFFFF in headers:
            return None
        found, at = {}, place.offset
        for known, crc, size, header, limit in zip(
            self.entries, values[1::7], sizes, headers, (*headers[1:], end.start), strict=True
        ):
            name = known.name
            if header + _LOCAL.size + len(name) + size > limit:
                return None
            found[name] = ZipEntry(name, known.method, crc, size, size, at + header, at + limit, known.streamed)
        return found


def _entries(
    place: ArchivePlace, raw: bytes, end: _End, layouts: dict[tuple[int, int], _DirectoryLayout], where: str
) -> dict[str, ZipEntry]:
    """Parse a directory, by an earlier one's layout if it has the same."""
    kind = len(raw), end.entries
    layout = layouts.get(kind)
    entries = layout.parse(place, raw, end) if layout is not None else None
    if entries is None:
        entries = _parse_entries(place, raw, end, where)
        if len(entries) <= _FEW_ENTRIES:
            layouts[kind] = _DirectoryLayout.read(raw, entries.values())
    return entries


def _parse_entries(place: ArchivePlace, raw: bytes, end: _End, where: str) -> dict[str, ZipEntry]:
    """Parse a directory and compute each entry's limit."""
    records, at = [], 0
    try:
        for _ in range(end.entries):
            record, at = _record(raw, at, where)
            records.append(record)
    except StructError:
        raise FormatError("the zip archive's directory ends inside an entry", where=where) from None
    if at != len(raw):
        raise FormatError("the zip archive's directory is longer than its entries", where=where)
    borders = sorted((r.header for r in records), reverse=False)
    for a, b in pairwise([*borders, end.start]):
        if b - a < _LOCAL.size:
            raise FormatError("entries in the zip archive overlap", where=where, found=f"headers at bytes {a} and {b}")
    following = dict(pairwise([*borders, end.start]))
    entries: dict[str, ZipEntry] = {}
    for record in records:
        name, header, compressed = record.name, record.header, record.compressed
        limit = following[header]
        if name in entries:
            raise FormatError("the zip archive has two entries with one name", where=where, found=name)
        if header + _LOCAL.size + len(name) + compressed > limit:
            raise FormatError(
                f"{name} reaches into what follows it in the zip archive",
                where=where,
                found=f"{compressed} bytes after byte {header}",
                expected=f"an end before byte {limit}",
            )
        entries[name] = record._replace(header=place.offset + header, limit=place.offset + limit)
    return entries


def _record(raw: bytes, at: int, where: str) -> tuple[ZipEntry, int]:
    """Parse a directory record; return it and the next record's offset."""
    # The record's header offset is relative to the archive.
    signature, _, _, flags, method, _, _, crc, compressed, size, n, extra, comment, disk, _, _, header = (
        _CENTRAL.unpack_from(raw, at)
    )
    name_at = at + _CENTRAL.size
    stop = name_at + n + extra + comment
    if signature != b"PK\x01\x02" or stop > len(raw) or disk not in (0, 0xFFFF):
        raise FormatError("an entry in the zip archive's directory is damaged", where=where, found=f"byte {at}")
    name = _name(raw[name_at : name_at + n], where)
    if flags & 0x2041:
        raise UnsupportedError(f"{name} in the zip archive is encrypted", where=where)
    if 0xFFFFFFFF in (compressed, size, header):
        size, compressed, header = _wide(raw[name_at + n : name_at + n + extra], (size, compressed, header), where)
    if (method == STORED and compressed != size) or size > (compressed + 1) * _MAX_INFLATION:
        raise FormatError(f"{name} in the zip archive has impossible sizes", where=where, found=(compressed, size))
    return ZipEntry(name, method, crc, compressed, size, header, 0, bool(flags & 8)), stop


def _wide(extra: bytes, narrow: tuple[int, int, int], where: str) -> tuple[int, int, int]:
    """Replace fields that exceed 32 bits by the values in the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == 1:
            values = iter(Struct(f"<{length // 8}Q").unpack_from(extra[at + 4 : at + 4 + length]))
            try:
                a, b, c = (next(values) if n == 0xFFFFFFFF else n for n in narrow)
            except (StopIteration, RuntimeError, ValueError):
                break
            return a, b, c
        at += 4 + length
    raise FormatError("an entry in the zip archive lacks its 64-bit sizes", where=where)


def _name(raw: bytes, where: str) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError("a name in the zip archive is not UTF-8", where=where, found=raw[:64]) from None
    if not 0 < len(raw) <= _MAX_NAME_BYTES:
        raise FormatError("a name in the zip archive has a wrong length", where=where, found=len(raw))
    if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise UnsafeError("a name in the zip archive leaves the archive", where=where, found=name)
    return name


def _data_start(wanted: WantedEntry, head: bytes, where: str) -> int:
    """Return where an entry's data starts in the file, from its local header."""
    entry = wanted.entry
    if len(head) < _LOCAL.size:
        raise TruncatedError(f"{entry.name}: the local header ends early", where=where)
    signature, _, _, method, _, _, crc, compressed, size, n, extra = _local(head, 0)
    name = entry.name.encode()
    if signature != LOCAL_SIGNATURE or n != len(name) or head[_LOCAL.size : _LOCAL.size + n] != name:
        raise FormatError(
            f"{entry.name}: the local header is not where the directory says",
            where=where,
            found=f"byte {entry.header}",
        )
    known = (method, crc, compressed, size) == (entry.method, entry.crc32, entry.compressed, entry.size)
    wide = method == entry.method and 0xFFFFFFFF in (compressed, size)
    if not (known or wide or (entry.streamed and method == entry.method)):
        raise FormatError(
            f"{entry.name}: the local header contradicts the directory",
            where=where,
            found=f"method {method}, {compressed} of {size} bytes",
            expected=f"method {entry.method}, {entry.compressed} of {entry.size} bytes",
        )
    start = entry.header + _LOCAL.size + n + extra
    if start + entry.compressed > entry.limit:
        raise FormatError(f"{entry.name} reaches into what follows it", where=where, expected=f"byte {entry.limit}")
    return start


def _local(raw: bytes | memoryview, at: int) -> tuple[bytes, int, int, int, int, int, int, int, int, int, int]:
    found: tuple[bytes, int, int, int, int, int, int, int, int, int, int] = _LOCAL.unpack_from(raw, at)
    return found


def _decode(entry: ZipEntry, raw: bytes, where: str) -> bytes:
    require_known_method(entry, where)
    if entry.method == DEFLATED:
        inflate = zlib.decompressobj(-15)
        try:
            raw = inflate.decompress(raw, entry.size + 1)
        except zlib.error as error:
            raise FormatError(f"{entry.name} cannot be inflated: {error}", where=where) from None
    if len(raw) != entry.size:
        raise FormatError(
            f"{entry.name} decodes to a wrong size",
            where=where,
            found=f"{len(raw)} bytes",
            expected=f"{entry.size} bytes",
        )
    if entry.crc32 and zlib.crc32(raw) != entry.crc32:
        raise ChecksumError(
            f"{entry.name} differs from its checksum",
            where=where,
            found=f"{zlib.crc32(raw):08x}",
            expected=f"{entry.crc32:08x}",
            fix="Copy the file again.",
        )
    return raw


class ArchiveFront(NamedTuple):
    """The first entries in a streamed archive."""

    contents: dict[str, bytes]  # name to bytes of the entries before the wanted one
    name: str  # name of the wanted entry
    start: int  # offset of the wanted entry's data in the archive


def walk_front(front: bytes, is_wanted: Callable[[str], bool], *, where: str) -> ArchiveFront:
    """Walk a decoded archive forward to an entry, without its directory."""
    contents: dict[str, bytes] = {}
    at = 0
    while True:
        if len(front) < at + _LOCAL.size:
            raise _front_ends_early(front, where)
        signature, _, flags, method, _, _, _, _, size, n, extra = _local(front, at)
        if signature != LOCAL_SIGNATURE or method != STORED:
            raise FormatError("no stored zip entry starts here", where=where, found=f"byte {at}")
        start = at + _LOCAL.size + n + extra
        if len(front) < start:
            raise _front_ends_early(front, where)
        name = _name(front[at + _LOCAL.size : at + _LOCAL.size + n], where)
        if is_wanted(name):
            return ArchiveFront(contents, name, start)
        if name in contents:
            raise FormatError("the zip archive has two entries with one name", where=where, found=name)
        if flags & 8 and not size:
            stop, at = _find_described_end(front, start, where)
        else:
            stop = at = start + size
            if len(front) < stop:
                raise _front_ends_early(front, where)
        contents[name] = front[start:stop]


def _front_ends_early(front: bytes, where: str) -> TruncatedError:
    return TruncatedError("the archive ends early", where=where, found=f"{len(front)} bytes")


def _find_described_end(front: bytes, start: int, where: str) -> tuple[int, int]:
    """Return the end of the data at an offset, and of the record after it."""
    # The record contains size and checksum of the data; both must match.
    at = front.find(_DESCRIPTOR_SIGNATURE, start)
    view, checked, checksum = memoryview(front), start, 0
    for _ in range(_MAX_ENDS):
        if at < 0:
            break
        checksum, checked = zlib.crc32(view[checked:at], checksum), at
        for form in (_DESCRIPTOR, _DESCRIPTOR64):
            stop = at + form.size
            if stop > len(front):
                break
            _, crc, compressed, size = form.unpack_from(front, at)
            follows = front[stop : stop + 4] in (LOCAL_SIGNATURE, b"PK\x01\x02") or len(front) < stop + 4
            if compressed == size == at - start and follows and crc in (0, checksum):
                return at, stop
        at = front.find(_DESCRIPTOR_SIGNATURE, at + 1)
    if at >= 0:
        raise FormatError("an entry in the archive seems to end again and again", where=where, found=f"byte {start}")
    raise _front_ends_early(front, where)
