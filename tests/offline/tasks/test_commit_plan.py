"""Commits and discards of one plan at once: one ends the plan, the other is refused, and no files of the plan stay."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import ShardckptError, StorageError
from shardckpt.offline.tasks import plan_folder
from shardckpt.offline.tasks.part_results import PartResults
from shardckpt.offline.tasks.task_plan import read_plan
from tests.kit.stores.bucket import Bucket, Dead
from tests.kit.stores.disk import watched

ENDS = {"commit": shardckpt.commit_plan, "discard": shardckpt.discard_plan}
PAIRS = [("commit", "commit"), ("commit", "discard"), ("discard", "commit"), ("discard", "discard")]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with one small file."""
    path = tmp_path_factory.mktemp("source") / "step"
    shardckpt.save({"w": torch.arange(5.0)}, path)
    return path


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def make_plan(plan: Path, step: Path, target: object, **options: object) -> None:
    plan.unlink(missing_ok=True)
    shardckpt.plan_tasks(plan, "consolidate", step, target, tasks=1, **options)
    shardckpt.run_task(plan, 0)


def find_error(act: Callable[[Path], object], plan: Path) -> ShardckptError | None:
    try:
        act(plan)
    except ShardckptError as error:
        return error
    return None


class Interruption:
    """Another process: it acts once, before one of the changes that a block makes.

    Attributes:
        was_made: Whether the block came so far.
        error: What the act raised.
    """

    def __init__(self, number: int, act: str, plan: Path) -> None:
        self._left, self._act, self._plan = number, ENDS[act], plan
        self.was_made, self.error = False, None

    def count(self, *_: object) -> None:
        self._left -= 1
        if not self._left:
            self.was_made = True
            self.error = find_error(self._act, self._plan)


@contextmanager
def on_a_disk(other: Interruption) -> Iterator[None]:
    with watched(other.count, lambda *_: None):
        yield


