"""A folder that this user may not read is a `StorageError` of each integration, as of `load` and `ls`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardckpt
from tests.kit.ranks.harness import run

NOBODY = 65534


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    from tests.kit.runs import accelerators, lightning_trainers, trainers

    assert accelerators and lightning_trainers and trainers


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every user may enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="shardckpt-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def make_closed(folder: Path, mode: int) -> Path:
    """Make a folder with some permissions alone, and become a user that is not root."""
    folder.mkdir()
    folder.chmod(mode)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    return folder


def load_with_accelerate(folder: Path, path: Path) -> None:
    from shardckpt.integrations.accelerate import register
    from tests.kit.runs import accelerators

    training = accelerators.Training("ddp")
    register(training.accelerator)
    training.accelerator.load_state(path)


def load_with_trainer(folder: Path, path: Path) -> None:
    from tests.kit.runs import trainers

    trainer, _ = trainers.build("ddp", path, trainers.ShardckptCallback(folder / "run"))
    trainer.train(resume_from_checkpoint=True)


def load_with_lightning(folder: Path, path: Path) -> None:
    from tests.kit.runs import lightning_trainers

    saving = lightning_trainers.ShardckptModelCheckpoint(folder / "run")
    trainer = lightning_trainers.Trainer(
        max_steps=1, logger=False, accelerator="cpu", enable_progress_bar=False, callbacks=[saving]
    )
    trainer.fit(lightning_trainers.Net("one", 0.0), lightning_trainers.Data(), ckpt_path=path)


def fail_to_load(rank: int, world: int, load: Callable[[Path, Path], Any], mode: int, name: str, folder: Path) -> str:
    """Return what the error says."""
    from tests.kit.runs import accelerators

    accelerators.be_rank(rank, world)
    closed = make_closed(folder / "closed", mode)
    os.chdir(folder)
    with pytest.raises(shardckpt.errors.StorageError) as caught:
        load(folder, closed / name)
    return str(caught.value)


@pytest.mark.parametrize(
    ("load", "mode", "name", "words"),
    [
        (load_with_accelerate, 0o600, "", "cannot look at it"),
        (load_with_accelerate, 0o600, "a", "cannot look at it"),
        (load_with_accelerate, 0o311, "", "cannot list"),
        (load_with_trainer, 0o311, "", "cannot list"),
        (load_with_lightning, 0o600, "step-00000001", "cannot look at it"),
    ],
)
def test_a_folder_without_permission_is_no_missing_one(
    load: Callable[[Path, Path], Any], mode: int, name: str, words: str, open_folder: Path
) -> None:
    (message,) = run(1, fail_to_load, load, mode, name, open_folder)
    assert f"{words}; found Permission denied. Check the permissions." in message
