"""Entries of zip archives are found where torch put them, and archives that lie are refused."""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardckpt.encodings import zip_archive
from shardckpt.encodings.zip_archive import (
    ArchivePlace,
    WantedEntry,
    ZipArchive,
    ZipEntry,
    locate,
    open_archives,
    read_entries,
    walk_front,
)
from shardckpt.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    ShardckptError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import Read
from tests.kit.damage.damage import change_bytes


class CountingStore(LocalStore):
    """Counts batches of reads, and bytes."""

    batches = 0
    nbytes = 0

    def read(self, reads) -> None:
        self.batches += bool(reads)
        self.nbytes += sum(len(r.buffer) for r in reads)
        super().read(reads)


def torch_archive(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def zipped(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def opened(folder: Path, raw: bytes) -> tuple[LocalStore, ZipArchive]:
    (folder / "a.zip").write_bytes(raw)
    store = LocalStore(str(folder))
    return store, open_archives(store, [ArchivePlace("a.zip", 0, len(raw))])[0]


def contents(store: LocalStore, archive: ZipArchive) -> dict[str, bytes]:
    wanted = [WantedEntry(archive.place.file, entry) for entry in archive.entries.values()]
    return dict(zip(archive.entries, read_entries(store, wanted, most=1 << 24), strict=True))


@pytest.mark.parametrize("count", [1, 3, 200])
def test_entries_of_torch_are_those_that_zipfile_finds(tmp_path: Path, count: int) -> None:
    raw = torch_archive({f"t{i}": torch.arange(float(i + 1)) for i in range(count)} | {"empty": torch.zeros(0)})
    store, archive = opened(tmp_path, raw)
    with zipfile.ZipFile(io.BytesIO(raw)) as expected:
        assert contents(store, archive) == {n: expected.read(n) for n in expected.namelist()}
    starts = locate(store, [WantedEntry("a.zip", e) for e in archive.entries.values()])
    for entry, start in zip(archive.entries.values(), starts, strict=True):
        assert zlib.crc32(raw[start : start + entry.size]) == entry.crc32


def test_deflated_entries_and_comments_are_read(tmp_path: Path) -> None:
    raw = zipped({"a/x": b"hello" * 100, "a/y": b""}, zipfile.ZIP_DEFLATED)
    store, archive = opened(tmp_path, raw[:-2] + b"\x05\0five!")
    assert contents(store, archive) == {"a/x": b"hello" * 100, "a/y": b""}


def test_many_archives_back_to_back_take_few_batches_of_reads(tmp_path: Path) -> None:
    slices = [torch_archive(torch.full((i + 1,), float(i))) for i in range(50)]
    (tmp_path / "s").write_bytes(b"".join(slices))
    store = CountingStore(str(tmp_path))
    offsets = [sum(map(len, slices[:i])) for i in range(50)]
    archives = open_archives(store, [ArchivePlace("s", o, len(s)) for o, s in zip(offsets, slices, strict=True)])
    starts = locate(store, [WantedEntry("s", a.entries["archive/data/0"]) for a in archives])
    assert store.batches == 2
    raw = b"".join(slices)
    for i, start in enumerate(starts):
        assert raw[start : start + 4 * (i + 1)] == struct.pack("<f", i) * (i + 1)


def test_the_front_of_an_archive_is_read_with_its_directory(tmp_path: Path) -> None:
    slices = [torch_archive(torch.full((i + 600,), float(i))) for i in range(50)]
    (tmp_path / "s").write_bytes(b"".join(slices))
    store = CountingStore(str(tmp_path))
    archives = open_archives(store, [*places("s", slices)], front_bytes=1 << 10)
    wanted = [WantedEntry("s", a.entries["archive/data.pkl"], a) for a in archives]
    pickles = read_entries(store, wanted, most=1 << 12)
    starts = locate(store, [WantedEntry("s", a.entries["archive/data/0"], a) for a in archives])
    assert store.batches == 1
    with pytest.raises(AssertionError, match="read"):
        read_entries(Closed(), [WantedEntry("s", a.entries["archive/data/0"], a) for a in archives], most=1 << 12)
    raw = b"".join(slices)
    for i, (start, pickled) in enumerate(zip(starts, pickles, strict=True)):
        assert raw[start : start + 4 * (i + 600)] == struct.pack("<f", i) * (i + 600)
        with zipfile.ZipFile(io.BytesIO(slices[i])) as expected:
            assert pickled == expected.read("archive/data.pkl")


class Closed(LocalStore):
    def __init__(self) -> None:
        super().__init__("")

    def read(self, reads) -> None:
        assert not reads, "read"


def places(file: str, archives: list[bytes]) -> Iterator[ArchivePlace]:
    """Places of archives that are back to back in a file."""
    at = 0
    for raw in archives:
        yield ArchivePlace(file, at, len(raw))
        at += len(raw)


def test_records_of_directories_of_one_layout_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, record = [], zip_archive._record
    monkeypatch.setattr(zip_archive, "_record", lambda *given: parsed.append(given) or record(*given))
    slices = [torch_archive(torch.full((100 + i,), float(i))) for i in range(50)]
    (tmp_path / "s").write_bytes(b"".join(slices))
    found = open_archives(LocalStore(str(tmp_path)), [*places("s", slices)])
    assert len(parsed) == len(found[0].entries) > 3
    assert [archive.entries["archive/data/0"].size for archive in found] == [4 * (100 + i) for i in range(50)]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_each_of_many_archives_has_the_entries_or_the_error_that_it_has_alone(tmp_path: Path, method: int) -> None:
    first = zipped({"a/data.pkl": b"1234", "a/b": b"", "a/data/0": bytes(40)}, method)
    other = zipped({"a/data.pkl": b"5678", "a/b": b"x" * 9, "a/data/0": bytes(77)}, method)
    third = zipped({"a/data.pkl": b"5678", "a/c": b"x" * 9, "a/data/0": bytes(77)}, method)
    ways = set()
    start = other.index(b"PK\x01\x02")
    for at, change in [(0, 0), *((at, change) for at in range(start, len(other)) for change in (1, 0xFF))]:
        changed = bytearray(other)
        changed[at] ^= change
        slices = [first, bytes(changed), third, first]
        (tmp_path / "s").write_bytes(b"".join(slices))
        store = LocalStore(str(tmp_path))
        together = outcome(store, [*places("s", slices)])
        alone = [outcome(store, [place]) for place in places("s", slices)]
        errors = [each for each in alone if isinstance(each, str)]
        assert together == (errors[0] if errors else [entry for each in alone for entry in each])
        ways.add(bool(errors))
    assert ways == {True, False}


def outcome(store: LocalStore, found: list[ArchivePlace]) -> list[dict[str, ZipEntry]] | str:
    try:
        return [archive.entries for archive in open_archives(store, found)]
    except ShardckptError as error:
        return str(error)


def test_data_are_not_read_to_find_them(tmp_path: Path) -> None:
    raw = torch_archive({"big": torch.zeros(1 << 20)})
    (tmp_path / "a").write_bytes(raw)
    store = CountingStore(str(tmp_path))
    archive = open_archives(store, [ArchivePlace("a", 0, len(raw))])[0]
    locate(store, [WantedEntry("a", e) for e in archive.entries.values()])
    assert store.nbytes < 4096


@pytest.mark.parametrize("many", [66_000])
def test_archives_with_more_entries_than_16_bits_count_are_read(tmp_path: Path, many: int) -> None:
    _, archive = opened(tmp_path, zipped({f"d/{i}": b"" for i in range(many)}))
    assert len(archive.entries) == many


def test_64_bit_sizes_are_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as writer, writer.open("a/big", "w", force_zip64=True) as entry:
        entry.write(b"payload")
    store, archive = opened(tmp_path, buffer.getvalue())
    assert contents(store, archive) == {"a/big": b"payload"}
    # The same entry, but with its true sizes only in the 64-bit extra field of the directory.
    raw = bytearray(zipped({"a": b"12345"}))
    at = raw.rindex(b"PK\x01\x02")
    extra = struct.pack("<HHQQ", 1, 16, 5, 5)
    raw[at + 20 : at + 28] = b"\xff" * 8
    raw[at + 30 : at + 32] = struct.pack("<H", len(extra))
    raw[at + 47 : at + 47] = extra
    end = raw.rindex(b"PK\x05\x06")
    raw[end + 12 : end + 16] = struct.pack("<I", 47 + len(extra))
    store, archive = opened(tmp_path, bytes(raw))
    assert contents(store, archive) == {"a": b"12345"}


def test_every_cut_is_a_truncation(tmp_path: Path) -> None:
    raw = torch_archive({"a": torch.zeros(3)})
    for end in range(0, len(raw), 7):
        with pytest.raises(TruncatedError):
            opened(tmp_path, raw[:end])


def test_a_place_beyond_the_file_is_a_truncation(tmp_path: Path) -> None:
    raw = torch_archive({"a": torch.zeros(3)})
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(TruncatedError):
        open_archives(LocalStore(str(tmp_path)), [ArchivePlace("a", 0, len(raw) + 1)])


def patched(raw: bytes, signature: bytes, offset: int, form: str, value: int, *, last: bool = True) -> bytes:
    """Return an archive in which one field of the record with a signature was replaced."""
    changed = bytearray(raw)
    at = (raw.rindex(signature) if last else raw.index(signature)) + offset
    struct.pack_into(form, changed, at, value)
    return changed


CENTRAL, END, END64, LOCATOR, LOCAL = b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"PK\x03\x04"


@pytest.mark.parametrize(
    ("signature", "offset", "form", "value"),
    [
        (END, 12, "<I", 1),
        (END, 16, "<I", 1),
        (END, 10, "<H", 1),
        (END, 4, "<H", 3),
        (END64, 4, "<Q", 1 << 40),
        (END64, 24, "<Q", 1 << 60),
        (END64, 32, "<Q", 1 << 60),
        (END64, 40, "<Q", 1 << 60),
        (END64, 48, "<Q", 1 << 62),
        (LOCATOR, 8, "<Q", 1 << 50),
        (CENTRAL, 0, "<I", 0),
        (CENTRAL, 10, "<H", 99),
        (CENTRAL, 20, "<I", 1 << 20),
        (CENTRAL, 24, "<I", 1 << 20),
        (CENTRAL, 28, "<H", 0),
        (CENTRAL, 28, "<H", 60_000),
        (CENTRAL, 30, "<H", 60_000),
        (CENTRAL, 42, "<I", 5),
        (CENTRAL, 42, "<I", 1 << 30),
        (CENTRAL, 42, "<I", 0),
        (CENTRAL, 8, "<H", 1),
        (LOCAL, 0, "<I", 0),
        (LOCAL, 26, "<H", 60_000),
        (LOCAL, 28, "<H", 60_000),
        (LOCAL, 8, "<H", 8),
    ],
)
def test_a_field_that_lies_is_a_typed_error(
    tmp_path: Path, signature: bytes, offset: int, form: str, value: int
) -> None:
    raw = patched(torch_archive({"a": torch.zeros(300)}), signature, offset, form, value)
    with pytest.raises(CheckpointError):
        contents(*opened(tmp_path, raw))


def test_local_sizes_that_contradict_the_directory_are_refused(tmp_path: Path) -> None:
    raw = zipped({"a": b"12345"})
    with pytest.raises(FormatError, match="contradicts"):
        contents(*opened(tmp_path, patched(raw, LOCAL, 22, "<I", 4)))
    with pytest.raises(FormatError, match="wrong size"):
        bomb = zipped({"a": b"0" * 4000}, zipfile.ZIP_DEFLATED)
        contents(*opened(tmp_path, patched(patched(bomb, LOCAL, 22, "<I", 400), CENTRAL, 24, "<I", 400)))


def test_entries_that_share_bytes_are_refused(tmp_path: Path) -> None:
    raw = patched(zipped({"a": b"12345", "b": b"12345"}), CENTRAL, 42, "<I", 0)
    with pytest.raises(FormatError, match="overlap"):
        opened(tmp_path, raw)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("x", b"1")
            archive.writestr("x", b"2")
    with pytest.raises(FormatError, match="one name"):
        opened(tmp_path, buffer.getvalue())


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../b", "..", "a\\b"])
def test_names_that_leave_the_archive_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafeError, match="leaves"):
        opened(tmp_path, zipped({name: b""}))


def test_a_changed_byte_fails_its_checksum(tmp_path: Path) -> None:
    raw = zipped({"a": b"12345"}).replace(b"12345", b"12346")
    with pytest.raises(ChecksumError):
        contents(*opened(tmp_path, raw))


def test_bombs_and_strange_methods_are_refused(tmp_path: Path) -> None:
    store, archive = opened(tmp_path, zipped({"a": bytes(1 << 22)}, zipfile.ZIP_DEFLATED))
    with pytest.raises(UnsafeError, match="too large"):
        read_entries(store, [WantedEntry("a.zip", archive.entries["a"])], most=1 << 20)
    with pytest.raises(FormatError, match="impossible sizes"):
        opened(tmp_path, patched(zipped({"a": b"x" * 99}, zipfile.ZIP_DEFLATED), CENTRAL, 24, "<I", 1 << 30))
    with pytest.raises(UnsupportedError, match="method 14"):
        contents(*opened(tmp_path, zipped({"a": b"x" * 99}, zipfile.ZIP_LZMA)))


def test_a_changed_byte_is_read_or_a_typed_error(tmp_path: Path) -> None:
    raw = torch_archive({"a": torch.zeros(3), "b": torch.ones(2)})
    for changed in change_bytes(raw, 400, seed=3):
        try:
            contents(*opened(tmp_path, changed))
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_the_front_of_an_archive_is_enough_to_find_its_data() -> None:
    raw = torch_archive(torch.arange(1000.0))
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        expected = {n: archive.read(n) for n in archive.namelist()}
    start = raw.index(expected["archive/data/0"])
    for end in (start, start + 10, len(raw)):
        front = walk_front(raw[:end], lambda name: name.endswith("/data/0"), where="x")
        assert (front.name, front.start) == ("archive/data/0", start)
        assert front.contents["archive/data.pkl"] == expected["archive/data.pkl"]
        assert front.contents["archive/byteorder"] == b"little"
    for end in range(0, start, 5):
        with pytest.raises(TruncatedError):
            walk_front(raw[:end], lambda name: name.endswith("/data/0"), where="x")


def test_a_descriptor_inside_the_data_does_not_end_them() -> None:
    inner = b"PK\x07\x08" + struct.pack("<III", 1, 4, 4) + b"PK\x03\x04"
    raw = torch_archive({"text": "xxxx", "decoy": inner.decode("latin-1"), "t": torch.zeros(2)})
    front = walk_front(raw, lambda name: name.endswith("/data/0"), where="x")
    assert front.start == locate_with_zipfile(raw, "archive/data/0")


def locate_with_zipfile(raw: bytes, name: str) -> int:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        header = archive.getinfo(name).header_offset
    n, extra = struct.unpack_from("<HH", raw, header + 26)
    return header + 30 + n + extra


def test_a_front_that_is_no_archive_is_a_format_error() -> None:
    with pytest.raises(FormatError):
        walk_front(b"\0" * 100, lambda name: True, where="x")
    with pytest.raises(FormatError):
        walk_front(torch_archive({}), lambda name: name == "nowhere", where="x")


def test_reads_have_the_sizes_asked_for(tmp_path: Path) -> None:
    raw = zipped({"a": b"12345"})
    store, archive = opened(tmp_path, raw)
    buffer = bytearray(5)
    store.read([Read("a.zip", locate(store, [WantedEntry("a.zip", archive.entries["a"])])[0], memoryview(buffer))])
    assert buffer == b"12345"
