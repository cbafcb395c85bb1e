"""A copy is read where it stays if its writer has memory for it, and written otherwise, in the order of the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import NoSpaceError, StorageError, TargetExistsError
from shardckpt.storage.local import LocalStore, LocalWriter
from shardckpt.storage.store import Read, Store
from shardckpt.tiers.peers import copy_step

CONTENT = bytes(range(95))


class Source:
    """A file of 95 bytes, of which those from an offset cannot be read."""

    def __init__(self, lost: int = 100) -> None:
        self._lost = lost

    def read(self, reads: list[Read]) -> None:
        for name, offset, buffer in reads:
            if offset >= self._lost:
                raise StorageError("cannot read", where=name)
            buffer[:] = CONTENT[offset : offset + len(buffer)]


class MemoryWriter:
    """A writer with memory for the first bytes; the others are written behind them."""

    def __init__(self, most: int, refused: int | None = None) -> None:
        self.most, self.refused, self.used, self.memory = most, refused, 0, bytearray(100)
        self.calls: list[str] = []

    def extend(self, nbytes: int) -> memoryview | None:
        if self.used + nbytes > self.most or len(self.calls) == self.refused:
            self.refused = None
            return None
        self.calls.append("extend")
        return self._take(nbytes)

    def write(self, data: memoryview) -> None:
        self.calls.append("write")
        self._take(len(data))[:] = data

    def _take(self, nbytes: int) -> memoryview:
        self.used += nbytes
        return memoryview(self.memory)[self.used - nbytes : self.used]


@pytest.fixture(params=["ahead", "at once"])
def copy(request, monkeypatch):
    """Returns a function that copies the file by ranges of 10 bytes, read ahead on a thread, or on this one."""
    monkeypatch.setattr(copy_step, "_STEP_BYTES", 10)
    buffers = [memoryview(bytearray(10)), memoryview(bytearray(10))]
    with ThreadPoolExecutor(1) as threads:
        given = threads if request.param == "ahead" else None
        yield lambda source, writer: copy_step._copy_file(source, "file", len(CONTENT), writer, buffers, given)


@pytest.mark.parametrize("most", [0, 10, 45, 95])
def test_the_bytes_are_those_of_the_file_however_many_are_read_where_they_stay(most, copy):
    writer = MemoryWriter(most)
    copy(Source(), writer)
    assert bytes(writer.memory[: writer.used]) == CONTENT
    extended = 10 if most == 95 else most // 10
    assert writer.calls == ["extend"] * extended + ["write"] * (10 - extended)


def test_the_bytes_after_a_range_without_memory_stay_behind_it(copy):
    writer = MemoryWriter(95, refused=3)
    copy(Source(), writer)
    assert bytes(writer.memory[: writer.used]) == CONTENT


@pytest.mark.parametrize("most", [0, 95])
def test_a_range_that_cannot_be_read_ends_the_copy(most, copy):
    with pytest.raises(StorageError, match="cannot read"):
        copy(Source(lost=50), MemoryWriter(most))


STEP = "step-00000001"


def fill_disk(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Let the disk be full once a file whose name has an ending is written."""
    write = LocalWriter.write

    def refuse(self: LocalWriter, data: bytes) -> None:
        if self._path.endswith(ending) and f"/far/{STEP}/" in self._path:
            monkeypatch.setattr(os, "write", _no_space)
        write(self, data)

    monkeypatch.setattr(LocalWriter, "write", refuse)


