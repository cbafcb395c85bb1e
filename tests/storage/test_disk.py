"""The model of a disk that loses power: what was not fsynced may be there, lack, come early or be torn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.stores.disk import PAGE, Disk, watched

Outcomes = list[dict[str, bytes]]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    (tmp_path / "old").write_bytes(b"old")
    disk = Disk(str(tmp_path))
    with watched(lambda *_: None, disk.after):
        yield disk
    disk.close()


def write(path: Path, data: bytes) -> int:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.write(fd, data)
    return fd


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def test_a_name_may_be_there_before_its_data(disk: Disk, tmp_path: Path) -> None:
    os.close(write(tmp_path / "new", b"12345678"))
    os.rename(tmp_path / "new", tmp_path / "old")
    found = list(disk.outcomes())
    for data in (b"", b"1234\0\0\0\0", b"\0\0\0\0\0\0\0\0", b"12345678"):
        assert {"old": data} in found
    assert {"old": b"old"} in found
    assert {"old": b"old", "new": b"12345678"} in found


def test_what_was_synced_is_there(disk: Disk, tmp_path: Path) -> None:
    fd = write(tmp_path / "new", b"12345678")
    os.fsync(fd)
    os.close(fd)
    assert {data for outcome in disk.outcomes() for name, data in outcome.items() if name == "new"} == {b"12345678"}
    assert {"old": b"old"} in list(disk.outcomes())
    sync(tmp_path)
    assert list(disk.outcomes()) == [{"old": b"old", "new": b"12345678"}]


def test_a_later_change_may_be_there_without_an_earlier_one(disk: Disk, tmp_path: Path) -> None:
    for name in "ab":
        os.mkdir(tmp_path / name)
        os.close(write(tmp_path / name / "x", b""))
        sync(tmp_path / name)
    assert {"old": b"old", "b/x": b""} in list(disk.outcomes())


def test_pages_are_written_in_any_order_and_torn(disk: Disk, tmp_path: Path) -> None:
    fd = write(tmp_path / "old", b"a" * 3 * PAGE)
    os.close(fd)
    found = {outcome["old"] for outcome in disk.outcomes()}
    half = PAGE // 2
    assert b"old" + b"\0" * (PAGE - 3) + b"a" * 2 * PAGE in found
    assert b"a" * 2 * PAGE + b"a" * half + b"\0" * half in found
    assert len(found) == 3**3 + 1


def test_many_changes_are_sampled_alike_each_time(disk: Disk, tmp_path: Path) -> None:
    for number in range(20):
        os.close(write(tmp_path / f"{number}", b""))
    found: list[Outcomes] = [list(disk.outcomes()) for _ in range(2)]
    assert found[0] == found[1]
    assert 60 < len(found[0]) < 200
    assert all({"old": b"old", f"{number}": b""} in found[0] for number in range(20))


def test_after_an_fsync_that_failed_no_later_one_makes_anything_safe(disk: Disk, tmp_path: Path) -> None:
    os.close(write(tmp_path / "new", b""))
    fd = os.open(tmp_path, os.O_RDONLY)
    disk.fail_sync(fd)
    os.fsync(fd)
    os.close(fd)
    assert {"old": b"old"} in list(disk.outcomes())
