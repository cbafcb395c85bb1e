"""Killed, failing or without power at every single storage operation: the old whole, the new whole, never a mix.

Each matrix counts the operations of a publication and breaks every one in turn. Mutants prove that it would notice.
"""

import errno
import json
import os
import re
import shutil
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage import local, local_publication, remote_publication, retry
from shardckpt.storage.fsspec_writer import FsspecWriter
from shardckpt.storage.local import LocalWriter
from shardckpt.storage.publish import publish
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import read_bytes
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.bucket import Bucket, Dead, broken_at
from tests.kit.stores.disk import Disk, failing_at, watched
from tests.kit.stores.kinds import FILE, FOLDER

LAST = "model.safetensors.index.json"
OLD = {
    "config.json": b"old config",
    "a.bin": b"old a",
    "kept.bin": b"old kept",
    "sub/b.bin": b"old b",
    LAST: b"old index",
}
NEW = {LAST: b"new index", "config.json": b"new config", "a.bin": b"new " * 5000, "sub/c.bin": b"new c"}
NEWEST = {"a.bin": b"newest a", LAST: b"newest index"}
CHECKPOINTS = [("aaaa", 3), ("bbbb", 2), ("cccc", 1)]


def checkpoint(prefix: str, count: int) -> dict[str, bytes]:
    """Return files whose names no other checkpoint has, and a last one that lists them."""
    files = {f"{prefix}-{number}.bin": f"{prefix} {number}".encode() * 999 for number in range(count)}
    return {**files, LAST: json.dumps(sorted(files)).encode()}


def publish_folder(
    target: Path, files: dict[str, bytes], *, overwrite: bool = True, keep: tuple[str, ...] = (), prefix: str = ""
) -> None:
    with publish(
        str(target), FOLDER, overwrite=overwrite, needed_bytes=1, last=LAST, prefix=prefix, find_kept=lambda: keep
    ) as publication:
        for name, data in files.items():
            with publication.create(name) as writer:
                half = len(data) // 2
                writer.write(data[:half])
                writer.write(data[half:])


def publish_file(target: Path, files: dict[str, bytes], *, overwrite: bool = True) -> None:
    with (
        publish(str(target), FILE, overwrite=overwrite, needed_bytes=1) as publication,
        publication.create(target.name) as writer,
    ):
        writer.write(files["a.bin"])


def publish_checkpoint(target: Path, files: dict[str, bytes]) -> None:
    publish_folder(target, files, prefix=min(files)[:4])


def folder_content(target: Path) -> dict[str, bytes] | None:
    """Return the files that readers get of a folder, by name; None where it is absent or empty."""
    store, folders, found = open_store(str(target)), [""], dict[str, bytes]()
    while folders:
        for entry in store.list(folders.pop()):
            if entry.is_folder:
                folders.append(entry.name)
            else:
                found[entry.name] = read_bytes(store, entry.name, 0, entry.size)
    return found or None


def listed_content(files: dict[str, bytes]) -> dict[str, bytes] | None:
    """Return the last file and those that it lists; None without it."""
    return {name: files[name] for name in [*json.loads(files[LAST]), LAST]} if LAST in files else None


def checkpoint_content(target: Path) -> dict[str, bytes] | None:
    return listed_content(folder_content(target) or {})


def file_content(target: Path) -> dict[str, bytes] | None:
    return {"a.bin": target.read_bytes()} if target.exists() else None


def only_a(files: dict[str, bytes]) -> dict[str, bytes]:
    return {"a.bin": files["a.bin"]}


