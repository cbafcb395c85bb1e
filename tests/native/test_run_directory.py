"""Which steps of a run exist: what `COMMIT` says, never the name; and what of the rest belongs to dead saves."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

import fsspec
import pytest
import torch

import shardckpt
from shardckpt.errors import StorageError, UnsupportedError
from shardckpt.native import run_directory as steps_module
from shardckpt.native.payload import new_save_id
from shardckpt.native.run_directory import (
    RunDirectory,
    StepFolder,
    delete_orphan,
    delete_steps,
    find_orphans,
    read_about,
    read_run,
    step_name,
)
from shardckpt.storage.fsspec_store import FsspecStore
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import Listed, Store
from tests.kit.stores.bucket import Bucket
from tests.kit.writers.native_writer import write_step

STATE = {"w": torch.arange(6.0), "step": 3}


def write(root: Path, *numbers: int, **options: object) -> None:
    for number in numbers:
        write_step(root / step_name(number), STATE, save=new_save_id(), **options)  # type: ignore[arg-type]


def steps(root: Path) -> dict[int, bool]:
    return {step.number: step.is_complete for step in read_run(LocalStore(str(root))).steps}


def one(root: Path) -> StepFolder:
    (step,) = read_run(LocalStore(str(root))).steps
    return step


def only(folder: Path, suffix: str) -> Path:
    (found,) = (path for path in folder.iterdir() if path.name.endswith(suffix))
    return found


class TestWhatIsAStep:
    def test_folders_are_listed_by_number(self, tmp_path: Path) -> None:
        write(tmp_path, 100, 20, 123_456_789)
        assert steps(tmp_path) == {20: True, 100: True, 123_456_789: True}
        assert list(steps(tmp_path)) == [20, 100, 123_456_789]

    def test_names_are_as_long_as_sorting_by_name_needs(self) -> None:
        assert [step_name(n) for n in (0, 1000, 123_456_789)] == ["step-00000000", "step-00001000", "step-123456789"]

    def test_a_run_that_is_not_there_has_none(self, tmp_path: Path) -> None:
        assert read_run(LocalStore(str(tmp_path / "nowhere"))).steps == ()

    def test_what_is_called_otherwise_is_none(self, tmp_path: Path) -> None:
        write(tmp_path, 1)
        for name in ("step-", "step-1x", "step--1", "xstep-2", "step-٣", "best", f"step-{'9' * 19}"):
            shutil.copytree(tmp_path / step_name(1), tmp_path / name)
        (tmp_path / "step-00000007").write_text("a file")
        assert steps(tmp_path) == {1: True}

    @pytest.mark.parametrize("number", [0, 1])
    def test_of_two_complete_folders_of_a_number_the_one_with_the_longer_name_counts(
        self, number: int, tmp_path: Path
    ) -> None:
        for name in (f"step-{number}", step_name(number)):
            write_step(tmp_path / name, STATE, save=new_save_id())
        run = read_run(LocalStore(str(tmp_path)))
        assert [step.name for step in run.complete] == [step_name(number)]
        assert [step.name for step in run.steps if step.is_double] == [f"step-{number}"]

    def test_a_step_whose_base_has_a_short_file_is_not_complete(self, tmp_path: Path) -> None:
        for number in (1, 2):
            shardckpt.Checkpointer(tmp_path, dedup=True).save(number, {"w": torch.arange(100_000.0)})
        assert steps(tmp_path) == {1: True, 2: True}
        file = max((tmp_path / step_name(1)).iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size - 1)
        assert steps(tmp_path) == {1: False, 2: False}
        (_, second) = read_run(LocalStore(str(tmp_path))).steps
        assert "files in its base are missing or end early" in second.fault

    def test_a_folder_that_was_named_by_hand_is_one(self, tmp_path: Path) -> None:
        write_step(tmp_path / "step-100", STATE)
        assert one(tmp_path).name == "step-100"

    def test_of_two_folders_of_one_step_one_counts(self, tmp_path: Path) -> None:
        write(tmp_path, 100)
        shutil.copytree(tmp_path / step_name(100), tmp_path / "step-100")
        found = read_run(LocalStore(str(tmp_path)))
        assert [step.name for step in found.complete] == [step_name(100)]
        (other,) = set(found.steps) - set(found.complete)
        assert (other.name, other.is_unfinished) == ("step-100", False)
        (tmp_path / step_name(100) / "COMMIT").unlink()
        assert [step.name for step in read_run(LocalStore(str(tmp_path))).complete] == ["step-100"]


class TestCompleteness:
    def test_a_step_knows_its_save_its_size_and_its_time(self, tmp_path: Path) -> None:
        before = time.time()
        write(tmp_path, 5)
        step = one(tmp_path)
        files = [path for path in (tmp_path / step.name).iterdir() if path.name != "COMMIT"]
        assert step.nbytes == sum(path.stat().st_size for path in files)
        assert step.saved_at is not None
        assert before - 1 < step.saved_at < time.time() + 1
        assert any(path.name.startswith(step.save) for path in files)

    def test_a_save_whose_id_is_no_time_has_none(self, tmp_path: Path) -> None:
        write_step(tmp_path / step_name(5), STATE, save="byhand")
        assert one(tmp_path).saved_at is None

    @pytest.mark.parametrize("what", ["COMMIT", ".safetensors", ".manifest.json"])
    def test_a_step_that_lacks_a_file_is_not_complete(self, what: str, tmp_path: Path) -> None:
        write(tmp_path, 5)
        only(tmp_path / step_name(5), what).unlink()
        step = one(tmp_path)
        assert not step.is_complete
        assert step_name(5) in step.fault

    @pytest.mark.parametrize("what", ["COMMIT", ".safetensors", ".manifest.json"])
    def test_nor_is_one_of_which_a_file_was_cut(self, what: str, tmp_path: Path) -> None:
        write(tmp_path, 5)
        file = only(tmp_path / step_name(5), what)
        os.truncate(file, file.stat().st_size - 1)
        assert not one(tmp_path).is_complete

    def test_any_flipped_bit_of_the_commit_is_seen(self, tmp_path: Path) -> None:
        write(tmp_path, 5)
        file = tmp_path / step_name(5) / "COMMIT"
        whole = file.read_bytes()
        for at in range(len(whole)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert not one(tmp_path).is_complete, at

    def test_a_step_that_is_a_link_out_of_the_run_is_told_and_left_alone(self, tmp_path: Path) -> None:
        write(tmp_path / "elsewhere", 5)
        (tmp_path / "run").mkdir()
        os.symlink(tmp_path / "elsewhere" / step_name(5), tmp_path / "run" / step_name(5))
        step = one(tmp_path / "run")
        assert "link out of" in step.fault
        assert not step.is_unfinished

    def test_storage_that_fails_is_no_fault_of_the_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "broken")

        write(tmp_path, 5)
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(StorageError, match="broken"):
            read_run(LocalStore(str(tmp_path)))


class TestBesideATrainer:
    """Another process saves the next step and removes the last one, between the list of the run and the reads."""

    @pytest.fixture
    def trainer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
        """Return what lets a trainer take so many turns; it gives the names of the folders that are listed."""
        write(tmp_path, 1)
        lists: list[str] = []
        turns = {"left": 0, "newest": 1}
        listed = LocalStore.list

        def list_then_save(store: LocalStore, folder: str = "") -> list[Listed]:
            found = listed(store, folder)
            lists.append(folder)
            if not folder and turns["left"]:
                turns["left"] -= 1
                turns["newest"] += 1
                write(tmp_path, turns["newest"])
                shutil.rmtree(tmp_path / step_name(turns["newest"] - 1))
            return found

        monkeypatch.setattr(LocalStore, "list", list_then_save)

        def let(count: int) -> list[str]:
            turns["left"] = count
            return lists

        return let

    @pytest.mark.parametrize("turns", [1, 2, 7])
    def test_a_newer_step_is_found_where_the_listed_one_has_gone(
        self, turns: int, trainer: Callable[[int], list[str]], tmp_path: Path
    ) -> None:
        trainer(turns)
        assert [step.number for step in read_run(LocalStore(str(tmp_path))).complete] == [1 + turns]

    def test_that_has_an_end(
        self, trainer: Callable[[int], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(steps_module, "_LOOKS", 3)
        trainer(10_000)
        with pytest.raises(StorageError, match="faster than they can be read"):
            read_run(LocalStore(str(tmp_path)))

    def test_a_run_in_which_all_is_complete_is_listed_once(
        self, trainer: Callable[[int], list[str]], tmp_path: Path
    ) -> None:
        lists = trainer(0)
        read_run(LocalStore(str(tmp_path)))
        assert lists == ["", step_name(1)]

    def test_a_step_that_stays_incomplete_is_looked_at_twice_and_the_others_once(
        self, trainer: Callable[[int], list[str]], tmp_path: Path
    ) -> None:
        (tmp_path / step_name(5)).mkdir()
        lists = trainer(0)
        read_run(LocalStore(str(tmp_path)))
        assert sorted(lists) == ["", "", step_name(1), step_name(5), step_name(5)]

    def test_in_a_bucket_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, 1, 2)
        Bucket.reset()
        files = {f"b/run/{path.parent.name}/{path.name}": path.read_bytes() for path in tmp_path.glob("*/*")}
        Bucket.objects = {name: data for name, data in files.items() if f"{step_name(1)}/" in name}

        def save_behind_the_first_list(count: int, verb: str, path: str) -> None:
            if count == 2:
                Bucket.objects = {name: data for name, data in files.items() if f"{step_name(2)}/" in name}

        monkeypatch.setattr(Bucket, "fault", save_behind_the_first_list)
        assert [step.number for step in read_run(FsspecStore("bucket://b/run")).complete] == [2]


class TestWhatItSaysAboutItself:
    def test_it_is_read_from_the_manifest(self, tmp_path: Path) -> None:
        write(tmp_path, 5)
        assert read_about(LocalStore(str(tmp_path)), one(tmp_path)) == {"shardckpt": "0.1.0"}


class TestRemoval:
    def test_a_removed_step_leaves_nothing_and_the_others_stay(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2)
        store = LocalStore(str(tmp_path))
        run = read_run(store)
        delete_steps(store, run, [step_name(1)])
        delete_steps(store, run, [step_name(1)])
        assert os.listdir(tmp_path) == [step_name(2)]

    def test_the_commit_goes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, 1)
        gone: list[str] = []
        unlink = os.unlink
        monkeypatch.setattr(os, "unlink", lambda path, **k: (gone.append(os.path.basename(path)), unlink(path, **k)))
        store = LocalStore(str(tmp_path))
        delete_steps(store, read_run(store), [step_name(1)])
        assert gone[0] == "COMMIT"
        assert len(gone) == 3

    def test_a_flipped_bit_in_a_manifest_does_not_stop_the_removal(self, tmp_path: Path) -> None:
        """The manifest seems to be of a newer version, which its `COMMIT` was not."""
        write(tmp_path, 1, 2)
        manifest = only(tmp_path / step_name(1), ".manifest.json")
        flipped = manifest.read_bytes().replace(b"float32", b"vloat32")
        manifest.write_bytes(flipped)
        store = LocalStore(str(tmp_path))
        assert delete_steps(store, read_run(store), [step_name(1)]) == []
        assert os.listdir(tmp_path) == [step_name(2)]

    def test_nothing_is_removed_beside_an_unfinished_save_of_a_newer_version(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2, 3)
        (tmp_path / step_name(3) / "COMMIT").unlink()
        manifest = only(tmp_path / step_name(3), ".manifest.json")
        manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"vloat32"))
        store = LocalStore(str(tmp_path))
        with pytest.raises(UnsupportedError, match="step-00000003"):
            delete_steps(store, read_run(store), [step_name(1)])
        assert len(os.listdir(tmp_path / step_name(1))) == 2


def call_between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act as another job, when a removal has deleted each `COMMIT`, and before it reads the run again."""
    read = steps_module.read_run_to_remove

    def late(*args: object, **options: object) -> RunDirectory:
        act()
        return read(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(steps_module, "read_run_to_remove", late)


class TestRemovalBesideAnotherJob:
    """The other job saves the step that is removed: the removal is of the files of the old save."""

    def test_a_step_that_is_saved_again_meanwhile_is_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, 1, 2)
        old = {*os.listdir(tmp_path / step_name(1))} - {"COMMIT"}
        store = LocalStore(str(tmp_path))
        call_between(monkeypatch, lambda: write(tmp_path, 1))
        delete_steps(store, read_run(store), [step_name(1)])
        assert steps(tmp_path) == {1: True, 2: True}
        assert old.isdisjoint(os.listdir(tmp_path / step_name(1)))

    def test_one_whose_commit_comes_after_the_last_look_is_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, 1, 2)
        store = LocalStore(str(tmp_path))
        delete = LocalStore.delete_files

        def late(self: LocalStore, folder: str, names: Collection[str]) -> None:
            write(tmp_path, 1)
            delete(self, folder, names)

        monkeypatch.setattr(LocalStore, "delete_files", late)
        delete_steps(store, read_run(store), [step_name(1)])
        assert steps(tmp_path) == {1: True, 2: True}

    def test_the_base_of_one_that_is_saved_again_meanwhile_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weights = {"w": torch.arange(100_000.0)}
        shardckpt.save(weights, str(tmp_path / step_name(1)))
        for number in (2, 3):
            shardckpt.save(weights, str(tmp_path / step_name(number)), base=str(tmp_path / step_name(1)))
        again = {path.name: path.read_bytes() for path in (tmp_path / step_name(2)).iterdir()}
        store = LocalStore(str(tmp_path))

        def save_again() -> None:
            for name, data in again.items():
                (tmp_path / step_name(2) / name).write_bytes(data)

        call_between(monkeypatch, save_again)
        delete_steps(store, read_run(store), [step_name(1), step_name(2), step_name(3)])
        assert torch.equal(shardckpt.load(str(tmp_path / step_name(2)))["w"], weights["w"])

    def test_files_of_a_save_that_goes_on_stay(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2)
        going_on = tmp_path / step_name(1) / f"{new_save_id()}-00001-00.safetensors"
        going_on.write_bytes(b"1")
        store = LocalStore(str(tmp_path))
        delete_steps(store, read_run(store), [step_name(1)])
        assert os.listdir(tmp_path / step_name(1)) == [going_on.name]
        assert [left.name for left in find_orphans(store, read_run(store))] == [step_name(1)]

    def test_files_that_came_since_an_orphan_was_found_stay(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2)
        folder = tmp_path / step_name(1)
        (folder / "COMMIT").unlink()
        store = LocalStore(str(tmp_path))
        (orphan,) = find_orphans(store, read_run(store))
        came = folder / f"{new_save_id()}-00001-00.safetensors"
        came.write_bytes(b"1")
        assert delete_orphan(store, orphan)
        assert os.listdir(folder) == [came.name]


