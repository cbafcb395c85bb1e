"""An incremental save with retention that is killed at any operation: every complete step loads, bit for bit."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import torch

import shardckpt
from shardckpt import Checkpointer
from shardckpt.errors import ShardckptError, StorageError
from shardckpt.native import run_directory
from shardckpt.plan import retention
from shardckpt.storage import retry
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.bucket import Bucket, Dead, broken_at
from tests.kit.stores.disk import killing_at
from tests.kit.stores.faulty import DROP, LOST, Faulty

STRIDE_ON_S3 = 17
"""Odd, so that the requests that are lost took effect, in turn, or did not."""

GOES_ON = 3
"""After every so many-th kill the run goes on; every one is looked at."""


def state(number: int) -> dict:
    """What step `number` holds: one tensor that never changes, one that changes every second step, one always."""
    values = {"never": 0.0, "sometimes": float(number // 2), "always": float(number)}
    return {**{name: torch.full((500,), value) for name, value in values.items()}, "step": number}


def checkpointer(root: str) -> Checkpointer:
    return Checkpointer(root, dedup=True, keep_last=2)


def prepared(root: str) -> None:
    for number in (1, 2, 3):
        checkpointer(root).save(number, state(number))


def save(root: str) -> None:
    """Save a step for which another goes, of which files are needed, and make room for those of a dead save."""
    checkpointer(root).save(4, state(4))


def save_over_a_base(root: str) -> None:
    """Save where only what others refer to lies."""
    checkpointer(root).save(1, state(1))


def prune(root: str) -> None:
    shardckpt.prune(root, keep_last=1)


def save_in_the_background(root: str) -> None:
    """As `save`, while the job goes on and changes everything."""
    changing = state(4)
    handle = checkpointer(root).async_save(4, changing)
    for name in ("never", "sometimes", "always"):
        changing[name].fill_(99)
    handle.result()


CASES = [(save, {2, 3, 4}, 3), (save_over_a_base, {1, 2, 3}, 3), (prune, {2, 3}, 3)]
"""What is done, which steps there may be afterwards, which is always there."""


def check(root: str, allowed: set[int], always: int, k: int) -> None:
    """All complete steps are whole; the run goes on, and removes what nobody needs."""
    what = f"killed at {k}"
    found = [step.number for step in shardckpt.ls(root).complete]
    assert always in found, f"{what}: {found}"
    assert set(found) <= allowed, f"{what}: {found}"
    for number in found:
        whole(root, number, what)
    if k % GOES_ON == 0:
        go_on(root, what)


def go_on(root: str, what: str) -> None:
    """Two more steps are saved, and of all others nothing is left."""
    for number in (5, 6):
        checkpointer(root).save(number, state(number))
        whole(root, number, what)
    listed = shardckpt.ls(root)
    assert [step.number for step in listed.complete] == [5, 6], what
    assert not shardckpt.prune(root).orphans
    assert shardckpt.verify(listed.complete[0].path).ok


def whole(root: str, number: int, what: str) -> None:
    into = state(0)
    shardckpt.load(into, checkpointer(root).path(number), verify="full")
    expected = state(number)
    assert all(torch.equal(into[name], expected[name]) for name in ("never", "sometimes", "always")), (
        f"{what}: {number}"
    )


@pytest.fixture(autouse=True)
def days_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What dead saves leave is garbage at once, and there is nothing to wait for."""
    monkeypatch.setattr(retention, "ORPHAN_TTL_S", -1e9)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)


def die_at(k: int, act, root: str) -> bool:
    def work() -> None:
        torch.set_num_threads(1)
        with killing_at(k):
            act(root)

    return is_killed(work)


def kill_matrix(folder: Path, act, allowed: set[int], always: int, stride: int = 1) -> int:
    """Kill what is done at every so many-th operation; return the last one at which it was."""
    k, was_killed = 1 - stride, True
    prepared(str(folder / "before"))
    while was_killed:
        k += stride
        root = str(folder / str(k))
        shutil.copytree(folder / "before", root)
        was_killed = die_at(k, act, root)
        check(root, allowed, always, k)
    return k - stride


def bucket_matrix(how: str, act, allowed: set[int], always: int) -> int:
    Bucket.reset()
    root = "bucket://b/run"
    prepared(root)
    before = dict(Bucket.objects)
    for k in range(1, 400):
        Bucket.reset()
        Bucket.objects = dict(before)
        with broken_at(k, how), suppress(Dead):
            act(root)
        requests = len(Bucket.requests)
        check(root, allowed, always, k)
        if requests < k:
            return k - 1
    raise AssertionError("never came to an end")


@pytest.mark.parametrize(("act", "allowed", "always"), CASES, ids=lambda each: getattr(each, "__name__", None))
def test_killed_at_any_operation_every_complete_step_loads(tmp_path: Path, act, allowed, always) -> None:
    operations = kill_matrix(tmp_path, act, allowed, always)
    print(f"killed at each of {operations} operations")
    assert operations >= (2 if act is prune else 20)


@pytest.mark.parametrize(("act", "allowed", "always"), CASES, ids=lambda each: getattr(each, "__name__", None))
def test_so_it_is_on_a_store_without_rename(act, allowed, always) -> None:
    requests = sum(bucket_matrix(how, act, allowed, always) for how in ("killed", "unheard"))
    print(f"broken at each of {requests} requests")
    assert requests >= 20


def test_so_it_is_of_a_save_in_the_background(tmp_path: Path) -> None:
    operations = kill_matrix(tmp_path, save_in_the_background, {2, 3, 4}, 3, stride=2)
    print(f"killed at every second of {operations} operations")
    assert operations >= 20


@pytest.mark.shown_by("::test_so_it_is_on_a_store_without_rename")
@pytest.mark.filterwarnings("ignore:step .* is saved, but old ones")
@pytest.mark.usefixtures("s3_driver")
def test_so_it_is_of_one_on_s3(s3: Faulty, s3_bucket: str) -> None:
    fs = fsspec.filesystem("s3")
    prepared(f"{s3_bucket}/before")
    k, made = 1 - STRIDE_ON_S3, 1
    while made >= k:
        k += STRIDE_ON_S3
        root = f"{s3_bucket}/{k}"
        fs.copy(f"{s3_bucket}/before/", f"{root}/", recursive=True)
        s3.arm(lambda number, method, path, k=k: None if number < k else LOST if number == k and k % 2 else DROP)
        with suppress(StorageError):
            save_in_the_background(root)
        made = len(s3.requests)
        s3.heal()
        check(root, {2, 3, 4}, 3, k)
    print(f"cut off at every {STRIDE_ON_S3}th of {made} requests, in turn before and after it took effect")
    assert made >= 20


@pytest.mark.shown_by("::test_killed_at_any_operation_every_complete_step_loads")
class TestMutants:
    def test_removing_all_of_a_step_turns_it_red(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_directory.RunDirectory, "referred", lambda self, but=(): {})
        with pytest.raises((AssertionError, ShardckptError)):
            kill_matrix(tmp_path, save, {2, 3, 4}, 3)

    def test_replacing_what_others_need_turns_it_red(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from shardckpt.checkpoint.save import planner

        monkeypatch.setattr(planner, "read_referred_files", lambda _: ())
        with pytest.raises((AssertionError, ShardckptError)):
            kill_matrix(tmp_path, save_over_a_base, {1, 2, 3}, 3)
