"""Files in a run's memory folder: none is larger than the limits allow, and mapped bytes never change."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardckpt.errors import MissingFileError, NoSpaceError, TargetExistsError, TruncatedError
from shardckpt.storage.store import read_bytes
from shardckpt.tiers.memory import memory_store
from shardckpt.tiers.memory.memory_store import MemoryPlace, MemoryStore, name_place

RUN = "0123456789abcdef"
URL = f"shardckpt-memory://{RUN}"
SHARED = "/dev/shm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "captures"
    path.mkdir()
    return path


def open_store(folder: Path, **limits: int) -> MemoryStore:
    name_place(RUN, MemoryPlace(str(folder), **limits))
    return MemoryStore(URL)


def write(store: MemoryStore, name: str, data: bytes, **options: bool) -> None:
    with store.create(name, **options) as writer:
        writer.write(data)


def test_more_bytes_than_the_maximum_are_refused_and_the_setting_is_in_the_message(folder):
    store = open_store(folder, max_bytes=1000)
    with pytest.raises(NoSpaceError, match=r"expected at most 1000 bytes.*`max_bytes`"):
        write(store, "step-1/a", b"1" * 1001)
    assert [*folder.rglob("*")] == [folder / "step-1"], "nothing of it stays"
    write(store, "step-1/a", b"1" * 600)
    with pytest.raises(NoSpaceError):
        write(store, "step-1/b", b"1" * 401)
    write(store, "step-1/b", b"1" * 400)
    assert read_bytes(store, "step-1/b", 0, 400) == b"1" * 400 and store.size("step-1/a") == 600


def test_a_file_in_progress_counts_with_what_it_reserves(folder, monkeypatch):
    monkeypatch.setattr(memory_store, "RESERVED_BYTES", 700)
    store = open_store(folder, max_bytes=1000)
    with store.create("step-1/a") as first:
        first.write(b"1")
        with store.create("step-1/b") as second:
            with pytest.raises(NoSpaceError):
                second.write(b"1" * 301)
            second.write(b"1" * 300)
    assert [store.size(f"step-1/{name}") for name in "ab"] == [1, 300], "what is not written is given back"


def test_captures_leave_a_tenth_of_the_file_system_free(folder, monkeypatch):
    free = os.statvfs(folder)
    monkeypatch.setattr(memory_store, "FREE_PART", free.f_blocks / free.f_bavail)  # as much as is free now
    with pytest.raises(NoSpaceError, match="a tenth of their file system free"):
        write(open_store(folder), "step-1/a", b"1" * (1 << 20))


def test_free_memory_of_the_machine_and_its_groups_bounds_files_in_memory(folder, monkeypatch):
    monkeypatch.setattr(memory_store, "read_available_bytes", lambda _needed: 500)
    with pytest.raises(NoSpaceError, match="too little free memory"):
        write(open_store(folder, is_memory=True), "step-1/a", b"1" * 501)
    write(open_store(folder, is_memory=True), "step-1/a", b"1" * 500)
    write(open_store(folder), "step-1/b", b"1" * 501)


def test_a_new_file_never_replaces_another_one(folder):
    store = open_store(folder)
    write(store, "step-1/a", b"1", is_new=True)
    with pytest.raises(TargetExistsError):
        write(store, "step-1/a", b"2", is_new=True)
    before = store.version("step-1/a"), store.written_at("step-1/a")
    write(store, "step-1/a", b"3")
    assert read_bytes(store, "step-1/a", 0, 1) == b"3" and before[0] != store.version("step-1/a")
    assert store.written_at("step-1/a") >= before[1]
    store.delete("step-1/a")
    store.delete("step-1/a")
    for look in (store.size, store.version, store.written_at):
        with pytest.raises(MissingFileError):
            look("step-1/a")


def test_a_url_names_captures_of_another_process_and_an_empty_folder_without_any(memory):
    folder = memory / f"shardckpt-{os.geteuid()}" / RUN
    memory_store.PLACES.clear()
    assert MemoryStore(URL).list() == [] and MemoryStore(URL).find_kind() == "missing"
    folder.mkdir(0o700, parents=True)
    folder.parent.chmod(0o700)
    (folder / "step-1").mkdir()
    (folder / "step-1" / "a").write_bytes(b"12")
    assert [entry.name for entry in MemoryStore(URL).list()] == ["step-1"]
    assert [MemoryStore(f"{URL}/{name}").find_kind() for name in ("step-1", "step-1/a", "x")] == [
        "folder",
        "file",
        "missing",
    ]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in the machine's own shared memory."""
    if not os.path.isdir(SHARED):
        pytest.skip("the machine has no shared memory")
    with tempfile.TemporaryDirectory(dir=SHARED) as name:
        yield Path(name)


def test_a_large_range_in_memory_is_mapped_and_stays_as_it_was_when_its_file_goes(shared):
    data = os.urandom(3 << 20)
    store = open_store(shared, is_memory=True)
    write(store, "step-1/a", data)
    view = store.view("step-1/a", 5000, 2 << 20)
    assert view is not None and not view.readonly, "torch takes it without a copy"
    write(store, "step-1/a", bytes(len(data)))
    store.delete("step-1/a")
    assert view == data[5000 : 5000 + (2 << 20)]


def test_short_ranges_and_files_on_a_disk_are_read_and_none_behind_the_end(shared):
    store = open_store(shared, is_memory=True)
    write(store, "step-1/a", bytes(3 << 20))
    assert store.view("step-1/a", 0, 1000) is None
    assert open_store(shared).view("step-1/a", 0, 2 << 20) is None
    with pytest.raises(TruncatedError):
        open_store(shared, is_memory=True).view("step-1/a", 2 << 20, 2 << 20)
    with pytest.raises(MissingFileError):
        open_store(shared, is_memory=True).view("step-1/b", 0, 2 << 20)
