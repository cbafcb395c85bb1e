"""A step after whose restore the run fails again and again is passed over, with a word."""

from __future__ import annotations

import os
import re
import signal
import warnings
from pathlib import Path

import pytest
import torch

from shardckpt import Checkpointer, Local
from shardckpt.errors import StorageError, TargetExistsError, UsageError
from shardckpt.native.run_directory import RECORD
from shardckpt.native.run_record import read_run_record
from shardckpt.storage.local import LocalStore
from tests.kit.ranks.forks import is_killed
from tests.kit.ranks.harness import run


def make(folder: Path, **options: object) -> Checkpointer:
    tiers = [Local(folder / "local", keep_last=3)]
    return Checkpointer(folder / "run", save_every=2, tiers=tiers, **options)


def state(value: int = 0) -> dict:
    return {"w": torch.full((8,), float(value)), "step": value}


def save(ck: Checkpointer, *steps: int) -> None:
    for step in steps:
        ck.save(step, state(step))
    ck.wait()


def list_counts(folder: Path) -> dict:
    counts = read_run_record(LocalStore(str(folder / "run"))).count_failures()
    return {order: count for order, count in counts.items() if count}


def restore(ck: Checkpointer, **options: object) -> tuple[int | None, bool]:
    """Return the step, whose values have to be its own, and whether a step was passed over with a word."""
    into = state()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        step = ck.restore(into, **options)
    assert into["step"] == (step or 0)
    text = "".join(str(each.message) for each in warned)
    is_passed_over = re.match(
        r"restored step \d from the [a-z ]+\. Newer step \d is not used: it is passed over: the run", text
    )
    return step, is_passed_over is not None


def test_a_step_after_whose_restore_the_run_was_killed_twice_is_passed_over(tmp_path):
    save(make(tmp_path), 1, 2, 3)

    def die_after_restore() -> None:
        assert restore(make(tmp_path)) == (3, False)
        os.kill(os.getpid(), signal.SIGKILL)

    assert is_killed(die_after_restore) and is_killed(die_after_restore)
    ck = make(tmp_path)
    assert restore(ck) == (2, True)
    assert ck.should_save(3)
    save(ck, 3, 4)
    assert restore(make(tmp_path)) == (4, False), "what was saved since is newer than the step that was passed over"


def test_only_the_number_of_a_step_that_is_passed_over_is_saved_again(tmp_path):
    def start() -> Checkpointer:
        return Checkpointer(tmp_path, max_failed_restores=1)

    save(start(), 1, 2, 3)
    assert restore(start()) == (3, False)
    ck = start()
    assert restore(ck) == (2, True)
    save(ck, 3)
    assert restore(start()) == (3, False)
    ck = start()
    assert restore(ck, step=1) == (1, False)
    with pytest.raises(TargetExistsError):
        save(ck, 2)


def test_a_step_that_was_completed_after_the_restore_ends_the_count(tmp_path):
    save(make(tmp_path), 1, 2)
    for _ in range(3):
        ck = make(tmp_path)
        assert restore(ck) == (2, False)
        ck.should_save(2)
        assert list_counts(tmp_path) == {(1, 2): 1}
        ck.should_save(3)
        assert list_counts(tmp_path) == {}


def test_the_only_step_and_a_step_that_is_named_are_never_passed_over(tmp_path):
    save(make(tmp_path), 1)
    for _ in range(4):
        ck = make(tmp_path)
        assert restore(ck) == (1, False)
    save(ck, 2)
    for _ in range(2):
        assert restore(make(tmp_path)) == (2, False)
    assert restore(make(tmp_path), step=2) == (2, False)
    assert restore(make(tmp_path)) == (1, True)
    (tmp_path / "run" / RECORD).unlink()
    assert restore(make(tmp_path)) == (2, False), "without the record the step is tried again"


@pytest.mark.parametrize(("most", "tried"), [(0, 6), (1, 1), (3, 3)])
def test_the_user_chooses_how_often_a_step_is_tried(tmp_path, most, tried):
    save(make(tmp_path), 1, 2)
    found = [restore(make(tmp_path, max_failed_restores=most))[0] for _ in range(tried)]
    assert found == [2] * tried
    if most:
        assert restore(make(tmp_path, max_failed_restores=most)) == (1, True)


def test_a_run_without_tiers_counts_nothing_unless_it_is_asked_to(tmp_path):
    save(Checkpointer(tmp_path / "run"), 1, 2)
    for _ in range(4):
        assert restore(Checkpointer(tmp_path / "run")) == (2, False)
    assert not (tmp_path / "run" / RECORD).exists()
    assert restore(Checkpointer(tmp_path / "run", max_failed_restores=1)) == (2, False)
    assert restore(Checkpointer(tmp_path / "run", max_failed_restores=1)) == (1, True)
    for wrong in (-1, True, "2", 1.5):
        with pytest.raises(UsageError, match="`max_failed_restores` must be an integer from 0"):
            Checkpointer(tmp_path, max_failed_restores=wrong)


def test_a_root_that_takes_no_record_does_not_fail_the_restore(tmp_path, monkeypatch, caplog):
    save(make(tmp_path), 1, 2)

    def refuse(self, name: str):
        raise StorageError("read only")

    monkeypatch.setattr(LocalStore, "create", refuse)
    for _ in range(3):
        assert restore(make(tmp_path)) == (2, False)
    assert "is not recorded" in caplog.text


def test_all_ranks_pass_over_the_same_step(tmp_path):
    def start(rank: int, world: int, folder: str) -> list:
        found = [restore(make(Path(folder))) for _ in range(3)]
        return [step for step, _ in found]

    save(make(tmp_path), 1, 2)
    assert run(2, start, str(tmp_path)) == [[2, 2, 1], [2, 2, 1]]