def _no_space(fd: int, data: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def copy_to_full_disk(path: Path, full: Callable[[], None]) -> list[str]:
    """Copy a part of a step to a farther tier; return what is in the folder of the step then."""
    shardckpt.save({"w": torch.arange(4.0)}, str(path / "near" / STEP))
    full()
    with pytest.raises(NoSpaceError):
        copy_step.copy_part(LocalStore(str(path / "near")), LocalStore(str(path / "far")), STEP)
    return sorted(os.listdir(path / "far" / STEP)) if (path / "far" / STEP).exists() else []


@pytest.mark.parametrize("ending", [".safetensors", "manifest.json", "COMMIT"])
def test_a_full_disk_is_left_without_the_files_and_the_folder_of_the_copy(tmp_path, monkeypatch, ending):
    assert copy_to_full_disk(tmp_path, lambda: fill_disk(monkeypatch, ending)) == []
    assert not (tmp_path / "far" / STEP).exists()


@pytest.mark.parametrize("ending", [".safetensors", "manifest.json", "COMMIT"])
def test_a_full_disk_is_left_with_the_older_save_of_the_step(tmp_path, monkeypatch, ending):
    shardckpt.save({"w": torch.arange(4.0)}, str(tmp_path / "far" / STEP))
    older = sorted(os.listdir(tmp_path / "far" / STEP))
    assert copy_to_full_disk(tmp_path, lambda: fill_disk(monkeypatch, ending)) == older
    assert torch.equal(shardckpt.load(str(tmp_path / "far" / STEP))["w"], torch.arange(4.0))


@pytest.mark.parametrize("ending", [".safetensors", "manifest.json", "COMMIT"])
def test_a_full_disk_is_left_with_the_files_of_this_save_that_were_there_for_others(tmp_path, monkeypatch, ending):
    near, far = tmp_path / "near", tmp_path / "far"
    shardckpt.save({"w": torch.arange(4.0)}, str(near / STEP))
    copy_step.copy_part(LocalStore(str(near)), LocalStore(str(far)), STEP)
    (far / STEP / "COMMIT").unlink()  # as a removal leaves a base
    before = {path.name: path.read_bytes() for path in (far / STEP).iterdir()}
    fill_disk(monkeypatch, ending)
    with pytest.raises(NoSpaceError):
        copy_step.copy_part(LocalStore(str(near)), LocalStore(str(far)), STEP)
    assert {path.name: path.read_bytes() for path in (far / STEP).iterdir()} == before


def test_a_copy_with_a_commit_keeps_its_files_although_the_disk_fails_after_it(tmp_path, monkeypatch):
    close = LocalWriter.close

    def fail_late(self: LocalWriter) -> None:
        close(self)
        if self._path.endswith("/COMMIT") and "/far/" in self._path:
            raise NoSpaceError("cannot sync")

    found = copy_to_full_disk(tmp_path, lambda: monkeypatch.setattr(LocalWriter, "close", fail_late))
    assert len(found) == 3
    assert torch.equal(shardckpt.load(str(tmp_path / "far" / STEP))["w"], torch.arange(4.0))


class UncachedStore(LocalStore):
    """A folder that shows at once what another process has replaced."""

    def read(self, reads: Sequence[Read]) -> None:
        self.close()
        super().read(reads)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_saved_again_during_its_copy_gives_it_no_marks_of_files_that_it_lacks(tmp_path, monkeypatch, when):
    near, far = tmp_path / "near", tmp_path / "far"
    copy_files, older = copy_step._copy_files, torch.arange(4.0)
    shardckpt.save({"w": older}, near / STEP)

    def save_meanwhile(source: Store, *args: object, **options: object) -> None:
        if when == "after":
            copy_files(source, *args, **options)
        kept = {file.name: file.read_bytes() for file in (near / STEP).iterdir() if file.name != "COMMIT"}
        shardckpt.save({"w": older + 1}, near / STEP, overwrite=True)
        for name, data in kept.items():
            (near / STEP / name).write_bytes(data)
        if when == "before":
            copy_files(source, *args, **options)

    monkeypatch.setattr(copy_step, "_copy_files", save_meanwhile)
    copy_step.copy_part(UncachedStore(str(near)), LocalStore(str(far)), STEP)
    assert torch.equal(shardckpt.load(far / STEP)["w"], older)


def test_a_part_that_may_not_replace_a_step_leaves_the_files_and_marks_of_that_step(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    shardckpt.save({"w": torch.arange(4.0)}, near / STEP)
    shardckpt.save({"w": torch.arange(4.0) + 1}, far / STEP)
    before = {file.name: file.read_bytes() for file in (far / STEP).iterdir()}

    @contextmanager
    def refuse() -> Iterator[None]:
        assert len([*(far / STEP).glob("*.safetensors")]) == 2, "all files have been copied"
        raise TargetExistsError("the step was saved again meanwhile")
        yield

    with pytest.raises(TargetExistsError, match="saved again"):
        copy_step.copy_part(LocalStore(str(near)), LocalStore(str(far)), STEP, refuse)
    assert {file.name: file.read_bytes() for file in (far / STEP).iterdir()} == before


def test_files_that_a_capture_writes_during_a_copy_are_not_those_of_an_older_save(tmp_path, monkeypatch):
    near, far = tmp_path / "near", tmp_path / "far"
    shardckpt.save({"w": torch.arange(4.0)}, near / STEP)
    shardckpt.save({"w": torch.arange(4.0) + 1}, far / STEP)
    older = {file.name for file in (far / STEP).iterdir()} - {"COMMIT"}
    copy_files, later = copy_step._copy_files, "0zzzzzzzzzzzzzz-00000-00.safetensors"

    def write_meanwhile(*args: object, **options: object) -> None:
        copy_files(*args, **options)
        (far / STEP / later).write_bytes(b"x")

    monkeypatch.setattr(copy_step, "_copy_files", write_meanwhile)
    copied = copy_step.copy_part(LocalStore(str(near)), LocalStore(str(far)), STEP)
    assert {*copied.older} == older