class Case:
    """One way to publish on a disk: what lies there before, and how it is written and read."""

    def __init__(
        self,
        name: str,
        *,
        is_file: bool = False,
        is_checkpoint: bool = False,
        is_first: bool = False,
        can_exchange: bool = True,
        where: str = "out",
        keep: tuple[str, ...] = (),
    ) -> None:
        self.name, self.is_first, self.can_exchange, self.where = name, is_first, can_exchange, where
        self.publish = publish_file if is_file else partial(publish_folder, keep=keep)
        self.read = file_content if is_file else folder_content
        self.old, self.new, self.newest = (only_a(f) if is_file else f for f in (OLD, NEW, NEWEST))
        self.new = {**{name: OLD[name] for name in keep}, **self.new}
        self.written, self.shown = (OLD, NEW, NEWEST), dict
        if is_checkpoint:
            self.publish, self.read, self.shown = publish_checkpoint, checkpoint_content, listed_content
            self.written = self.old, self.new, self.newest = [checkpoint(*each) for each in CHECKPOINTS]

    def prepare(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if not self.is_first:
            self.publish(folder / self.where, self.written[0])
        return folder / self.where

    def run(self, target: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not self.can_exchange:
                patch.setattr(local_publication, "exchange", lambda *_: False)
            self.publish(target, self.written[1])

    def allowed(self) -> list[dict[str, bytes] | None]:
        """Return what readers may get at any moment."""
        return [None if self.is_first else self.old, self.new]


CASES = [
    Case("folder over folder"),
    Case("folder over folder, without exchange", can_exchange=False),
    Case("checkpoint over checkpoint", is_checkpoint=True),
    Case("checkpoint over checkpoint, without exchange", is_checkpoint=True, can_exchange=False),
    Case("first folder", is_first=True),
    Case("file over file", is_file=True),
    Case("first file", is_file=True, is_first=True),
]

POWER_CASES = [
    *CASES,
    Case("first folder in new folders", is_first=True, where="new/er/out"),
    Case("folder over folder, of which a file is kept", keep=("kept.bin",)),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)


def run_and_die_at(case: Case, target: Path, k: int, *, half: bool) -> bool:
    """Publish in a child that is killed before its k-th change, or amid it if it writes; tell whether it was."""

    def work() -> None:
        count = 0
        whole_write, whole_pwrite = os.write, os.pwrite

        def before(name: str, args: tuple) -> None:
            nonlocal count
            count += 1
            if count == k:
                if half and name == "write":
                    whole_write(args[0], args[1][: len(args[1]) // 2])
                if half and name == "pwrite":
                    whole_pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)

        with watched(before, lambda *_: None):
            case.run(target)

    return is_killed(work)


def check_after_a_kill(case: Case, target: Path, where: str) -> None:
    found = case.read(target)
    assert found in case.allowed(), f"{where} left a mix: {found}"
    if not target.exists() and not case.is_first:
        # The next run must not lose the only copy, even if it comes to nothing.
        with pytest.raises(ZeroDivisionError), publish(str(target), FOLDER, overwrite=True, needed_bytes=1):
            raise ZeroDivisionError
        assert case.read(target) == case.old, f"{where}, then a failing run, lost the old"
    case.publish(target, case.written[2])
    assert case.read(target) == case.newest, f"the run after {where} failed"
    assert os.listdir(target.parent) == ["out"], f"{where} left something beside"


def kill_matrix(case: Case, folder: Path) -> int:
    """Kill a publication at every operation; return how many there were."""
    k = 0
    while True:
        k += 1
        for half in (False, True):
            target = case.prepare(folder)
            was_killed = run_and_die_at(case, target, k, half=half)
            check_after_a_kill(case, target, f"a kill at operation {k}")
        if not was_killed:
            return k - 1


def fault_matrix(case: Case, folder: Path) -> int:
    """Let every operation fail in turn; return how many there were."""
    k = 0
    while True:
        k += 1
        target = case.prepare(folder)
        failed = False
        with failing_at(k) as count:
            try:
                case.run(target)
            except StorageError:
                failed = True
        found = case.read(target)
        # A failure once the new is in place leaves it there; one that nobody heard of must have done no harm.
        allowed = case.allowed() if failed else [case.new]
        assert found in allowed, f"operation {k} broke, {'with' if failed else 'without'} an error: {found}"
        case.publish(target, case.written[2])
        assert os.listdir(target.parent) == ["out"]
        if count() < k:
            return k - 1


def power_matrix(case: Case, folder: Path, *, breaks_last_sync: bool = False) -> int:
    """Cut the power before every operation and after the last; return how many there were."""
    target = case.prepare(folder)
    name_of_target = str(target.relative_to(folder))
    disk = Disk(str(folder))
    count = 0

    def is_changed_by_the_swap(fd: int) -> bool:
        return any(os.path.samestat(os.fstat(fd), os.stat(each)) for each in (folder, target))

    def seen(outcome: dict[str, bytes]) -> dict[str, bytes] | None:
        """Return what readers get at the target: if nothing is there, what was moved aside."""
        at_target = {
            name[len(name_of_target) + 1 :] or "a.bin": data
            for name, data in outcome.items()
            if name == name_of_target or name.startswith(f"{name_of_target}/")
        }
        beside: dict[str, dict[str, bytes]] = {}
        for name, data in outcome.items():
            if match := re.match(r"(\.out\.old-\w+)/(.*)", name):
                beside.setdefault(match[1], {})[match[2]] = data
        return case.shown(at_target or next(iter(beside.values()), {})) or None

    def look(allowed: list[dict[str, bytes] | None], when: str) -> None:
        for outcome in disk.outcomes():
            assert seen(outcome) in allowed, f"a power cut {when} leaves {outcome}"

    def before(name: str, args: tuple) -> None:
        nonlocal count
        count += 1
        look(case.allowed(), f"before operation {count} ({name})")
        is_last = name == "fsync" and case.read(target) == case.new and is_changed_by_the_swap(args[0])
        if breaks_last_sync and is_last and not disk.has_failed:
            disk.fail_sync(args[0])
            raise OSError(errno.EIO, "broken fsync")

    try:
        with watched(before, disk.after), pytest.raises(StorageError) if breaks_last_sync else nullcontext():
            case.run(target)
        look(case.allowed() if breaks_last_sync else [case.new], "after the end")
    finally:
        disk.close()
    return count


class TestOnDisk:
    def test_a_kill_leaves_the_old_or_the_new_and_the_next_run_succeeds(self, case, tmp_path):
        operations = kill_matrix(case, tmp_path / "here")
        print(f"{case.name}: killed at each of {operations} operations")
        assert operations >= (8 if case.read is file_content else 24)

    def test_a_failing_operation_is_told_and_leaves_the_old_or_the_new(self, case, tmp_path):
        operations = fault_matrix(case, tmp_path / "here")
        print(f"{case.name}: failed at each of {operations} operations")
        assert operations >= (8 if case.read is file_content else 24)

    @pytest.mark.parametrize("case", POWER_CASES, ids=lambda case: case.name)
    def test_a_power_cut_leaves_the_old_or_the_new(self, case, tmp_path):
        operations = power_matrix(case, tmp_path / "here")
        print(f"{case.name}: power cut at each of {operations} operations")
        assert operations >= (8 if case.read is file_content else 24)

    def test_so_does_one_after_a_swap_that_the_disk_has_not_confirmed(self, case, tmp_path):
        power_matrix(case, tmp_path / "here", breaks_last_sync=True)


# A store without rename. Its reader loads what an index lists, or one complete numbered set without index.

BUCKET_OLD = {"config.json": "old", "model-00001-of-00002.bin": "old 1", "model-00002-of-00002.bin": "old 2"}
SINGLE_OLD = {"config.json": "old", "model.bin": "old 1"}


def publish_bucket(shards: int = 2, label: str = "new", *, index_first: bool = True) -> None:
    with publish("bucket://b/out", FOLDER, overwrite=True, needed_bytes=1, last=LAST) as publication:
        mark = f"-{publication.unique_suffix}" if publication.unique_suffix else ""
        files = {f"model{mark}-{n:05}-of-{shards:05}.bin": f"{label} {n}" for n in range(1, shards + 1)}
        index = {LAST: json.dumps(sorted(files))}
        for name, text in {**(index if index_first else {}), "config.json": label, **files, **index}.items():
            with publication.create(name) as writer:
                writer.write(text.encode())


def prepare_bucket(files: dict[str, str], *, index: bool) -> None:
    Bucket.reset()
    listed = json.dumps(sorted(name for name in files if name.startswith("model")))
    for name, text in {**files, **({LAST: listed} if index else {})}.items():
        Bucket.objects[f"b/out/{name}"] = text.encode()


def load() -> set[str] | None:
    """Return the generations that a reader of the bucket gets to see, None where it refuses."""
    files = {key.removeprefix("b/out/"): data.decode() for key, data in Bucket.objects.items()}
    if "model.bin" in files:
        names = ["model.bin"]
    elif LAST in files:
        names = json.loads(files[LAST])
    else:
        sets: dict[str, list[str]] = {}
        for name in files:
            if match := re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.bin", name):
                sets.setdefault(f"{match[1]} {match[2]}", []).append(name)
        whole = [found for key, found in sets.items() if len(found) == int(key.split(" ")[1])]
        if len(whole) != 1 or len(sets) != 1:
            return None
        names = whole[0]
    if not all(name in files for name in names):
        return None
    return {files[name].split(" ")[0] for name in names} | {files.get("config.json", files[names[0]]).split(" ")[0]}


def bucket_matrix(how: str, old: dict[str, str], *, index: bool) -> int:
    """Break every request of a publication in turn; return how many there were."""
    k = 0
    while True:
        k += 1
        prepare_bucket(old, index=index)
        with broken_at(k, how):
            try:
                publish_bucket()
                failed = False
            except (Dead, StorageError):
                failed = True
            made = len(Bucket.requests)
        seen = load()
        allowed = [{"old"}, {"new"}, None] if failed else [{"new"}]
        assert seen in allowed, f"request {k} {how}: a reader sees {seen} in {sorted(Bucket.objects)}"
        if how == "error" and seen == {"old"}:
            known = {f"b/out/{name}" for name in (*old, LAST)}
            assert Bucket.objects.keys() <= known, f"request {k} {how} left new files: {sorted(Bucket.objects)}"
        assert Bucket.uploads == {} or how in {"killed", "unheard"}
        publish_bucket(1, "newest")
        assert load() == {"newest"}
        assert len(Bucket.objects) == 3, f"the run after request {k} {how} left {sorted(Bucket.objects)}"
        if made < k:
            return k - 1


@pytest.mark.parametrize("how", ["killed", "unheard", "error", "error and no cleanup"])
@pytest.mark.parametrize(
    ("old", "index"), [({}, False), (BUCKET_OLD, True), (SINGLE_OLD, False), (SINGLE_OLD, True)], ids=str
)
def test_without_rename_a_reader_sees_the_old_the_new_or_nothing(how, old, index):
    requests = bucket_matrix(how, old, index=index)
    print(f"{len(old)} old files: {how} at each of {requests} requests")
    assert requests >= 5


@pytest.mark.shown_by("::TestOnDisk::test_a_kill_leaves_the_old_or_the_new_and_the_next_run_succeeds")
class TestMutants:
    """The matrices would be worth nothing if they stayed green for these."""

    OVER = CASES[0]

    def test_without_fsync_the_power_matrix_is_red(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Disk, "hears_fsync", False)
        with pytest.raises(AssertionError, match="power cut"):
            power_matrix(self.OVER, tmp_path / "here")

    @pytest.mark.parametrize(
        ("module", "name"), [(local, "sync_folder"), (local_publication, "sync_open_folder")], ids=str
    )
    def test_without_fsync_of_folders_the_power_matrix_is_red(self, tmp_path, monkeypatch, module, name):
        monkeypatch.setattr(module, name, lambda _: None)
        with pytest.raises(AssertionError, match="power cut"):
            power_matrix(self.OVER, tmp_path / "here")

    @pytest.mark.parametrize("case", POWER_CASES[-2:], ids=lambda case: case.name)
    def test_without_fsync_of_new_folders_and_kept_files_the_power_matrix_is_red(self, tmp_path, monkeypatch, case):
        monkeypatch.setattr(local_publication, "sync_folder", lambda _: None)
        with pytest.raises(AssertionError, match="power cut"):
            power_matrix(case, tmp_path / "here")

    @pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
    def test_with_a_doubt_that_is_ignored_the_power_matrix_is_red(self, tmp_path, monkeypatch, case):
        nothing = property(lambda _: False, lambda *_: None)
        monkeypatch.setattr(local_publication.LocalPublication, "_is_doubtful", nothing, raising=False)
        with pytest.raises(AssertionError, match="power cut"):
            power_matrix(case, tmp_path / "here", breaks_last_sync=True)

    @pytest.mark.parametrize("how", ["killed", "error and no cleanup"])
    def test_with_the_index_written_first_the_bucket_matrix_is_red(self, monkeypatch, how):
        whole = remote_publication.RemoteFolder.create

        def create(self, name):
            if name != LAST:
                return whole(self, name)
            self._old = [old for old in self._old if old != LAST]
            self._written.append(name)
            return self._store.create(name)

        monkeypatch.setattr(remote_publication.RemoteFolder, "create", create)
        with pytest.raises(AssertionError, match="a reader sees"):
            bucket_matrix(how, BUCKET_OLD, index=True)

    def test_with_the_old_index_deleted_last_the_bucket_matrix_is_red(self, monkeypatch):
        def commit(self):
            for name in sorted(self._deferred, key=lambda name: name == self._last):
                self._deferred[name].finish()
            for name in set(self._old) - set(self._deferred):
                self._store.delete(name)

        monkeypatch.setattr(remote_publication.RemoteFolder, "commit", commit)
        with pytest.raises(AssertionError, match="a reader sees"):
            bucket_matrix("killed", BUCKET_OLD, index=True)

    @pytest.mark.parametrize("method", ["write", "close"])
    def test_with_an_error_swallowed_on_disk_the_fault_matrix_is_red(self, tmp_path, monkeypatch, method):
        whole = getattr(LocalWriter, method)

        def swallowing(self, *args):
            try:
                whole(self, *args)
            except StorageError:
                return

        monkeypatch.setattr(LocalWriter, method, swallowing)
        with pytest.raises(AssertionError, match="without an error"):
            fault_matrix(self.OVER, tmp_path / "here")

    def test_with_an_error_swallowed_on_a_bucket_the_bucket_matrix_is_red(self, monkeypatch):
        whole = FsspecWriter.close

        def swallowing(self):
            try:
                whole(self)
            except StorageError:
                return

        monkeypatch.setattr(FsspecWriter, "close", swallowing)
        with pytest.raises(AssertionError, match="a reader sees"):
            bucket_matrix("error", BUCKET_OLD, index=True)

    def test_writing_over_the_old_in_place_turns_the_kill_matrix_red(self, tmp_path, monkeypatch):
        def in_place(self, name):
            return local.LocalStore(self.target).create(name)

        monkeypatch.setattr(local_publication.LocalPublication, "create", in_place)
        with pytest.raises(AssertionError, match="left a mix"):
            kill_matrix(self.OVER, tmp_path / "here")
