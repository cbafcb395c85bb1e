"""Temporary names: who owns one, on this machine and on others, and what may be removed."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardckpt.errors import TargetExistsError
from shardckpt.storage import local_publication, orphans
from shardckpt.storage.local import LocalStore
from shardckpt.storage.orphans import OLD, PARTIAL
from shardckpt.storage.publish import publish
from shardckpt.storage.resolve_url import kind, open_store
from shardckpt.storage.store import read_bytes
from tests.kit.stores.clocks import clock_jumps, days_pass
from tests.kit.stores.kinds import FOLDER


def lock_first(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let another user, who may read, lock temporary files and folders before their maker; return the descriptors."""
    flock, taken = fcntl.flock, list[int]()

    def late(fd: int, operation: int) -> None:
        assert operation & fcntl.LOCK_NB, "this waits for as long as the other user likes"
        if len(taken) < most:
            taken.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
            flock(taken[-1], fcntl.LOCK_SH)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    return taken


def machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let this process run on another machine, whose locks of folders nobody else sees."""
    monkeypatch.setattr(orphans, "read_boot_id", lambda: name)


def put(folder: str, name: str, text: str) -> None:
    with LocalStore(folder).create(name) as writer:
        writer.write(text.encode())


class TestLocks:
    @pytest.mark.parametrize("make", [orphans.make_partial, orphans.make_partial_file], ids=["folder", "file"])
    def test_a_name_that_another_user_locks_first_is_given_up_for_another(
        self, make: Callable[[str], tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken = lock_first(monkeypatch, 1)
        path, fd = make(str(tmp_path / "out"))
        assert [entry.path for entry in os.scandir(tmp_path)] == [path]
        assert orphans.take(path) is None and orphans.is_at(fd, path)
        for each in (*taken, fd):
            os.close(each)

    @pytest.mark.parametrize("make", [orphans.make_partial, orphans.make_partial_file], ids=["folder", "file"])
    def test_one_who_locks_every_name_hinders_nobody(
        self, make: Callable[[str], tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken = lock_first(monkeypatch, 1000)
        path, fd = make(str(tmp_path / "out"))
        assert [entry.path for entry in os.scandir(tmp_path)] == [path]
        assert orphans.find_orphans(str(tmp_path / "out"), PARTIAL) == []
        for each in (*taken, fd):
            os.close(each)

    def test_a_descriptor_that_a_signal_interrupts_on_close_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        close, (reads, writes) = os.close, os.pipe()

        def interrupted(fd: int) -> None:
            close(fd)
            raise InterruptedError(errno.EINTR, "Interrupted system call")

        with monkeypatch.context() as patch:
            patch.setattr(os, "close", interrupted)
            orphans.close(writes)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(writes)
        close(reads)


class TestOtherMachines:
    """Network disks, such as NFS, lock folders on one machine alone: an unlocked folder may be owned elsewhere."""

    @pytest.fixture
    def partial(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A folder into which another machine writes."""
        with monkeypatch.context() as patch:
            machine(patch, "another")
            path, fd = orphans.make_partial(str(tmp_path / "out"))
        orphans.release(fd)  # here nobody sees the lock
        put(path, "a.bin", "half")
        return path

    def test_a_save_leaves_the_files_that_another_machine_writes(self, partial: str, tmp_path: Path) -> None:
        with publish(str(tmp_path / "out"), FOLDER, overwrite=False, needed_bytes=0) as publication:
            put(publication.staging_url, "a.bin", "first")
        assert (Path(partial) / "a.bin").read_text() == "half"
        assert orphans.list_owned(str(tmp_path / "out"), PARTIAL) == [partial]

    def test_of_two_machines_that_save_to_one_new_path_one_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = str(tmp_path / "out")
        with (
            pytest.raises(TargetExistsError, match="exists already"),
            publish(target, FOLDER, overwrite=False, needed_bytes=0) as one,
        ):
            put(one.staging_url, "a.bin", "one")
            monkeypatch.setattr(orphans, "take", lambda path: os.open(path, os.O_RDONLY))  # sees no lock of the first
            machine(monkeypatch, "another")
            with publish(target, FOLDER, overwrite=False, needed_bytes=0) as other:
                put(other.staging_url, "a.bin", "other")
            monkeypatch.undo()
        assert (tmp_path / "out" / "a.bin").read_text() == "other"
        assert os.listdir(tmp_path) == ["out"]

    @pytest.mark.parametrize("days", [0.9, 1.1])
    def test_what_it_left_goes_a_day_after_the_last_change(
        self, days: float, partial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        days_pass(monkeypatch, days)
        orphans.sweep(str(tmp_path / "out"), PARTIAL)
        assert os.path.exists(partial) == (days < 1)

    def test_where_the_clock_of_the_disk_cannot_be_read_nothing_is_old(
        self, partial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_: str) -> float:
            raise OSError(errno.EROFS, "Read-only file system")

        days_pass(monkeypatch)
        monkeypatch.setattr(orphans, "_read_clock", refuse)
        assert orphans.list_owned(str(tmp_path / "out"), PARTIAL) == [partial]

    def test_a_clock_of_this_machine_that_is_ahead_makes_nothing_old(
        self, partial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock_jumps(monkeypatch)
        orphans.sweep(str(tmp_path / "out"), PARTIAL)
        assert [entry.path for entry in os.scandir(tmp_path)] == [partial]

    def test_a_file_in_it_that_changed_lately_keeps_it(
        self, partial: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changed, late = orphans._changed, os.path.join(partial, "a.bin")
        days_pass(monkeypatch, 1.1)
        monkeypatch.setattr(orphans, "_changed", lambda path: changed(path) + (path == late) * 10**14)
        orphans.sweep(str(tmp_path / "out"), PARTIAL)
        assert os.path.exists(partial)


@pytest.mark.filterwarnings("ignore:.* is missing, since the process")
class TestMovedAside:
    """Where folders cannot be exchanged, a process may be killed after it moved the old content aside."""

    @pytest.fixture
    def old(self, tmp_path: Path) -> str:
        old = orphans.sibling_path(str(tmp_path / "out"), OLD)
        put(old, "a.bin", "old")
        return old

    def test_readers_get_the_old_content_until_there_is_new(self, old: str, tmp_path: Path) -> None:
        target = str(tmp_path / "out")
        assert kind(target) == "folder"
        with pytest.warns(UserWarning, match=f"{target} is missing.* was interrupted: reading {old}"):
            store = open_store(target)
        assert read_bytes(store, "a.bin", 0, 3) == b"old"
        put(target, "a.bin", "new")
        assert read_bytes(open_store(target), "a.bin", 0, 3) == b"new"

    def test_one_by_a_relative_path_is_found_too(
        self, old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert read_bytes(open_store("out"), "a.bin", 0, 3) == b"old"

    def test_a_link_is_not_old_content(self, tmp_path: Path) -> None:
        put(str(tmp_path / "else"), "a.bin", "else")
        link = orphans.sibling_path(str(tmp_path / "out"), OLD)
        os.symlink("else", link)
        assert kind(str(tmp_path / "out")) == "missing"
        with publish(str(tmp_path / "out"), FOLDER, overwrite=False, needed_bytes=0) as publication:
            put(publication.staging_url, "a.bin", "new")
        assert not (tmp_path / "out").is_symlink() and os.path.islink(link)
        assert (tmp_path / "else" / "a.bin").read_text() == "else"

    def test_a_file_is_not_old_content(self, tmp_path: Path) -> None:
        file = Path(orphans.sibling_path(str(tmp_path / "out"), OLD))
        file.write_text("not ours")
        assert kind(str(tmp_path / "out")) == "missing"
        with publish(str(tmp_path / "out"), FOLDER, overwrite=False, needed_bytes=0) as publication:
            put(publication.staging_url, "a.bin", "new")
        assert (tmp_path / "out" / "a.bin").read_text() == "new"

    def test_one_that_cannot_be_renamed_back_stays_and_hinders_no_save(
        self, old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename = os.rename

        def refuse(source: str, target: str) -> None:
            if source == old:
                raise PermissionError(errno.EPERM, "Operation not permitted")
            rename(source, target)

        monkeypatch.setattr(os, "rename", refuse)
        with pytest.raises(ZeroDivisionError), publish(str(tmp_path / "out"), FOLDER, overwrite=True, needed_bytes=0):
            raise ZeroDivisionError
        assert read_bytes(open_store(str(tmp_path / "out")), "a.bin", 0, 3) == b"old"
        with publish(str(tmp_path / "out"), FOLDER, overwrite=True, needed_bytes=0) as publication:
            put(publication.staging_url, "a.bin", "new")
        assert read_bytes(open_store(str(tmp_path / "out")), "a.bin", 0, 3) == b"new"

    def test_no_other_process_brings_the_old_back_between_the_two_renames(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename, target = os.rename, str(tmp_path / "out")
        put(target, "a.bin", "old")

        def meanwhile(source: str, to: str) -> None:
            if to == target and PARTIAL in source:
                assert not os.path.exists(target)
                local_publication._restore(target)
                assert not os.path.exists(target), "another process has put the old content back"
            rename(source, to)

        monkeypatch.setattr(local_publication, "exchange", lambda *_: False)
        monkeypatch.setattr(os, "rename", meanwhile)
        with publish(target, FOLDER, overwrite=True, needed_bytes=0) as publication:
            put(publication.staging_url, "a.bin", "new")
        assert read_bytes(open_store(target), "a.bin", 0, 3) == b"new"