class TestLeftovers:
    def names(self, root: Path) -> list[str]:
        store = LocalStore(str(root))
        return [left.name for left in find_orphans(store, read_run(store))]

    def test_a_whole_run_has_none(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2)
        assert self.names(tmp_path) == []

    def test_what_was_not_committed_is_one_and_so_is_an_empty_step(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2, 3)
        (tmp_path / step_name(1) / "COMMIT").unlink()
        (tmp_path / step_name(2) / "COMMIT").rename(tmp_path / step_name(2) / ".COMMIT.partial-0123456789ab")
        (tmp_path / step_name(4)).mkdir()
        assert self.names(tmp_path) == [step_name(1), step_name(2), step_name(4)]

    def test_so_is_a_folder_that_was_to_become_a_step(self, tmp_path: Path) -> None:
        name = f".{step_name(7)}.partial-0123456789ab"
        for each in (
            name,
            ".step-x.partial-0123456789ab",
            ".other.partial-0123456789ab",
            f".{step_name(7)}.partial-zz",
        ):
            (tmp_path / each).mkdir()
        assert self.names(tmp_path) == [name]

    def test_the_old_content_of_a_step_may_be_the_only_copy(self, tmp_path: Path) -> None:
        write(tmp_path, 1)
        (tmp_path / step_name(1)).rename(tmp_path / f".{step_name(1)}.old-0123456789ab")
        assert self.names(tmp_path) == []

    def test_a_damaged_step_is_none_since_somebody_may_mend_it(self, tmp_path: Path) -> None:
        write(tmp_path, 1)
        only(tmp_path / step_name(1), ".manifest.json").unlink()
        assert self.names(tmp_path) == []

    @pytest.mark.parametrize("file", ["model.safetensors", ".metadata", "notes.txt", "sub/a.bin", "sub/"])
    def test_what_somebody_else_keeps_in_a_folder_of_such_a_name_is_his(self, file: str, tmp_path: Path) -> None:
        write(tmp_path, 1)
        (tmp_path / step_name(1) / "COMMIT").unlink()
        for folder in (tmp_path / step_name(1), tmp_path / "step-100"):
            path = folder / file
            (path if file.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not file.endswith("/"):
                path.write_text("precious")
        assert steps(tmp_path) == {1: False, 100: False}
        assert self.names(tmp_path) == []

    def test_an_index_alone_may_be_anybodys(self, tmp_path: Path) -> None:
        (tmp_path / "step-100").mkdir()
        (tmp_path / "step-100" / "model.safetensors.index.json").write_text("{}")
        assert self.names(tmp_path) == []

    def test_its_last_change_is_known_on_a_disk(self, tmp_path: Path) -> None:
        write(tmp_path, 1)
        (tmp_path / step_name(1) / "COMMIT").unlink()
        store = LocalStore(str(tmp_path))
        (left,) = find_orphans(store, read_run(store))
        assert left.changed_at is not None
        assert abs(left.changed_at - time.time()) < 60

    def test_where_the_store_tells_no_times_the_save_does(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, 1)
        (tmp_path / step_name(1) / "COMMIT").unlink()
        monkeypatch.setattr(LocalStore, "changed_at", lambda *_: None)
        store = LocalStore(str(tmp_path))
        (left,) = find_orphans(store, read_run(store))
        assert left.changed_at is not None
        assert abs(left.changed_at - time.time()) < 60


def test_a_run_in_a_bucket_is_read_alike(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    (tmp_path / step_name(3) / "COMMIT").unlink()
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    memory.put(str(tmp_path), "/runs/a", recursive=True)
    store: Store = FsspecStore("memory://runs/a")
    run = read_run(store)
    assert [(step.number, step.is_complete) for step in run.steps] == [(1, True), (2, True), (3, False)]
    assert [left.name for left in find_orphans(store, run)] == [step_name(3)]
    delete_steps(store, run, [step_name(1)])
    assert [step.number for step in read_run(FsspecStore("memory://runs/a")).steps] == [2, 3]


@pytest.mark.parametrize(
    ("pattern", "fix"), [("*.manifest.json", "shardckpt repair"), ("*.safetensors", "another copy")]
)
def test_a_missing_file_is_said_to_be_missing(pattern: str, fix: str, tmp_path: Path) -> None:
    shardckpt.save({"w": torch.ones(2)}, tmp_path / step_name(1))
    [file] = (tmp_path / step_name(1)).glob(pattern)
    file.unlink()
    [step] = read_run(LocalStore(str(tmp_path))).steps
    assert f"missing or end early: {file.name}" in step.fault
    assert fix in step.fault
    assert "found" not in step.fault
