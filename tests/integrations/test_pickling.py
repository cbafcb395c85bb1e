"""Callbacks can be pickled and copied, as launchers that spawn processes and searches of hyperparameters do."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import pytest

import shardckpt
from tests.kit.ranks.harness import run

needs_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    from tests.kit.runs import trainers

    assert trainers.Trainer
    if importlib.util.find_spec("lightning") is not None:
        from tests.kit.runs import lightning_trainers

        assert lightning_trainers.Trainer


def make_copy(of: Any, way: str) -> Any:
    return pickle.loads(pickle.dumps(of)) if way == "pickle" else copy.deepcopy(of)


def fit_with_a_copy(rank: int, world: int, folder: Path, way: str) -> tuple[list[int], tuple[int, ...]]:
    """Train with a copy of a callback; the steps, and those that a copy of a used callback sees."""
    from tests.kit.runs import lightning_trainers as trainers

    callback = trainers.ShardckptModelCheckpoint(folder / "run", every_n_train_steps=3, options={"checksums": False})
    used = make_copy(callback, way)
    trainer, net = trainers.build("one", rank, world, folder, used)
    trainer.fit(net, trainers.Data())
    assert used.checkpointer is not callback.checkpointer
    return [step.number for step in shardckpt.ls(folder / "run").complete], make_copy(used, way).checkpointer.steps()


@needs_lightning
@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_of_the_callback_of_lightning_saves_and_removes_as_the_first(way: str, tmp_path: Path) -> None:
    assert run(1, fit_with_a_copy, tmp_path, way) == [([6], (6,))]


@needs_lightning
@pytest.mark.full
def test_a_training_of_spawned_processes_saves_steps(tmp_path: Path) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from shardckpt.integrations.lightning import ShardckptModelCheckpoint

    callback = ShardckptModelCheckpoint(tmp_path / "run", save_top_k=-1, every_n_train_steps=1)
    batches = {"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": 1}
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_spawn",
        callbacks=[callback],
        default_root_dir=tmp_path,
        **batches,
        **QUIET,
    ).fit(BoringModel())
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [1, 2]
    shardckpt.verify(callback.checkpointer.path(2))


def train_with_a_copy(rank: int, world: int, folder: Path, way: str) -> tuple[list[int], tuple[int, ...]]:
    """As another process would: its `Trainer` is as transformers made it when the callback arrives."""
    from shardckpt.integrations.transformers import trainer_folder
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    callback = trainers.ShardckptCallback(folder / "run")
    trainers.Trainer.train = trainers.Trainer.train.__wrapped__
    trainer_folder.wrap_train.cache_clear()
    used = make_copy(callback, way)
    trainer, _ = trainers.build("ddp", folder / "out", used)
    trainer.train()
    return [step.number for step in shardckpt.ls(folder / "run").complete], make_copy(used, way).checkpointer.steps()


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_of_the_callback_of_transformers_saves_as_the_first(way: str, tmp_path: Path) -> None:
    assert run(1, train_with_a_copy, tmp_path, way) == [([3, 6, 8], (3, 6, 8))]
