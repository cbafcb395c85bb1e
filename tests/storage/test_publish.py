"""A result appears under its name whole, or not at all, whatever goes wrong on the way."""

import errno
import fcntl
import os
import shutil
import signal
import socket
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from shardckpt.errors import MissingFileError, NoSpaceError, StorageError, TargetExistsError, UsageError
from shardckpt.storage import local, local_publication, orphans, retry
from shardckpt.storage.local import LocalStore
from shardckpt.storage.orphans import sibling_path
from shardckpt.storage.publish import overlaps, publish
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import read_bytes
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.bucket import Bucket, DatedBucket
from tests.kit.stores.clocks import clock_jumps
from tests.kit.stores.disk import watched
from tests.kit.stores.kinds import FILE, FOLDER

LAST = "model.safetensors.index.json"


def put(publication, name: str, data: bytes) -> None:
    with publication.create(name) as writer:
        writer.write(data)


def publish_files(url, files: dict[str, bytes], *, overwrite=False, fail: BaseException | None = None) -> None:
    with publish(str(url), FOLDER, overwrite=overwrite, needed_bytes=100, last=LAST) as publication:
        for name, data in files.items():
            put(publication, name, data)
        if fail:
            raise fail


def publish_file(url, data: bytes, *, overwrite=False, fail: BaseException | None = None) -> None:
    with publish(str(url), FILE, overwrite=overwrite, needed_bytes=100) as publication:
        put(publication, str(url).rpartition("/")[2], data)
        if fail:
            raise fail


def content(url, folder: str = "") -> dict[str, bytes]:
    store, found = open_store(str(url)), {}
    for entry in store.list(folder):
        here = {} if entry.is_folder else {entry.name: read_bytes(store, entry.name, 0, entry.size)}
        found |= content(url, entry.name) if entry.is_folder else here
    return found


OLD = {"a.bin": b"old a", "sub/b.bin": b"old b", LAST: b"old index"}
NEW = {LAST: b"new index", "a.bin": b"new a", "c.bin": b"new c"}


