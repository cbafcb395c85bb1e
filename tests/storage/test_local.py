"""The store on a disk: the suite, and what only a disk can do wrong."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardckpt.errors import MissingFileError, NoSpaceError, StorageError, TruncatedError, UnsafeError
from shardckpt.storage import local
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import Read, read_bytes
from shardckpt.testing.store_suite import CONTENT, StoreSuite, put


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "root"))


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(str(tmp_path / "root"))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_removed_while_its_folder_is_listed_is_not_listed_as_an_empty_one(store, tmp_path, monkeypatch):
    for name in ("a.bin", "b.bin"):
        put(store, name, b"1")
    os.symlink("nowhere", tmp_path / "root" / "c.bin")
    scan = os.scandir

    @contextmanager
    def scan_and_remove(path: str) -> Iterator[list[os.DirEntry[str]]]:
        with scan(path) as entries:
            found = [*entries]
        (tmp_path / "root" / "a.bin").unlink()
        yield found

    monkeypatch.setattr(os, "scandir", scan_and_remove)
    assert [(entry.name, entry.size) for entry in store.list()] == [("b.bin", 1), ("c.bin", 0)]


class TestLinks:
    def test_a_link_inside_the_folder_is_followed(self, store, tmp_path):
        put(store, "a.bin", b"1")
        os.symlink("a.bin", tmp_path / "root" / "b.bin")
        assert read_bytes(store, "b.bin", 0, 1) == b"1"

    def test_removing_a_folder_removes_its_links_and_not_what_they_lead_to(self, store, tmp_path):
        put(store, "sub/a.bin")
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "b.bin").write_bytes(b"1")
        os.symlink(tmp_path / "precious", tmp_path / "root" / "sub" / "folder")
        os.symlink(tmp_path / "precious", tmp_path / "root" / "linked")
        store.delete_folder("sub")
        with pytest.raises(UnsafeError, match="link out of"):
            store.delete_folder("linked")
        assert (tmp_path / "precious" / "b.bin").read_bytes() == b"1"
        assert [entry.name for entry in store.list()] == ["linked"]

    @pytest.mark.parametrize("is_new", [True, False])
    def test_a_link_out_of_the_folder_is_refused(self, is_new, store, tmp_path):
        (tmp_path / "secret").write_bytes(b"1")
        put(store, "a.bin")
        store = store if is_new else LocalStore(str(tmp_path / "root"))
        os.symlink("../secret", tmp_path / "root" / "b.bin")
        os.symlink("..", tmp_path / "root" / "up")
        for name in ("b.bin", "up/secret"):
            with pytest.raises(UnsafeError, match="link out of"):
                read_bytes(store, name, 0, 1)
            with pytest.raises(UnsafeError):
                store.size(name)
        for ask in (lambda: store.create("up/new"), lambda: store.delete("up/secret"), lambda: store.list("up")):
            with pytest.raises(UnsafeError):
                ask()

    def test_a_link_to_a_neighbor_whose_name_begins_with_that_of_the_root_is_refused(self, store, tmp_path):
        put(LocalStore(str(tmp_path / "root-of-another")), "a.bin", b"1")
        os.makedirs(tmp_path / "root", exist_ok=True)
        os.symlink("../root-of-another/a.bin", tmp_path / "root" / "b.bin")
        os.symlink("../root-of-another", tmp_path / "root" / "sub")
        for name in ("b.bin", "sub/a.bin"):
            with pytest.raises(UnsafeError, match="link out of"):
                read_bytes(store, name, 0, 1)
        with pytest.raises(UnsafeError):
            store.delete("sub/a.bin")

    @pytest.mark.parametrize("name", ["a.bin", "sub/deep/a.bin"])
    def test_a_link_that_is_swapped_in_later_is_refused(self, name, tmp_path):
        put(LocalStore(str(tmp_path / "root")), name, b"1")
        store = LocalStore(str(tmp_path / "root"))
        first = tmp_path / "root" / name.split("/")[0]
        assert read_bytes(store, name, 0, 1) == b"1"
        store.close()
        os.rename(first, tmp_path / "moved")
        os.symlink(tmp_path / "moved", first)
        for ask in (lambda: read_bytes(store, name, 0, 1), lambda: store.size(name)):
            with pytest.raises(UnsafeError, match="link out of"):
                ask()

    def test_a_root_that_becomes_a_link_to_another_folder_is_refused(self, tmp_path):
        put(LocalStore(str(tmp_path / "root")), "a.bin", b"1")
        put(LocalStore(str(tmp_path / "other")), "a.bin", b"2")
        store = LocalStore(str(tmp_path / "root"))
        os.rename(tmp_path / "root", tmp_path / "moved")
        os.symlink("other", tmp_path / "root")
        with pytest.raises(UnsafeError, match="link out of"):
            read_bytes(store, "a.bin", 0, 1)
        os.unlink(tmp_path / "root")
        os.rename(tmp_path / "other", tmp_path / "root")
        assert read_bytes(store, "a.bin", 0, 1) == b"2", "a folder that replaces it is read"

    def test_a_link_that_goes_while_it_is_looked_at_is_a_typed_error(self, store, tmp_path, monkeypatch):
        put(store, "a.bin")
        os.symlink("a.bin", tmp_path / "root" / "b.bin")

        def vanish(path, **_):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

        monkeypatch.setattr(os.path, "realpath", vanish)  # which also reads links by functions that cannot be replaced
        with pytest.raises(MissingFileError, match=r"b\.bin: cannot follow its links"):
            store.size("b.bin")

    def test_a_path_without_links_is_not_resolved(self, tmp_path, monkeypatch):
        put(LocalStore(str(tmp_path / "root")), "sub/a.bin", b"1")
        store = LocalStore(str(tmp_path / "root"))
        monkeypatch.setattr(os.path, "realpath", None)
        assert read_bytes(store, "sub/a.bin", 0, 1) == b"1"

    def test_the_root_itself_may_be_a_link(self, store, tmp_path):
        put(store, "a.bin", b"1")
        os.symlink(tmp_path / "root", tmp_path / "link")
        assert read_bytes(LocalStore(str(tmp_path / "link")), "a.bin", 0, 1) == b"1"

    def test_deleting_or_replacing_a_link_leaves_what_it_points_to(self, store, tmp_path):
        put(store, "a.bin", b"1")
        os.symlink("a.bin", tmp_path / "root" / "b.bin")
        put(store, "b.bin", b"2")
        assert read_bytes(store, "a.bin", 0, 1) == b"1"
        os.unlink(tmp_path / "root" / "b.bin")
        os.symlink("a.bin", tmp_path / "root" / "b.bin")
        store.delete("b.bin")
        assert [entry.name for entry in store.list()] == ["a.bin"]

    def test_a_link_to_nowhere_is_listed_and_refused(self, store, tmp_path):
        os.makedirs(tmp_path / "root")
        os.symlink("gone", tmp_path / "root" / "b.bin")
        os.symlink("loop", tmp_path / "root" / "loop")
        assert [(entry.name, entry.size) for entry in store.list()] == [("b.bin", 0), ("loop", 0)]
        for name in ("b.bin", "loop"):
            with pytest.raises(UnsafeError, match="leads nowhere"):
                read_bytes(store, name, 0, 1)


class TestHuggingFaceCache:
    @pytest.fixture
    def cache(self, tmp_path) -> Path:
        repo = tmp_path / "models--org--name"
        (repo / "snapshots" / "abc").mkdir(parents=True)
        (repo / "blobs").mkdir()
        (repo / "blobs" / "f00").write_bytes(b"blob")
        os.symlink("../../blobs/f00", repo / "snapshots" / "abc" / "model.safetensors")
        return repo

    def test_links_of_a_snapshot_into_its_own_blobs_are_followed(self, cache):
        store = LocalStore(str(cache / "snapshots" / "abc"))
        assert store.size("model.safetensors") == 4
        assert read_bytes(store, "model.safetensors", 0, 4) == b"blob"

    def test_links_below_a_folder_of_a_snapshot_are_followed_too(self, cache):
        (cache / "snapshots" / "abc" / "unet").mkdir()
        os.symlink("../../../blobs/f00", cache / "snapshots" / "abc" / "unet" / "model.safetensors")
        assert read_bytes(LocalStore(str(cache / "snapshots" / "abc" / "unet")), "model.safetensors", 0, 4) == b"blob"
        assert read_bytes(LocalStore(str(cache / "snapshots" / "abc")), "unet/model.safetensors", 0, 4) == b"blob"

    def test_links_of_a_snapshot_anywhere_else_are_refused(self, cache):
        (cache.parent / "secret").write_bytes(b"1")
        os.symlink("../../../secret", cache / "snapshots" / "abc" / "x")
        os.symlink("../../refs", cache / "snapshots" / "abc" / "y")
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_bytes(b"abc")
        for name in ("x", "y/main"):
            with pytest.raises(UnsafeError):
                read_bytes(LocalStore(str(cache / "snapshots" / "abc")), name, 0, 1)

    def test_blobs_that_are_a_link_themselves_are_refused(self, cache):
        os.rename(cache / "blobs", cache.parent / "elsewhere")
        os.symlink("../elsewhere", cache / "blobs")
        with pytest.raises(UnsafeError):
            read_bytes(LocalStore(str(cache / "snapshots" / "abc")), "model.safetensors", 0, 1)


class TestOddFiles:
    def test_a_fifo_is_refused_and_does_not_block(self, store, tmp_path):
        os.makedirs(tmp_path / "root")
        os.mkfifo(tmp_path / "root" / "pipe")
        with pytest.raises(UnsafeError, match="not a regular file"):
            read_bytes(store, "pipe", 0, 1)

    def test_a_folder_cannot_be_read(self, store, tmp_path):
        os.makedirs(tmp_path / "root" / "sub")
        with pytest.raises(MissingFileError, match="folder"):
            read_bytes(store, "sub", 0, 1)

    def test_offsets_beyond_what_a_system_can_address_are_errors_of_ours(self, store):
        put(store, "a.bin")
        with pytest.raises(StorageError):
            read_bytes(store, "a.bin", 1 << 70, 1)


class TestDescriptors:
    def test_a_thousand_files_take_at_most_64_descriptors(self, store):
        for number in range(200):
            put(store, f"{number}.bin", bytes([number]))
        before = open_descriptors()
        for number in range(200):
            assert read_bytes(store, f"{number}.bin", 0, 1) == bytes([number])
        assert open_descriptors() - before == 64
        store.close()
        assert open_descriptors() == before

    def test_few_descriptors_are_left_to_others(self, store, monkeypatch):
        for number in range(30):
            put(store, str(number), b"x")
        monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
        before = open_descriptors()
        for number in range(30):
            store.open(str(number))
        assert open_descriptors() - before == 8

    def test_a_store_that_is_let_go_closes_its_files(self, tmp_path):
        store = LocalStore(str(tmp_path))
        put(store, "a.bin")
        before = open_descriptors()
        read_bytes(store, "a.bin", 0, 1)
        del store
        assert open_descriptors() == before

    def test_eviction_never_pulls_a_file_from_a_reading_thread(self, store, monkeypatch):
        monkeypatch.setattr(local, "_OPEN_FILES", 2)
        for number in range(16):
            put(store, f"{number}.bin", bytes([number]) * 1000)
        wrong = []

        def read(first: int) -> None:
            for step in range(300):
                number = (first + step * 7) % 16
                if read_bytes(store, f"{number}.bin", 0, 1000) != bytes([number]) * 1000:
                    wrong.append(number)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(4)))
        assert wrong == []


class TestFailures:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    def test_a_full_disk_is_named_and_keeps_its_number_and_cause(self, store, monkeypatch, code):
        def full(*_):
            raise OSError(code, os.strerror(code))

        writer = store.create("a.bin")
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(NoSpaceError, match=r"a\.bin") as caught:
            writer.write(b"1")
        assert caught.value.errno == code
        assert isinstance(caught.value.__cause__, OSError)
        writer.abort()
        assert store.list() == []

    @pytest.mark.parametrize("function", ["fsync", "replace"])
    def test_what_fails_at_close_leaves_nothing(self, store, monkeypatch, function):
        def broken(*_):
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(os, function, broken)
        with pytest.raises(StorageError, match="broken"), store.create("a.bin") as writer:
            writer.write(b"1")
        assert store.list() == []

    def test_a_failing_read_keeps_its_cause(self, store, monkeypatch):
        put(store, "a.bin")

        def broken(*_):
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(StorageError, match=r"a\.bin.*broken") as caught:
            read_bytes(store, "a.bin", 0, 1)
        assert caught.value.errno == errno.EIO

    def test_short_reads_are_continued(self, store, monkeypatch):
        put(store, "a.bin")
        whole = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:100]], offset))
        assert read_bytes(store, "a.bin", 5, 5000) == CONTENT[5:5005]

    @pytest.mark.parametrize("most", [1, 7, 5000])
    def test_short_reads_of_many_buffers_are_continued_where_they_ended(self, store, monkeypatch, most):
        put(store, "a.bin")
        whole = os.preadv

        def short(fd, views, offset):
            taken, left = [], most
            for view in views:
                taken.append(view[:left])
                left -= len(taken[-1])
            return whole(fd, taken, offset)

        monkeypatch.setattr(os, "preadv", short)
        buffers = [bytearray(n) for n in (3, 10, 1, 20, 5, 2)]
        starts = [0, 3, 13, 14, 40, 45]  # a hole before the fifth
        reads = [Read("a.bin", at, memoryview(b)) for at, b in zip(starts, buffers, strict=True)]
        store.read(reads[::-1])
        assert buffers == [CONTENT[at : at + len(b)] for at, b in zip(starts, buffers, strict=True)]

    def test_neighbours_are_read_by_one_call(self, store, monkeypatch):
        put(store, "a.bin")
        calls = []
        whole = os.preadv
        monkeypatch.setattr(
            os, "preadv", lambda fd, views, offset: calls.append((offset, len(views))) or whole(fd, views, offset)
        )
        buffers = [bytearray(2) for _ in range(700)]
        store.read([Read("a.bin", 2 * at, memoryview(b)) for at, b in enumerate(buffers)])
        assert b"".join(buffers) == CONTENT[:1400]
        assert calls == [(0, 512), (1024, 188)]

    def test_a_file_that_ends_in_a_run_of_buffers_is_too_short(self, store):
        put(store, "a.bin")
        end = len(CONTENT)
        with pytest.raises(TruncatedError, match=f"{end}.*{end + 2}"):
            store.read([Read("a.bin", at, memoryview(bytearray(2))) for at in range(end - 4, end + 2, 2)])

    def test_a_folder_without_permission_is_a_storage_error(self, store, monkeypatch):
        def refuse(*_):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(StorageError, match="Check the permissions"):
            store.list()


class TestCopies:
    def copied(self, store) -> bytes:
        put(store, "a.bin")
        with store.create("b.bin") as writer:
            writer.copy_from(store, "a.bin", 10, 9000)
        return read_bytes(store, "b.bin", 0, 9000)

    def test_short_reads_and_writes_are_continued(self, store, monkeypatch):
        read, write = os.preadv, os.write
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:700]], offset))
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:900]))
        assert self.copied(store) == CONTENT[10:9010]

    def test_a_copy_larger_than_its_buffer_takes_several_rounds(self, store, monkeypatch):
        monkeypatch.setattr(local, "_BUFFER", 4096)
        assert self.copied(store) == CONTENT[10:9010]

    def test_the_disk_is_asked_to_begin_before_the_end(self, store, monkeypatch):
        asked = []
        monkeypatch.setattr(local, "start_writeback", lambda fd, offset, nbytes: asked.append((offset, nbytes)))
        monkeypatch.setattr(local, "STEP_BYTES", 4096)
        monkeypatch.setattr(local, "_BUFFER", 1024)
        self.copied(store)
        assert asked[-2:] == [(0, 4096), (4096, 4096)]

    def test_a_full_disk_is_told_and_leaves_nothing(self, store, monkeypatch):
        put(store, "a.bin")

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(NoSpaceError), store.create("b.bin") as writer:
            writer.copy_from(store, "a.bin", 10, 9000)
        assert [entry.name for entry in store.list()] == ["a.bin"]


def test_looking_at_a_local_folder_imports_neither_numpy_nor_fsspec(tmp_path):
    put(LocalStore(str(tmp_path)), "a.bin")
    code = (
        "import sys; import shardckpt.storage.publish; from shardckpt.storage.resolve_url import kind, open_store;"
        f"open_store({str(tmp_path)!r}).list(); kind({str(tmp_path)!r});"
        "print({'numpy', 'fsspec', 'torch', 'asyncio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_reading_into_a_read_only_buffer_is_the_callers_mistake(store):
    put(store, "a.bin")
    with pytest.raises((TypeError, BufferError, ValueError)):
        store.read([Read("a.bin", 0, memoryview(b"1234"))])


def test_a_removed_file_does_not_come_back_after_a_power_failure(tmp_path: Path, monkeypatch) -> None:
    """A step whose `COMMIT` came back without the files that were removed next would be found damaged for ever."""
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "COMMIT").write_bytes(b"")
    synced: list[tuple[str, list[str]]] = []

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        synced.append((path, os.listdir(path)))

    monkeypatch.setattr(os, "fsync", fsync)
    LocalStore(str(tmp_path)).delete("step/COMMIT")
    assert synced == [(str(tmp_path / "step"), [])]