@contextmanager
def on_a_store(other: Interruption) -> Iterator[None]:
    Bucket.fault = other.count
    yield
    Bucket.fault = None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_one_process_of_a_machine_ends_a_plan_at_a_time(first, second, overwrite, step, tmp_path):
    plan, target = tmp_path / "plan.json", tmp_path / "many"
    shardckpt.consolidate(step, tmp_path / "one")
    expected = read_files(tmp_path / "one")
    for number in range(1, 200):
        shutil.rmtree(target, ignore_errors=True)
        if overwrite:
            shardckpt.consolidate(step, target, dtype="bf16")
        old = read_files(target)
        make_plan(plan, step, target, overwrite=overwrite)
        other = Interruption(number, second, plan)
        with on_a_disk(other):
            assert find_error(ENDS[first], plan) is None, f"change {number}"
        assert read_files(target) == (expected if first == "commit" else old), f"change {number}"
        if not other.was_made:
            break
        assert isinstance(other.error, StorageError), f"change {number}"
        assert not list(tmp_path.glob(".many*")), f"change {number}"
    assert number > 5


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_machines_that_see_no_locks_of_each_other_lose_nothing(first, second, overwrite, step, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_folder, "hold", lambda _: True)
    plan, target = tmp_path / "plan.json", tmp_path / "many"
    shardckpt.consolidate(step, tmp_path / "one")
    expected = read_files(tmp_path / "one")
    for number in range(1, 200):
        shutil.rmtree(target, ignore_errors=True)
        if overwrite:
            shardckpt.consolidate(step, target, dtype="bf16")
        old = read_files(target)
        make_plan(plan, step, target, overwrite=overwrite)
        other = Interruption(number, second, plan)
        with on_a_disk(other):
            error = find_error(ENDS[first], plan)
        if not other.was_made:
            break
        assert not (error and other.error), f"change {number}"
        is_committed = any(act == "commit" and not e for act, e in ((first, error), (second, other.error)))
        assert read_files(target) == (expected if is_committed else old), f"change {number}"
        assert not list(tmp_path.glob(".many*")), f"change {number}"
    assert number > 5


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_store_without_locks_loses_nothing(first, second, bucket, step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.consolidate(step, tmp_path / "one")
    for number in range(1, 200):
        Bucket.reset()
        make_plan(plan, step, f"{bucket}/many")
        other, Bucket.requests = Interruption(number, second, plan), []
        with on_a_store(other):
            error = find_error(ENDS[first], plan)
        if not other.was_made:
            break
        is_committed = any(act == "commit" and not e for act, e in ((first, error), (second, other.error)))
        assert is_committed or not (error and other.error), f"request {number}"
        assert not [name for name in Bucket.objects if "tasks-" in name], f"request {number}"
        if is_committed:
            assert shardckpt.diff(tmp_path / "one", f"{bucket}/many").same, f"request {number}"
        else:
            assert not [name for name in Bucket.objects if name.endswith("index.json")], f"request {number}"
    assert number > 5


def test_a_commit_overtaken_by_another_machine_says_so(step, tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    make_plan(plan, step, tmp_path / "many")
    read_all = PartResults.read_all

    def read_late(results: PartResults, *arguments: object) -> object:
        monkeypatch.undo()
        shardckpt.commit_plan(plan)
        return read_all(results, *arguments)

    monkeypatch.setattr(plan_folder, "hold", lambda _: True)
    monkeypatch.setattr(PartResults, "read_all", read_late)
    with pytest.raises(StorageError, match="the folder of this plan is not here"):
        shardckpt.commit_plan(plan)
    assert shardckpt.diff(step, tmp_path / "many").equal


@pytest.mark.parametrize("act", ENDS)
def test_a_commit_killed_while_it_removes_the_plan_is_known(act, step, tmp_path, monkeypatch):
    """What it has published stays, and the next process removes the rest."""
    plan = tmp_path / "plan.json"
    make_plan(plan, step, tmp_path / "many")
    with monkeypatch.context() as patch, pytest.raises(Dead):
        patch.setattr(PartResults, "remove", lambda _: (_ for _ in ()).throw(Dead))
        shardckpt.commit_plan(plan)
    with pytest.raises(StorageError, match="a plan that was committed"):
        shardckpt.run_task(plan, 0)
    with pytest.raises(StorageError, match="a plan that was committed"):
        ENDS[act](plan)
    assert shardckpt.diff(step, tmp_path / "many").equal
    assert sorted(os.listdir(tmp_path)) == ["many", "plan.json"]


def test_the_rest_of_a_folder_is_removed_by_the_next_discard(step, tmp_path):
    """A discard was killed after it had removed the folder's copy of the plan; a commit removes no work."""
    plan = tmp_path / "plan.json"
    make_plan(plan, step, tmp_path / "many")
    folder = Path(read_plan(plan).folder)
    (folder / "plan.json").unlink()
    left = read_files(folder)
    with pytest.raises(StorageError, match=f"found no {folder}/plan.json"):
        shardckpt.commit_plan(plan)
    assert read_files(folder) == left
    with pytest.raises(StorageError, match="rests of a plan that had ended, which are removed now"):
        shardckpt.discard_plan(plan)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_removal_that_fails_says_why(step, tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    make_plan(plan, step, tmp_path / "many")
    stored, rmdir = read_plan(plan), os.rmdir

    def refuse(path: str) -> None:
        if path == stored.folder:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        rmdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        with pytest.raises(StorageError, match=os.strerror(errno.EPERM)):
            shardckpt.discard_plan(plan)
    with pytest.raises(StorageError, match="removed now"):
        shardckpt.discard_plan(plan)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_verdict_that_could_not_be_written_stays_until_the_next_commit(step, tmp_path):
    plan = tmp_path / "plan.json"
    shardckpt.plan_tasks(plan, "verify", step, tasks=1)
    shardckpt.run_task(plan, 0)

    def fail(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        shardckpt.commit_plan(plan, on_result=fail)
    seen: list[object] = []
    result = shardckpt.commit_plan(plan, on_result=seen.append)
    assert seen == [result] and result.ok
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_result_that_was_published_is_not_kept_for_its_report(step, tmp_path):
    plan = tmp_path / "plan.json"
    make_plan(plan, step, tmp_path / "many")
    with pytest.raises(ZeroDivisionError):
        shardckpt.commit_plan(plan, on_result=lambda _: 1 / 0)
    assert sorted(os.listdir(tmp_path)) == ["many", "plan.json"]


def test_a_late_task_does_not_keep_the_folder_of_a_plan(step, tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    make_plan(plan, step, tmp_path / "many")
    stored, left, rmdir = read_plan(plan), [3], os.rmdir

    def write_first(path: str) -> None:
        if left[0] and path == stored.folder:
            left[0] -= 1
            Path(path, f"late-{left[0]}").write_bytes(b"")
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", write_first)
    shardckpt.discard_plan(plan)
    assert os.listdir(tmp_path) == ["plan.json"] and not left[0]


@pytest.mark.parametrize("where", ["disk", "store"])
def test_a_task_of_a_plan_that_is_discarded_meanwhile_says_so(where, bucket, step, tmp_path):
    plan, ended = tmp_path / "plan.json", 0
    for number in range(1, 200):
        plan.unlink(missing_ok=True)
        shardckpt.plan_tasks(plan, "consolidate", step, f"{bucket}/many" if where == "store" else tmp_path / "many")
        other, Bucket.requests = Interruption(number, "discard", plan), []
        with on_a_store(other) if where == "store" else on_a_disk(other):
            error = find_error(partial(shardckpt.run_task, number=0), plan)
        if not other.was_made:
            break
        assert other.error is None, f"change {number}"
        if error is None:  # it had ended
            ended += 1
        else:
            assert isinstance(error, StorageError), f"change {number}"
            assert "the folder of this plan is not here" in str(error), f"change {number}"
        assert not Bucket.objects and os.listdir(tmp_path) == ["plan.json"], f"change {number}"
        assert not Bucket.uploads, f"change {number}"
    assert number > 5 and ended <= 1