@pytest.fixture(params=["disk", "bucket", "memory", "s3", "obstore"])
def target(request, tmp_path, monkeypatch):
    """A URL at which nothing lies, on every kind of store."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    if request.param == "disk":
        return str(tmp_path / "deep" / "out")
    if request.param == "obstore":
        return f"{request.getfixturevalue('obstore_s3')}/deep/out"
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_bucket')}/deep/out"
    Bucket.reset()
    return f"{request.param}://{tmp_path.name}/out"


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_new_files_that_another_process_has_removed_are_not_published_in_part(tmp_path, overwrite: bool) -> None:
    """The next file that is written makes the folder again, which has the same name and not the files before it."""
    target = tmp_path / "run" / "c"
    if overwrite:
        publish_files(target, OLD)
    with (
        pytest.raises(StorageError, match="another process removed the new files while they were written"),
        publish(str(target), FOLDER, overwrite=overwrite, needed_bytes=100, last=LAST) as publication,
    ):
        put(publication, "a.bin", b"new a")
        for path in target.parent.glob(".c.partial-*") if overwrite else [target.parent]:
            shutil.rmtree(path)
        put(publication, LAST, b"new index")
    assert (content(target) if overwrite else {}) == (OLD if overwrite else {})
    assert [path.name for path in tmp_path.glob("run/*")] == (["c"] if overwrite else [])


class TestEverywhere:
    def test_a_folder_appears_with_all_its_files(self, target):
        publish_files(target, OLD)
        assert content(target) == OLD

    def test_a_folder_without_files_is_no_error(self, target):
        publish_files(target, {})
        assert content(target) == {}

    def test_a_target_with_content_is_refused_and_untouched(self, target):
        publish_files(target, OLD)
        with pytest.raises(TargetExistsError, match="--overwrite") as caught:
            publish_files(target, NEW)
        assert caught.value.exit_code == 2
        assert content(target) == OLD

    def test_overwriting_replaces_all(self, target):
        publish_files(target, OLD)
        publish_files(target, NEW, overwrite=True)
        assert content(target) == NEW

    def test_a_folder_that_holds_results_is_never_replaced_by_one(self, target):
        for step in ("step-1", "step-2"):
            publish_files(f"{target}/{step}", OLD)
        before = content(target)
        with pytest.raises(TargetExistsError, match=r"one checkpoint of a test and.*found step-1/, step-2/"):
            publish_files(target, NEW, overwrite=True)
        assert content(target) == before

    @pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
    def test_an_exception_leaves_nothing(self, target, error):
        with pytest.raises(type(error)):
            publish_files(target, NEW, fail=error)
        assert content(target) == {}
        publish_files(target, NEW)

    @pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
    def test_an_exception_while_overwriting_leaves_the_old_whole(self, target, error):
        publish_files(target, OLD)
        with pytest.raises(type(error)):
            publish_files(target, NEW, overwrite=True, fail=error)
        assert content(target) == OLD

    def test_a_writer_left_open_by_an_exception_leaves_nothing(self, target):
        with (
            pytest.raises(ValueError, match="x"),
            publish(target, FOLDER, overwrite=False, needed_bytes=0) as publication,
            publication.create("a.bin") as writer,
        ):
            writer.write(b"123")
            raise ValueError("x")
        assert content(target) == {}

    def test_a_file_appears_and_is_replaced_only_when_asked(self, target):
        publish_file(f"{target}/x.safetensors", b"1")
        with pytest.raises(TargetExistsError):
            publish_file(f"{target}/x.safetensors", b"2")
        with pytest.raises(ValueError, match="x"):
            publish_file(f"{target}/x.safetensors", b"3", overwrite=True, fail=ValueError("x"))
        assert content(target) == {"x.safetensors": b"1"}
        publish_file(f"{target}/x.safetensors", b"4", overwrite=True)
        assert content(target) == {"x.safetensors": b"4"}

    def test_a_file_is_not_seen_before_the_end_and_not_after_an_exception(self, target):
        with pytest.raises(KeyboardInterrupt):
            publish_file(f"{target}/x.pt", b"1", fail=KeyboardInterrupt())
        assert content(target) == {}

    def test_a_folder_is_no_target_for_a_file_nor_a_file_for_a_folder(self, target):
        publish_files(target, OLD)
        with pytest.raises(TargetExistsError, match="folder"):
            publish_file(target, b"1", overwrite=True)
        with pytest.raises(TargetExistsError, match="file"):
            publish_files(f"{target}/a.bin", NEW, overwrite=True)
        assert content(target) == OLD

    def test_a_trailing_slash_changes_nothing(self, target):
        publish_files(f"{target}/", OLD)
        assert content(target) == OLD


class TestOnDisk:
    @pytest.fixture
    def target(self, tmp_path):
        return tmp_path / "deep" / "out"

    @pytest.fixture(params=["exchange", "move aside"])
    def either_way(self, request, monkeypatch):
        if request.param == "move aside":
            monkeypatch.setattr(local_publication, "exchange", lambda *_: False)

    def test_nothing_is_left_beside(self, target, either_way):
        publish_files(target, OLD)
        publish_files(target, NEW, overwrite=True)
        assert os.listdir(target.parent) == ["out"]
        with pytest.raises(ValueError, match="x"):
            publish_files(target, OLD, overwrite=True, fail=ValueError("x"))
        assert os.listdir(target.parent) == ["out"]
        assert content(target) == NEW

    def test_an_empty_folder_is_fine(self, target):
        target.mkdir(parents=True)
        publish_files(target, NEW)
        assert content(target) == NEW

    def test_folders_above_are_made_and_taken_back(self, tmp_path):
        with pytest.raises(ValueError, match="x"):
            publish_files(tmp_path / "a" / "b" / "out", NEW, fail=ValueError("x"))
        assert os.listdir(tmp_path) == []
        publish_files(tmp_path / "a" / "b" / "out", NEW)
        assert content(tmp_path / "a" / "b" / "out") == NEW

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("make", [os.mkfifo, lambda path: socket.socket(socket.AF_UNIX).bind(str(path))])
    def test_a_pipe_or_socket_is_no_target_and_stays(self, tmp_path, monkeypatch, make, overwrite):
        monkeypatch.chdir(tmp_path)  # addresses of sockets are short
        os.mkdir("old")
        (tmp_path / "old" / "a.bin").write_bytes(b"a")
        for path, kind, name in (("special", FILE, "a"), ("old", FOLDER, "a.bin")):
            place = path if kind is FILE else f"{path}/b.bin"
            make(place)
            with (
                pytest.raises(TargetExistsError, match=r"only regular files are replaced|the target exists already"),
                publish(str(tmp_path / path), kind, overwrite=overwrite, needed_bytes=0) as publication,
                publication.create(name) as writer,
            ):
                writer.write(b"new")
            assert not os.path.isfile(place) and os.path.lexists(place)

    def test_a_link_stays_and_what_it_points_to_is_replaced(self, tmp_path):
        publish_files(tmp_path / "real", OLD)
        os.symlink("real", tmp_path / "link")
        publish_files(tmp_path / "link", NEW, overwrite=True)
        assert os.path.islink(tmp_path / "link")
        assert content(tmp_path / "real") == NEW
        (tmp_path / "real.pt").write_bytes(b"1")
        os.symlink("real.pt", tmp_path / "link.pt")
        publish_file(tmp_path / "link.pt", b"2", overwrite=True)
        assert os.path.islink(tmp_path / "link.pt")
        assert (tmp_path / "real.pt").read_bytes() == b"2"

    def test_space_is_checked_before_the_first_byte(self, target, monkeypatch):
        disk = SimpleNamespace(f_bavail=10, f_frsize=4096, f_blocks=1000)
        monkeypatch.setattr(os, "statvfs", lambda _: disk)
        with (
            pytest.raises(NoSpaceError, match="found 40960 bytes free; expected at least 40961") as caught,
            publish(str(target), FOLDER, overwrite=False, needed_bytes=40961),
        ):
            raise AssertionError("not reached")
        assert caught.value.exit_code == 3
        assert not target.parent.exists()
        with publish(str(target), FOLDER, overwrite=False, needed_bytes=40960) as publication:
            put(publication, "a.bin", b"1")

    def test_where_space_is_missing_the_files_of_killed_saves_are_named(self, target, monkeypatch):
        left = f".{target.name}.partial-0123456789ab"  # of another machine, or from before a reboot: it stays for a day
        (target.parent / left).mkdir(parents=True)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=1000))
        with (
            pytest.raises(NoSpaceError, match=rf"Free some space \({left} next to it: from a save that was killed, or"),
            publish(str(target), FOLDER, overwrite=False, needed_bytes=1),
        ):
            raise AssertionError("not reached")

    def test_a_disk_that_tells_no_space_is_written_to(self, target, monkeypatch):
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0))
        publish_files(target, NEW)
        assert content(target) == NEW

    def test_a_disk_that_fills_up_midway_leaves_nothing(self, target, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(NoSpaceError):
            publish_files(target, NEW)
        assert not target.parent.exists()

    def test_a_parent_that_cannot_be_written_is_a_storage_error(self, target, monkeypatch):
        def refuse(path, *_):
            raise PermissionError(errno.EACCES, "Permission denied", path)

        target.parent.mkdir()
        monkeypatch.setattr(os, "mkdir", refuse)
        with pytest.raises(StorageError, match="Check the permissions"):
            publish_files(target, NEW)

    def test_a_parent_that_is_a_file_is_a_storage_error(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(StorageError):
            publish_files(tmp_path / "file" / "out", NEW)

    def test_the_working_directory_and_what_holds_it_are_refused(self, target, monkeypatch):
        publish_files(target, OLD)
        monkeypatch.chdir(target)
        for url in (".", str(target), str(target.parent), "/"):
            with pytest.raises(UsageError, match="working directory"):
                publish_files(url, NEW, overwrite=True)
        assert content(target) == OLD

    def test_a_working_directory_that_was_removed_does_not_matter(self, target, tmp_path, monkeypatch):
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        publish_files(target, NEW)
        assert content(target) == NEW

    def test_a_mount_point_is_refused_before_anything_is_written(self, target, monkeypatch):
        publish_files(target, OLD)
        monkeypatch.setattr(os.path, "ismount", lambda path: path == str(target))
        with pytest.raises(UsageError, match="mount point"):
            publish_files(target, NEW, overwrite=True)

    def test_the_target_is_never_absent_where_names_can_be_exchanged(self, target, monkeypatch):
        publish_files(target, OLD)
        seen = []

        def look(name: str, args: tuple) -> None:
            seen.append(target.exists())

        with watched(look, look):
            publish_files(target, NEW, overwrite=True)
        assert len(seen) > 10
        assert all(seen)

    def test_a_run_that_finds_the_target_taken_meanwhile_gives_way(self, target):
        with (
            pytest.raises(TargetExistsError),
            publish(str(target), FOLDER, overwrite=False, needed_bytes=0) as publication,
        ):
            put(publication, "a.bin", b"late")
            publish_files(target, OLD)
        assert content(target) == OLD
        assert os.listdir(target.parent) == ["out"]

    def test_a_failure_after_the_swap_leaves_the_new(self, target, monkeypatch, either_way):
        publish_files(target, OLD)
        sync = local_publication.sync_open_folder

        def interrupted(fd):
            monkeypatch.setattr(local_publication, "sync_open_folder", sync)
            raise KeyboardInterrupt

        monkeypatch.setattr(local_publication, "sync_open_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publish_files(target, NEW, overwrite=True)
        assert content(target) == NEW
        assert os.listdir(target.parent) == ["out"]

    def test_a_swap_that_the_disk_does_not_confirm_is_told_with_what_lies_where(self, target, monkeypatch, either_way):
        publish_files(target, OLD)

        def broken(fd):
            raise OSError(errno.EIO, "broken")

        with monkeypatch.context() as patch:
            patch.setattr(local_publication, "sync_open_folder", broken)
            with pytest.raises(StorageError, match=r"new content is in place.*may bring back the old.*broken") as told:
                publish_files(target, NEW, overwrite=True)
        assert content(target) == NEW
        (beside,) = set(os.listdir(target.parent)) - {"out"}
        assert f"stays next to it as {beside};" in str(told.value)
        assert content(target.parent / beside) == OLD
        publish_files(target, OLD, overwrite=True)
        assert os.listdir(target.parent) == ["out"]

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
    def test_any_call_that_fails_is_told_or_makes_no_difference(self, target, monkeypatch, either_way, code):
        """Where an error is raised the old is in place, but for a swap that the disk does not confirm."""
        names = ("open", "close", "fsync", "rename", "mkdir", "unlink", "rmdir", "scandir", "listdir")
        seen, at, k, last = [], 0, 0, ""

        def wrap(name, whole):
            def call(*args, **kwargs):
                nonlocal at, last
                at += 1
                if at == k:
                    last = name
                    if name == "close":
                        whole(*args)
                    raise OSError(code, os.strerror(code))
                return whole(*args, **kwargs)

            return call

        while not k or last:
            k, last = k + 1, ""
            for each in target.parent.iterdir() if target.parent.exists() else ():
                orphans.remove(str(each))
            publish_files(target, OLD)
            error, at = None, 0
            with monkeypatch.context() as patch:
                for name in names:
                    patch.setattr(os, name, wrap(name, getattr(os, name)))
                try:
                    publish_files(target, NEW, overwrite=True)
                except StorageError as raised:
                    error = raised
            is_new = content(target) == NEW
            beside = set(os.listdir(target.parent)) - {"out"}
            seen.append((last, error is not None, is_new))
            if error is None or not is_new:
                assert is_new or content(target) == OLD
                assert is_new == (error is None), f"call {k}, {last}: {error}"
                assert not beside, f"call {k}, {last}, leaves {beside}"
            else:
                assert last == "fsync"
                assert "new content is in place" in str(error)
                assert len(beside) == 1
        assert len(seen) > 40
        assert seen.count(("fsync", True, True)) == 1
        assert {("close", False, True), ("open", True, False), ("unlink", False, True)} <= set(seen)

    def test_an_old_folder_in_a_fixed_layer_of_an_image_is_named_with_a_way_out(self, target, monkeypatch):
        publish_files(target, OLD)
        rename = os.rename

        def fixed(source, to, **kwargs):
            if str(source) == str(target):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            rename(source, to, **kwargs)

        monkeypatch.setattr(local_publication, "exchange", lambda *_: False)
        monkeypatch.setattr(os, "rename", fixed)
        with pytest.raises(StorageError, match=r"fixed layer.*cross-device.*Choose another target, or.*`cp -a`"):
            publish_files(target, NEW, overwrite=True)
        assert content(target) == OLD
        assert os.listdir(target.parent) == ["out"]

    def test_a_second_rename_that_fails_brings_the_old_back(self, target, monkeypatch):
        publish_files(target, OLD)
        monkeypatch.setattr(local_publication, "exchange", lambda *_: False)
        rename = os.rename

        def second_fails(source, to, **kwargs):
            if ".partial-" in str(source) and str(to) == str(target):
                raise OSError(errno.EIO, "broken")
            rename(source, to, **kwargs)

        monkeypatch.setattr(os, "rename", second_fails)
        with pytest.raises(StorageError, match="broken"):
            publish_files(target, NEW, overwrite=True)
        assert content(target) == OLD
        assert os.listdir(target.parent) == ["out"]


class TestLeftovers:
    @pytest.mark.parametrize(
        ("module", "step"),
        [(orphans, "hold"), (local_publication, "LocalStore")],
        ids=["before it is held", "once it is made"],
    )
    def test_a_signal_while_the_partial_is_made_leaves_nothing(
        self, module: ModuleType, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(folder: int | str) -> None:
            assert os.path.isdir(folder)
            raise SystemExit(143)

        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(module, step, interrupted)
        with pytest.raises(SystemExit), publish(str(tmp_path / "new" / "out"), FOLDER, overwrite=False, needed_bytes=0):
            pass
        assert list(tmp_path.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == before

    def test_a_partial_that_another_run_sweeps_away_before_it_is_held_is_made_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, swept = orphans.hold, []

        def late(fd: int) -> bool:
            if not swept:
                swept.append(os.readlink(f"/proc/self/fd/{fd}"))
                orphans.sweep(str(tmp_path / "out"), orphans.PARTIAL)
            return whole(fd)

        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(orphans, "hold", late)
        with publish(str(tmp_path / "out"), FOLDER, overwrite=False, needed_bytes=0) as publication:
            assert not os.path.exists(swept[0])
            orphans.sweep(str(tmp_path / "out"), orphans.PARTIAL)
            assert os.listdir(tmp_path) == [os.path.basename(publication.staging_url)]
            put(publication, "a.bin", b"1")
        assert len(os.listdir("/proc/self/fd")) == before

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_child_that_was_forked_meanwhile_keeps_no_leftover_alive(self, tmp_path: Path, overwrite: bool) -> None:
        target, (reads, told), (waits, ends) = tmp_path / "out", os.pipe(), os.pipe()
        if overwrite:
            publish_files(target, OLD)

        def work() -> None:
            with publish(str(target), FOLDER, overwrite=True, needed_bytes=0) as publication:
                publication.create("a.bin")
                if os.fork() == 0:  # a worker, which outlives the save
                    os.close(ends)
                    publication.rollback()
                    os.write(told, b"1")
                    os.read(waits, 1)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)

        assert is_killed(work)
        os.close(waits)
        assert os.read(reads, 1) == b"1"
        assert len(os.listdir(tmp_path)) == 1 + overwrite, "the worker removed what is not its own"
        publish_files(target, NEW, overwrite=True)
        assert os.listdir(tmp_path) == ["out"]
        assert content(target) == NEW
        for fd in (ends, told, reads):
            os.close(fd)

    @pytest.fixture
    def target(self, tmp_path):
        return tmp_path / "out"

    def leave(self, target, kind: str) -> str:
        path = sibling_path(str(target), kind)
        publish_files(path, OLD)
        return path

    @pytest.mark.parametrize("single_file", [False, True])
    def test_a_stale_partial_does_not_block_and_is_removed(self, target, single_file):
        self.leave(target, "partial")
        Path(sibling_path(str(target), "partial")).write_bytes(b"a killed writer's")
        publish_file(target, b"1") if single_file else publish_files(target, NEW)
        assert os.listdir(target.parent) == ["out"]

    def test_a_partial_that_a_process_owns_stays(self, target):
        path = self.leave(target, "partial")
        owner = os.open(path, os.O_RDONLY)
        fcntl.flock(owner, fcntl.LOCK_EX)
        publish_files(target, NEW)
        assert content(path) == OLD
        os.close(owner)
        publish_files(target, NEW, overwrite=True)
        assert os.listdir(target.parent) == ["out"]

    def test_two_runs_at_once_leave_each_others_partials_alone(self, target):
        with publish(str(target), FOLDER, overwrite=True, needed_bytes=0) as one:
            put(one, "a.bin", b"one")
            with publish(str(target), FOLDER, overwrite=True, needed_bytes=0) as other:
                put(other, "a.bin", b"other")
            assert content(target) == {"a.bin": b"other"}
        assert content(target) == {"a.bin": b"one"}
        assert os.listdir(target.parent) == ["out"]

    def test_names_that_only_look_alike_stay(self, target):
        alike = [
            ".out.partial-my notes",
            ".out.partial-backup_2026",
            ".out.partial-00000000000F",
            ".out.old-backup",
            ".out.old-deadbeef",
            ".output.partial-00000000000f",
            ".out.partial-00000000000f.x",
        ]
        for name in alike:
            (target.parent / name).mkdir()
        publish_files(target, NEW)
        assert sorted(os.listdir(target.parent)) == sorted([*alike, "out"])

    @pytest.mark.parametrize("with_empty_folder", [False, True])
    def test_the_only_copy_left_by_a_kill_between_two_renames_is_restored(self, target, with_empty_folder):
        self.leave(target, "old")
        if with_empty_folder:
            target.mkdir()
        with pytest.raises(TargetExistsError):
            publish_files(target, NEW)
        assert content(target) == OLD
        assert os.listdir(target.parent) == ["out"]

    def test_it_survives_an_overwrite_that_fails(self, target):
        self.leave(target, "old")
        with pytest.raises(ValueError, match="x"):
            publish_files(target, NEW, overwrite=True, fail=ValueError("x"))
        assert content(target) == OLD

    def test_an_old_copy_beside_a_target_is_removed(self, target):
        self.leave(target, "old")
        target.mkdir()
        (target / "a.bin").write_bytes(b"newer")
        publish_files(target, NEW, overwrite=True)
        assert content(target) == NEW
        assert os.listdir(target.parent) == ["out"]

    def test_without_locks_leftovers_stay_and_nothing_blocks(self, target, monkeypatch):
        def no_locks(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        path = self.leave(target, "partial")
        publish_files(target, NEW)
        assert content(target) == NEW
        assert content(path) == OLD


class TestWithoutRename:
    @pytest.fixture
    def target(self, monkeypatch):
        monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
        Bucket.reset()
        return "bucket://b/out"

    def test_new_names_are_needed_only_where_old_files_lie(self, target):
        with publish(target, FOLDER, overwrite=True, needed_bytes=0) as publication:
            assert publication.unique_suffix == ""
            put(publication, "a.bin", b"1")
        with publish(target, FOLDER, overwrite=True, needed_bytes=0) as one:
            put(one, "a.bin", b"1")
        with publish(target, FOLDER, overwrite=True, needed_bytes=0) as other:
            put(other, "a.bin", b"1")
        assert one.unique_suffix
        assert other.unique_suffix not in {"", one.unique_suffix}

    @pytest.mark.parametrize(("here", "there"), [(0, 0), (2, 0), (0, 2), (2, 2)])
    def test_files_of_another_save_go_when_they_are_old_by_both_clocks(
        self, here: int, there: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        DatedBucket.reset()
        monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)

        def save(prefix: str) -> None:
            with publish(
                "bucket://b/out", FOLDER, overwrite=True, needed_bytes=0, last="COMMIT", prefix=prefix
            ) as publication:
                put(publication, f"{prefix}-0.bin", b"1")
                put(publication, "COMMIT", f'["{prefix}-0.bin"]'.encode())

        save("aaaa")
        DatedBucket.objects["b/out/bbbb-0.bin"] = b"of a save under way, or of one that was killed"
        DatedBucket.dates = {"b/out/bbbb-0.bin": there}
        clock_jumps(monkeypatch, here)
        save("cccc")
        is_gone = "b/out/bbbb-0.bin" not in DatedBucket.objects
        assert is_gone == (there > 1)
        assert content("bucket://b/out").keys() >= {"COMMIT", "cccc-0.bin"}

    def test_what_a_killed_writer_left_does_not_block_and_is_removed(self, target):
        Bucket.objects["b/out/.a.bin.partial-0123456789ab"] = b"half"
        publish_files(target, NEW)
        assert content(target) == NEW

    def test_what_else_lies_in_a_bucket_is_never_replaced(self, target):
        Bucket.objects["b/thesis.txt"] = b"mine"
        with pytest.raises(TargetExistsError, match=r"found thesis\.txt"):
            publish_files("bucket://b", NEW, overwrite=True)
        assert Bucket.objects["b/thesis.txt"] == b"mine"
        with pytest.raises(UsageError, match="names no place"):
            publish_files("bucket://", NEW)

    def test_files_of_a_killed_run_are_told_from_a_whole_result(self, target):
        Bucket.objects["b/out/model-00001-of-00002.bin"] = b"1"
        with pytest.raises(TargetExistsError, match=f"but no {LAST}.*killed run.*--overwrite"):
            publish_files(target, NEW)

    def test_the_last_file_is_written_last_whenever_it_was_created(self, target):
        publish_files(target, NEW)
        puts = [path for verb, path in Bucket.requests if verb == "put"]
        assert puts[-1].endswith(LAST)
        assert len(puts) == 3

    def test_the_old_stays_complete_while_new_names_are_written_then_its_last_file_goes(self, target):
        publish_files(target, OLD)
        with publish(target, FOLDER, overwrite=True, needed_bytes=0, last=LAST) as publication:
            put(publication, LAST, b"new index")
            put(publication, "a.bin", b"new a")
            put(publication, f"model-{publication.unique_suffix}.bin", b"new model")
            assert OLD.items() <= content(target).items()
            Bucket.requests.clear()
        changes = [(verb, path.removeprefix("b/out/")) for verb, path in Bucket.requests]
        assert changes[0] == ("delete", LAST)
        assert sorted(changes[1:3]) == [("delete", "a.bin"), ("delete", "sub/b.bin")]
        assert changes[3:] == [("put", "a.bin"), ("put", LAST)]

    def test_an_error_at_the_end_deletes_what_was_written(self, target):
        publish_files(target, OLD)

        def fault(count, verb, path):
            if verb == "put" and path.endswith(LAST):
                raise PermissionError("denied")

        Bucket.fault = fault
        with pytest.raises(StorageError, match="denied"):
            publish_files(target, NEW, overwrite=True)
        Bucket.fault = None
        assert content(target) == {}


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("a", "a", True),
        ("a", "a/", True),
        ("a", "./b/../a", True),
        ("a", "a/b", True),
        ("a/b", "a", True),
        ("a", "ab", False),
        ("a", "b", False),
        ("link", "a", True),
        ("link/x", "a", True),
        ("a", "link/new", True),
        ("a/f.pt", "a/g.pt", False),
        ("file://{here}/a", "a", True),
        ("s3://b/a", "s3://b/a/", True),
        ("s3://b/a", "s3://b//a/x", True),
        ("S3://b/a/x", "s3://b/a", True),
        ("s3://b/a", "s3://b/ab", False),
        ("s3://b/a", "a", False),
        ("hf://b/a", "s3://b/a", False),
    ],
)
def test_overlapping_places_are_recognized(tmp_path, monkeypatch, source, target, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    os.symlink("a", tmp_path / "link")
    assert overlaps(source.format(here=tmp_path), target) is expected


def test_a_result_is_made_safe_before_and_after_its_rename(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(fd):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def watched_rename(source, to):
        order.append("rename")
        rename(source, to)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    publish_files(tmp_path / "out", {"sub/a.bin": b"1"})
    shown = [".out.partial" if name.startswith(".out.partial") else name for name in order]
    assert shown[0] == tmp_path.parent.name and shown[1].startswith(".a.bin.partial-")
    assert shown[2:] == ["sub", ".out.partial", "rename", tmp_path.name]


def test_a_power_failure_leaves_a_folder_whose_maker_was_killed_before_its_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    synced: list[str] = []
    fsync = os.fsync

    def watched_fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    publish_files(tmp_path / "runs" / "run" / "step-1", {"a.bin": b"1"})
    assert synced[0] == str(tmp_path / "runs")


def test_a_folder_below_one_that_cannot_be_read_takes_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    open_folder = local.open_folder

    def refuse(path: str) -> int:
        if path == str(run.parent):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open_folder(path)

    monkeypatch.setattr(local, "open_folder", refuse)
    publish_files(run / "step-1", {"a.bin": b"1"})
    assert (run / "step-1" / "a.bin").read_bytes() == b"1"


def test_a_local_store_is_what_a_local_publication_writes_to(tmp_path):
    with publish(str(tmp_path / "out"), FOLDER, overwrite=False, needed_bytes=0) as publication:
        writer = publication.create("a.bin")
        writer.copy_from(LocalStore("/proc/self"), "cmdline", 0, 3)
        writer.close()
    assert (tmp_path / "out" / "a.bin").stat().st_size == 3


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that makes no folders")
def test_a_folder_that_cannot_be_made_is_named_with_the_systems_reason():
    with pytest.raises(StorageError, match=r"^/proc/nothing: cannot make this folder; found No such file or directory"):
        publish_files("/proc/nothing/run/step-1", NEW)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that makes no folders")
def test_a_place_without_room_for_folders_is_no_missing_checkpoint() -> None:
    with pytest.raises(StorageError, match="choose another target") as caught:
        publish("/proc/no-such-target", FOLDER, overwrite=False, needed_bytes=0).__enter__()
    assert not isinstance(caught.value, MissingFileError)
    assert "incomplete" not in str(caught.value)
