"""A restore waits for the saves that its own Checkpointer has running, and says which of them failed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt import Checkpointer
from shardckpt.checkpoint.save.handle import SaveHandle
from shardckpt.errors import NoSpaceError, RankError, StorageError
from shardckpt.storage.local import LocalWriter
from tests.kit.ranks.harness import run
from tests.kit.ranks.held_saves import holding_saves


def make_state(value: float = 0.0) -> dict:
    return {"w": torch.full((300,), value), "own": shardckpt.PerRank(torch.full((3,), value))}


def restore(ck: Checkpointer, **options: object) -> tuple[int | None, list[str]]:
    """Restore; return the step, whose values have to be its own, and the warnings."""
    into = make_state()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = ck.restore(into, **options)
    assert into["w"].unique().tolist() == [float(step or 0)]
    return step, [str(each.message) for each in told]


def refuse(*_: object) -> None:
    raise NoSpaceError("full")


@pytest.mark.parametrize("asked", [{}, {"step": 2}, {"step": "best"}], ids=["newest", "number", "best"])
def test_a_save_that_is_running_is_restored(asked: dict, tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path, metric="loss", mode="min")
    ck.save(1, make_state(1.0), metrics={"loss": 2.0})
    with holding_saves():
        handle = ck.async_save(2, make_state(2.0), metrics={"loss": 1.0})
        assert (ck.latest(), ck.best(), handle.done()) == (1, 1, False), "they say what is there, and do not wait"
        assert restore(ck, **asked) == (2, [])
    assert ck.latest() == 2


def test_a_save_that_fails_is_told_by_the_restore_and_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[shardckpt.events.RestoreEvent] = []
    ck = Checkpointer(tmp_path)
    ck.save(1, make_state(1.0))
    with monkeypatch.context() as full:
        full.setattr(LocalWriter, "write", refuse)
        ck.async_save(2, make_state(2.0))
        found, told = restore(ck, on_event=lambda e: events.append(e) if e.operation == "restore" else None)
    path = f"{tmp_path}/step-00000002"
    why = f"its save in the background to {path} failed: full"
    assert (found, told) == (1, [f"restored step 1 from the root. Newer step 2 is not used: {why}."])
    assert [event.warnings for event in events] == [(why,)]
    with pytest.raises(StorageError, match=r"the save before this one, in the background to .*step-00000002, failed"):
        ck.save(2, make_state(2.0))
    assert restore(ck) == (1, []), "the error was raised, and is not told again"
    ck.save(2, make_state(2.0))
    assert restore(ck) == (2, [])


def test_an_error_that_result_has_raised_is_not_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ck = Checkpointer(tmp_path)
    ck.save(1, make_state(1.0))
    with monkeypatch.context() as full:
        full.setattr(LocalWriter, "write", refuse)
        handle = ck.async_save(2, make_state(2.0))
        with pytest.raises(StorageError, match="full"):
            handle.result()
    assert restore(ck) == (1, [])


def test_a_restore_after_an_interrupted_wait_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(handle: SaveHandle) -> None:
        raise KeyboardInterrupt

    ck = Checkpointer(tmp_path)
    ck.save(1, make_state(1.0))
    with holding_saves():
        ck.async_save(2, make_state(2.0))
        with monkeypatch.context() as interrupted:
            interrupted.setattr(SaveHandle, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                ck.wait()
        assert restore(ck) == (2, [])


def restore_behind_a_save(rank: int, world: int, root: Path, fails_on: int) -> tuple[int | None, list[str], str]:
    ck, write = Checkpointer(root), LocalWriter.write
    ck.save(1, make_state(1.0))
    LocalWriter.write = refuse if rank == fails_on else write
    ck.async_save(2, make_state(2.0))
    found = restore(ck)
    LocalWriter.write = write
    return *found, catch(lambda: ck.save(2, make_state(2.0), overwrite=True))


def catch(act: Callable[[], object]) -> str:
    try:
        act()
    except (StorageError, RankError) as error:
        return type(error).__name__
    return ""


def test_all_ranks_restore_the_step_of_a_running_save(tmp_path: Path) -> None:
    assert run(2, restore_behind_a_save, tmp_path, -1) == [(2, [], "")] * 2


def test_all_ranks_restore_the_step_before_a_save_that_fails_on_one_of_them(tmp_path: Path) -> None:
    (first, told, failed), second = run(2, restore_behind_a_save, tmp_path, 1)
    assert second == (1, [], "NoSpaceError")
    assert (first, len(told), failed) == (1, 1, "RankError")
    assert "Newer step 2 is not used: its save in the background" in told[0] and "rank 1" in told[0]
