"""`ls` and `prune`: what stays can be loaded, what cannot counts for nothing, and a kill at any moment harms nobody."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import shardckpt
from shardckpt.errors import SourceNotFoundError, StorageError, UsageError
from shardckpt.native import run_directory as format_steps
from shardckpt.native.payload import new_save_id
from shardckpt.native.run_directory import step_name
from shardckpt.offline import prune as convert_steps
from shardckpt.storage import orphans, retry
from shardckpt.storage.local import LocalStore
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import Store
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.bucket import Bucket, DatedBucket, Dead, broken_at
from tests.kit.stores.clocks import clock_jumps, days_pass
from tests.kit.stores.disk import watched
from tests.kit.writers.native_writer import write_step


def write(root: Path, *numbers: int) -> None:
    for number in numbers:
        write_step(root / step_name(number), {"w": torch.full((5,), float(number))}, save=new_save_id())


def break_file(folder: Path, suffix: str) -> None:
    """Flip a bit in the middle of a file."""
    (path,) = (each for each in folder.iterdir() if each.name.endswith(suffix))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def complete(root: object) -> list[int]:
    return [step.number for step in shardckpt.ls(str(root)).complete]


class TestList:
    def test_complete_steps_are_listed_by_number_with_path_size_and_time(self, tmp_path: Path) -> None:
        write(tmp_path, 20, 3)
        found = shardckpt.ls(str(tmp_path))
        assert [step.number for step in found.complete] == [3, 20]
        assert found.incomplete == ()
        last = found.complete[-1]
        assert shardckpt.verify(last.path).ok
        assert last.nbytes > 20
        assert last.saved_at is not None
        assert abs(last.saved_at - time.time()) < 60

    def test_incomplete_steps_are_listed_with_their_fault(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2)
        (tmp_path / step_name(2) / "COMMIT").unlink()
        (left,) = shardckpt.ls(str(tmp_path)).incomplete
        assert left.number == 2
        assert "never committed" in left.fault

    def test_an_unfinished_step_before_a_complete_one_may_be_a_killed_removal(self, tmp_path: Path) -> None:
        """It looks like a killed save: all files are there but `COMMIT`."""
        write(tmp_path, 1, 2, 3)
        for number in (1, 3):
            (tmp_path / step_name(number) / "COMMIT").unlink()
        removed, unsaved = shardckpt.ls(str(tmp_path)).incomplete
        assert removed.fault.startswith(f"{tmp_path / step_name(1)}: this step has no COMMIT, and step 2 after it")
        assert (
            "Its save or its removal was interrupted, or is still running: a prune or a save removes it"
            in removed.fault
        )
        assert "never committed" in unsaved.fault
        next((tmp_path / step_name(1)).glob("*.safetensors")).unlink()
        assert "; found 1 file. Its" in shardckpt.ls(str(tmp_path)).incomplete[0].fault

    def test_a_run_without_steps_is_empty(self, tmp_path: Path) -> None:
        assert complete(tmp_path) == []

    @pytest.mark.parametrize("verb", [shardckpt.ls, shardckpt.prune])
    def test_a_folder_that_is_not_a_run_is_refused(self, verb: object, tmp_path: Path) -> None:
        write(tmp_path, 1)
        (tmp_path / "file").write_text("x")
        with pytest.raises(SourceNotFoundError):
            verb(str(tmp_path / "none"))  # type: ignore[operator]
        with pytest.raises(UsageError, match="this is a file"):
            verb(str(tmp_path / "file"))  # type: ignore[operator]
        with pytest.raises(UsageError, match="this is a step"):
            verb(str(tmp_path / step_name(1)))  # type: ignore[operator]


class TestPrune:
    def test_steps_that_no_rule_keeps_are_removed(self, tmp_path: Path) -> None:
        write(tmp_path, *range(10, 80, 10))
        done = shardckpt.prune(str(tmp_path), keep_last=2, keep_every=30)
        assert [step.number for step in done.removed] == [10, 20, 40, 50]
        assert [step.number for step in done.kept] == complete(tmp_path) == [30, 60, 70]
        assert sorted(os.listdir(tmp_path)) == [step_name(n) for n in (30, 60, 70)]
        assert done.nbytes == sum(step.nbytes for step in done.removed) > 0

    def test_a_folder_of_somebody_else_that_is_called_alike_stays(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2)
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1" / "pytorch_model.bin").write_bytes(b"precious")
        shardckpt.prune(str(tmp_path), keep_last=1)
        assert sorted(os.listdir(tmp_path)) == [step_name(2), "step-1"]

    def test_a_second_time_nothing_goes(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2, 3)
        shardckpt.prune(str(tmp_path), keep_last=1)
        assert shardckpt.prune(str(tmp_path), keep_last=1).removed == ()

    def test_a_dry_run_says_the_same_and_removes_nothing(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2, 3)
        said = shardckpt.prune(str(tmp_path), keep_last=1, dry_run=True)
        assert complete(tmp_path) == [1, 2, 3]
        assert shardckpt.prune(str(tmp_path), keep_last=1) == replace(said, dry_run=False)

    def test_without_a_rule_no_step_goes(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2)
        assert shardckpt.prune(str(tmp_path)).removed == ()
        assert complete(tmp_path) == [1, 2]

    def test_steps_that_are_named_go_without_a_rule_but_the_newest(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2, 3, 4)
        done = shardckpt.prune(tmp_path, steps=[2, 4, 9])
        assert [step.number for step in done.removed] == [2]
        assert complete(tmp_path) == [1, 3, 4]
        assert shardckpt.prune(tmp_path, steps=()).removed == ()
        with pytest.raises(UsageError, match=r"`steps` and rules exclude each other; found `keep_last`\. Pass"):
            shardckpt.prune(tmp_path, steps=[1], keep_last=1, keep_for=None, mode="min")

    @pytest.mark.parametrize("steps", [2, "2", ["2"], [1.0], [True]], ids=repr)
    def test_what_names_no_step_is_refused_as_a_step_to_remove(self, steps: Any, tmp_path: Path) -> None:
        write(tmp_path, 1, 2, 3)
        with pytest.raises(UsageError, match=r"`steps` must be a list of step numbers; found .* such as \[100, 200\]"):
            shardckpt.prune(tmp_path, steps=steps)
        assert complete(tmp_path) == [1, 2, 3]

    def test_a_rule_that_means_nothing_is_refused_before_anything_goes(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2)
        with pytest.raises(UsageError, match="keep_last"):
            shardckpt.prune(str(tmp_path), keep_last=0)
        with pytest.raises(UsageError, match="`verify` is neither True nor False; found 'no'"):
            shardckpt.prune(str(tmp_path), keep_last=1, verify="no")  # type: ignore[arg-type]
        assert complete(tmp_path) == [1, 2]

    @pytest.mark.parametrize("fault", ["no commit", "flipped commit", "file gone", "manifest gone", "flipped manifest"])
    def test_the_only_good_step_stays_whatever_is_wrong_with_newer_ones(self, fault: str, tmp_path: Path) -> None:
        write(tmp_path, 1, 2, 3, 4)
        for number in (3, 4):
            folder = tmp_path / step_name(number)
            if fault == "no commit":
                (folder / "COMMIT").unlink()
            elif fault.startswith("flipped"):
                break_file(folder, "COMMIT" if fault == "flipped commit" else ".manifest.json")
            else:
                suffix = ".safetensors" if fault == "file gone" else ".manifest.json"
                next(path for path in folder.iterdir() if path.name.endswith(suffix)).unlink()
        done = shardckpt.prune(str(tmp_path), keep_last=1)
        assert [step.number for step in done.removed] == [1]
        assert [step.number for step in done.kept] == [2]
        assert [step.number for step in done.incomplete] == [3, 4]
        assert shardckpt.verify(done.kept[0].path).ok

    def test_a_flipped_bit_in_the_newest_is_found_where_that_is_asked_for(self, tmp_path: Path) -> None:
        write(tmp_path, 1, 2, 3, 4)
        for number in (3, 4):
            (path,) = (tmp_path / step_name(number)).glob("*.safetensors")
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        said = shardckpt.prune(str(tmp_path), keep_last=1, dry_run=True)
        assert [step.number for step in said.kept] == [4], "nobody looked"
        done = shardckpt.prune(str(tmp_path), keep_last=1, verify=True)
        assert [step.number for step in done.kept] == [2]
        assert [step.number for step in done.incomplete] == [3, 4]
        assert all("block 0" in step.fault for step in done.incomplete)
        assert sorted(os.listdir(tmp_path)) == [step_name(n) for n in (2, 3, 4)]

    def test_a_step_that_a_trainer_removes_meanwhile_is_not_faulty(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, 1)
        fault, looks = format_steps.manifest_fault, []

        def late(store: Store, step: format_steps.StepFolder) -> str:
            looks.append(step.number)
            if len(looks) == 1:
                write(tmp_path, 2)
                own = LocalStore(str(tmp_path))
                format_steps.delete_steps(own, format_steps.read_run(own), [step_name(1)])
            return fault(store, step)

        monkeypatch.setattr(convert_steps, "manifest_fault", late)
        done = shardckpt.prune(str(tmp_path), keep_last=1, dry_run=True)
        assert [step.number for step in done.kept] == [2]
        assert done.incomplete == ()

    def test_storage_that_refuses_is_told_and_what_is_half_gone_does_not_exist(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, 1, 2, 3)
        unlink = os.unlink

        def refusing(path: str, **options: object) -> None:
            if not path.endswith("COMMIT"):
                raise PermissionError(13, "no")
            unlink(path)

        monkeypatch.setattr(os, "unlink", refusing)
        with pytest.raises(StorageError, match="cannot delete"):
            shardckpt.prune(str(tmp_path), keep_last=1)
        assert complete(tmp_path) == [3]


class TestClocks:
    def test_one_that_was_years_behind_makes_no_step_old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as behind:
            behind.setattr(time, "time_ns", lambda: 10**18)  # in 2001
            write(tmp_path, 1)
        write(tmp_path, 2)
        assert shardckpt.prune(str(tmp_path), keep_for="7d").removed == ()
        assert complete(tmp_path) == [1, 2]

    def test_a_run_that_ended_long_ago_grows_old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, 1, 2)
        days_pass(monkeypatch, 100)
        assert [step.number for step in shardckpt.prune(str(tmp_path), keep_for="7d").removed] == [1]


class TestOrphans:
    def make(self, root: Path) -> list[str]:
        write(root, 1, 2)
        (root / step_name(2) / "COMMIT").unlink()
        partial = f".{step_name(7)}.partial-0123456789ab"
        (root / partial).mkdir()
        (root / partial / "x.safetensors").write_bytes(b"half")
        return [partial, step_name(2)]

    @pytest.mark.parametrize("days", [0, 2])
    def test_the_age_of_an_unfinished_save_is_that_by_the_clock_of_the_store(
        self, days: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        DatedBucket.reset()
        for number in (1, 2):
            shardckpt.save({"w": torch.zeros(4)}, f"bucket://b/run/{step_name(number)}")
        del DatedBucket.objects[f"b/run/{step_name(1)}/COMMIT"]
        DatedBucket.dates = dict.fromkeys([*DatedBucket.objects], days)
        clock_jumps(monkeypatch, 3)
        assert shardckpt.prune("bucket://b/run", keep_last=1).orphans == ((step_name(1),) if days else ())
        assert {name.split("/")[2] for name in DatedBucket.objects} == {step_name(2), *([] if days else [step_name(1)])}

    def test_so_it_is_on_a_disk_which_may_be_that_of_another_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left = self.make(tmp_path)
        clock_jumps(monkeypatch, 3)
        assert shardckpt.prune(str(tmp_path)).orphans == ()
        assert {*left, step_name(1)} == set(os.listdir(tmp_path))
        assert list(shardckpt.prune(str(tmp_path), unfinished_for=0).orphans) == left

    def test_what_a_dead_save_left_stays_for_a_day(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        left = self.make(tmp_path)
        days_pass(monkeypatch, 0.99)
        assert shardckpt.prune(str(tmp_path)).orphans == ()
        assert {*left, step_name(1)} == set(os.listdir(tmp_path))

    def test_then_it_goes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        left = self.make(tmp_path)
        days_pass(monkeypatch, 1.01)
        said = shardckpt.prune(str(tmp_path), dry_run=True)
        assert set(os.listdir(tmp_path)) == {*left, step_name(1)}
        done = shardckpt.prune(str(tmp_path))
        assert list(done.orphans) == list(said.orphans) == left
        assert done.incomplete == ()
        assert os.listdir(tmp_path) == [step_name(1)]

    def test_what_a_process_holds_stays_however_old(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, held = orphans.make_partial(str(tmp_path / step_name(7)))
        days_pass(monkeypatch)
        assert shardckpt.prune(str(tmp_path)).orphans == ()
        os.close(held)
        assert shardckpt.prune(str(tmp_path)).orphans == (os.path.basename(path),)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("name", [".step-00000007.partial-0123456789ab", "step-00000002"])
    @pytest.mark.parametrize("target", ["outside", "missing"])
    def test_a_link_is_no_orphan_and_does_not_stop_the_removal_of_steps(self, name, target, tmp_path):
        ck = shardckpt.Checkpointer(tmp_path / "run", keep_last=1)
        ck.save(3, {"a": 1})
        (tmp_path / "outside").mkdir()
        (tmp_path / "run" / name).symlink_to(tmp_path / target)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ck.save(4, {"a": 1})
        assert ck.steps() == (4,)
        assert shardckpt.prune(str(tmp_path / "run"), unfinished_for=0).orphans == ()
        assert (tmp_path / "run" / name).is_symlink()

    def test_a_file_that_changed_lately_keeps_its_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        partial, _ = self.make(tmp_path)
        changed = LocalStore.changed_at
        days_pass(monkeypatch)
        late = {partial: time.time() - 60}
        monkeypatch.setattr(LocalStore, "changed_at", lambda self, name: late.get(name) or changed(self, name))
        assert shardckpt.prune(str(tmp_path)).orphans == (step_name(2),)


# Killed at every operation


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run", 1, 2, 3, 4)
    return tmp_path / "run"


def check_after_a_kill(root: str, where: str) -> None:
    """What has a COMMIT is whole, the steps that were to stay are listed, and the next run comes to the end."""
    found = shardckpt.ls(root)
    assert {3, 4} <= {step.number for step in found.complete}, where
    for step in (*found.complete, *found.incomplete):
        if "COMMIT" in [entry.name for entry in open_store(step.path).list()]:
            assert shardckpt.verify(step.path).ok, f"{where}: step {step.number} is committed and damaged"
    shardckpt.prune(root, keep_last=2)
    assert complete(root) == [3, 4]


def kill_matrix(folder: Path) -> int:
    """Kill a prune of two steps of four at every operation; return how many there were."""
    k, was_killed = 0, True
    while was_killed:
        k += 1
        root = folder / str(k)
        write(root, 1, 2, 3, 4)
        was_killed = prune_and_die_at(root, k)
        check_after_a_kill(str(root), f"a kill at operation {k}")
    return k - 1


def test_a_prune_killed_at_any_operation_leaves_every_step_complete_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = kill_matrix(tmp_path)
    print(f"killed at each of {operations} operations")
    assert operations == 10, "of each of two steps: COMMIT, its fsync, the manifest, a payload file, the folder"
    days_pass(monkeypatch)
    for root in tmp_path.iterdir():
        shardckpt.prune(str(root))
        assert sorted(os.listdir(root)) == [step_name(3), step_name(4)]


def test_the_matrix_is_red_where_the_commit_does_not_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last(store: Store, folder: str, names: object) -> None:
        for entry in sorted(store.list(folder), key=lambda entry: entry.name.endswith("COMMIT")):
            store.delete(entry.name)
        store.delete_folder(folder)

    monkeypatch.setattr(format_steps, "_delete_mark", lambda *_: None)
    monkeypatch.setattr(LocalStore, "delete_files", last)
    with pytest.raises(AssertionError, match="is committed and damaged"):
        kill_matrix(tmp_path)


def prune_and_die_at(root: Path, k: int) -> bool:
    def work() -> None:
        count = 0

        def before(name: str, args: tuple[object, ...]) -> None:
            nonlocal count
            count += 1
            if count == k:
                os.kill(os.getpid(), signal.SIGKILL)

        with watched(before, lambda *_: None):
            shardckpt.prune(str(root), keep_last=2)

    return is_killed(work)


@pytest.mark.parametrize("how", ["killed", "unheard"])
def test_so_does_one_on_a_store_without_rename(how: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    requests = 0
    for k in range(1, 100):
        Bucket.reset()
        Bucket.objects = {f"b/run/{path.relative_to(run)}": path.read_bytes() for path in run.rglob("*.*")}
        Bucket.objects |= {f"b/run/{p.parent.name}/COMMIT": p.read_bytes() for p in run.glob("*/COMMIT")}
        with broken_at(k, how), suppress(Dead):
            shardckpt.prune("bucket://b/run", keep_last=2)
        requests = len(Bucket.requests)
        Bucket.requests.clear()
        check_after_a_kill("bucket://b/run", f"request {k} {how}")
        if requests < k:
            break
    print(f"{how} at each of {requests} requests")
    assert requests > 15


def test_a_run_in_memory_is_pruned_alike(memory_folder: str, run: Path) -> None:
    fsspec.filesystem("memory").put(str(run), "/some/root", recursive=True)
    assert complete(memory_folder) == [1, 2, 3, 4]
    done = shardckpt.prune(memory_folder, keep_last=1, keep_every=2)
    assert [step.number for step in done.removed] == [1, 3]
    assert complete(memory_folder) == [2, 4]
    assert shardckpt.verify(done.kept[-1].path).ok
    assert {name.split("/")[3] for name in fsspec.filesystem("memory").store} == {step_name(2), step_name(4)}
