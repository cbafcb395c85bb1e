"""Saves, loads, restores, removals and fallbacks give one event each, with its bytes and phases, on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import shardckpt
from shardckpt.events import FallbackEvent, LoadEvent, OperationEvent, PruneEvent, RestoreEvent, SaveEvent, subscribe
from tests.kit.ranks.harness import run

STATE = {"t": torch.arange(1000.0)}


def damage(step: Path) -> None:
    """Change a byte of the tensors of a step."""
    file = next(path for path in step.iterdir() if path.suffix == ".safetensors" and path.stat().st_size > 4000)
    with file.open("r+b") as opened:
        opened.seek(-5, os.SEEK_END)
        opened.write(b"\x99")


def test_saves_and_loads_give_one_event_each(tmp_path: Path) -> None:
    seen: list[OperationEvent] = []
    end = subscribe(seen.append)
    shardckpt.save(STATE, tmp_path / "step-3")
    shardckpt.async_save(STATE, tmp_path / "b").result()
    shardckpt.load({"t": torch.zeros(1000)}, tmp_path / "step-3")
    shardckpt.load(tmp_path / "b")
    end()
    shardckpt.load(tmp_path / "b")
    save, background, into_state, tree = seen
    assert [type(event) for event in seen] == [SaveEvent, SaveEvent, LoadEvent, LoadEvent]
    assert [event.step for event in seen] == [3, None, 3, None]
    assert (save.is_background, background.is_background) == (False, True)
    assert list(save.phases) == ["waiting", "capture", "write", "publish"]
    assert set(background.phases) == {"waiting", "capture", "staging", "write", "publish"}
    assert 4000 < save.nbytes == background.nbytes < 9000, "the tensor and a header"
    assert list(into_state.phases) == ["plan", "read"]
    assert into_state.nbytes == tree.nbytes == 4000
    assert all(event.seconds >= sum(event.phases.values()) * 0.99 > 0 for event in (save, into_state, tree))


FAILING = """
import logging, sys, torch, shardckpt
from shardckpt.storage.local import LocalWriter

def fail(self, data):
    raise OSError(28, "No space left on device")

LocalWriter.write = fail
if sys.argv[2] == "logged":
    logging.basicConfig()
    shardckpt.async_save({"t": torch.ones(9)}, sys.argv[1]).result()
shardckpt.async_save({"t": torch.ones(9)}, sys.argv[1])
"""


@pytest.mark.parametrize(
    ("how", "begin"), [("unasked", "the save in the background"), ("logged", "ERROR:shardckpt:save ")]
)
def test_a_failure_is_on_stderr_once_unless_logging_is_configured(how: str, begin: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FAILING, str(tmp_path / "step-1"), how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    first, *others = [line for line in done.stderr.splitlines() if "No space left" in line]
    assert first.startswith(begin)
    assert (others == []) == (how == "unasked")


def test_what_fails_gives_an_event_with_the_error(tmp_path: Path) -> None:
    seen: list[OperationEvent] = []
    shardckpt.save(STATE, tmp_path / "a")
    for verb in (shardckpt.save, shardckpt.async_save):
        with pytest.raises(shardckpt.errors.TargetExistsError):
            verb(STATE, tmp_path / "a", on_event=seen.append)
    with pytest.raises(shardckpt.errors.SourceNotFoundError):
        shardckpt.load({}, tmp_path / "missing", on_event=seen.append)
    errors = [(type(event), type(event.error)) for event in seen]
    assert errors == [
        (SaveEvent, shardckpt.errors.TargetExistsError),
        (SaveEvent, shardckpt.errors.TargetExistsError),
        (LoadEvent, shardckpt.errors.SourceNotFoundError),
    ]


def test_a_run_tells_of_its_saves_removals_fallbacks_and_restores(tmp_path: Path) -> None:
    seen: list[OperationEvent] = []
    ck = shardckpt.Checkpointer(tmp_path, keep_last=2, on_event=seen.append)
    ck.save(1, STATE)
    ck.async_save(2, STATE).result()
    ck.async_save(3, STATE).result()
    assert [(type(event), event.step) for event in seen[:3]] == [(SaveEvent, 1), (SaveEvent, 2), (SaveEvent, 3)]
    (pruned,) = seen[3:]
    assert isinstance(pruned, PruneEvent)
    assert pruned.removed == (1,)
    assert pruned.nbytes > 4000
    seen.clear()
    damage(tmp_path / "step-00000003")
    with pytest.warns(UserWarning, match="restored step 2"):
        assert ck.restore({"t": torch.zeros(1000)}) == 2
    assert [type(event) for event in seen] == [LoadEvent, FallbackEvent, LoadEvent, RestoreEvent]
    _, fallback, load, restore = seen
    assert (fallback.step, restore.step, restore.nbytes) == (3, 2, load.nbytes)
    assert restore.warnings == fallback.warnings, "on rank 0"
    assert "block" in restore.warnings[0]
    seen.clear()
    end = subscribe(seen.append)
    shardckpt.prune(tmp_path, keep_last=1)
    end()
    assert [(type(event), event.removed) for event in seen] == [(PruneEvent, (2,))]


def test_a_removal_that_fails_gives_an_event_with_the_error(tmp_path: Path) -> None:
    seen: list[OperationEvent] = []
    ck = shardckpt.Checkpointer(tmp_path, keep_last=1, on_event=seen.append)
    ck.save(1, STATE)
    failing = patch(
        "shardckpt.checkpoint.run.save_schedule.apply_retention", side_effect=shardckpt.errors.StorageError("x")
    )
    with failing, pytest.warns(UserWarning, match="could not be removed"):
        ck.save(2, STATE)
    assert [type(event.error) for event in seen] == [type(None), type(None), shardckpt.errors.StorageError]


def events_of_ranks(rank: int, world: int, folder: Path) -> list[tuple[Any, ...]]:
    seen: list[OperationEvent] = []
    state = {"t": torch.arange(1000.0), "own": shardckpt.PerRank(torch.ones(1000))}
    ck = shardckpt.Checkpointer(folder, on_event=seen.append)
    ck.save(1, state)
    ck.async_save(2, state).result()
    ck.restore(state)
    return [(event.operation, event.rank, event.step, event.nbytes >= 4000) for event in seen]


def test_each_rank_tells_of_itself(tmp_path: Path) -> None:
    for rank, told in enumerate(run(2, events_of_ranks, tmp_path)):
        assert told == [
            ("save", rank, 1, True),
            ("save", rank, 2, True),
            ("load", rank, 2, True),
            ("restore", rank, 2, True),
        ]
