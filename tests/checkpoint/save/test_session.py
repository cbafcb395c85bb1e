"""The phases of a save: the table is what happens, on one rank and on two, with failures in each phase."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import shardckpt
from shardckpt.checkpoint.save import session
from shardckpt.checkpoint.save.async_save import SAVES, start_async_save
from shardckpt.checkpoint.save.planner import NO_HOOKS
from shardckpt.checkpoint.save.session import TRANSITIONS, SaveSession
from shardckpt.errors import RankError, StorageError
from tests.kit.ranks.harness import run

CALLS = ("plan", "stage", "write", "commit", "rollback")
STATE = {"w": torch.arange(8.0)}
Transitions = set[tuple[str, str, str]]


def record(body: Callable[[], object]) -> Transitions:
    """Return the phases before and after each call of a save."""
    happened: Transitions = set()

    def recording(
        call: str, real: Callable[..., object], self: SaveSession, *args: object, **options: object
    ) -> object:
        before = self.phase.name
        try:
            return real(self, *args, **options)
        finally:
            happened.add((before, call, self.phase.name))

    with pytest.MonkeyPatch.context() as patched:
        for call in CALLS:
            real = getattr(SaveSession, call)
            patched.setattr(SaveSession, call, lambda *args, c=call, r=real, **o: recording(c, r, *args, **o))
        with suppress(StorageError, RankError, shardckpt.errors.TargetExistsError):
            body()
    return happened


def fail(*_: object, **__: object) -> None:
    raise StorageError("the storage failed")


FAILURES = {
    "none": None,
    "while the files are arranged": "_find_replicas",
    "while the files are written": "write_payloads",
    "while the manifest is written": "encode_manifest",
}


def save_failing(path: Path, name: str | None, *, background: bool, rank: int = 0) -> None:
    with patch.object(session, name, fail) if name and not rank else nullcontext():
        if background:
            shardckpt.async_save(STATE, path).result()
        else:
            shardckpt.save(STATE, path)


def save_over(path: Path) -> None:
    path.mkdir()
    (path / "a file of another tool").touch()
    shardckpt.save(STATE, path)


def fail_after_commit(path: Path) -> None:
    hooks = NO_HOOKS._replace(after_commit=fail)
    start_async_save(SAVES, hooks, STATE, path, {}).result()


def list_transitions(folder: Path, rank: int = 0) -> Transitions:
    found: Transitions = set()
    for background in (False, True):
        for at, (text, name) in enumerate(FAILURES.items()):
            path = folder / f"{at}-{background}"
            found |= record(partial(save_failing, path, name, background=background, rank=rank))
            assert path.exists() == (text == "none")
    return found


def test_the_table_of_phases_is_what_happens(tmp_path):
    happened = list_transitions(tmp_path) | record(partial(save_over, tmp_path / "over"))
    happened |= record(partial(fail_after_commit, tmp_path / "after"))
    assert (tmp_path / "after").exists(), "what is committed stays"
    (tmp_path / "ranks").mkdir()
    for each in run(2, lambda rank, _: list_transitions(tmp_path / "ranks", rank)):
        happened |= each
    allowed = {(before.name, call, after.name) for before, call, after in TRANSITIONS}
    assert happened - allowed == set(), "transitions outside the table"
    assert allowed - happened == set(), "transitions that no save shows"
