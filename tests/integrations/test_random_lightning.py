"""With random settings and metrics the callback keeps the steps, the best and the last that Lightning's own keeps."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.runs.blocks import BLOCKS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


@dataclass(frozen=True)
class Setting:
    """Arguments of `ModelCheckpoint` and of the Trainer, and what is logged.

    `metrics` has the value to log after each step, in turn; `is_logged_in_training`, or else in validation.
    """

    saving: dict[str, Any]
    training: dict[str, Any]
    metrics: list[float]
    is_logged_in_training: bool
    is_resumed: bool

    @classmethod
    def draw(cls, seed: int) -> Setting:
        draw = random.Random(seed)
        monitor = draw.choice([None, "m", "m", "m"])
        saving = {
            "monitor": monitor,
            "mode": draw.choice(["min", "max"]),
            "save_last": draw.choice([None, True, False]),
            "save_weights_only": draw.choice([False, False, True]),
            "save_top_k": draw.choice([1, 2, 3, -1, 0] if monitor else [1, -1, 0]),
            **draw.choice(
                [
                    {"every_n_train_steps": draw.choice([1, 2, 3, 5])},
                    {"every_n_epochs": draw.choice([1, 2])},
                    {},
                ]
            ),
        }
        if draw.random() < 0.3:
            saving["save_on_train_epoch_end"] = draw.choice([True, False])
        training = {
            "max_epochs": draw.choice([1, 2, 3]),
            "limit_train_batches": draw.choice([2, 3, 5]),
            "limit_val_batches": draw.choice([0, 1]),
            "val_check_interval": draw.choice([1.0, 1.0, 0.5]),
        }
        values = [0.0, 1.0, 1.0, 2.0, 3.0, draw.random(), float("nan") if draw.random() < 0.3 else 3.0]
        metrics = [draw.choice(values) for _ in range(11)]
        is_resumed = draw.random() < 0.4 and not saving["save_weights_only"] and saving["save_top_k"] != 0
        if is_resumed:
            saving["save_last"] = True
        return cls(saving, training, metrics, draw.random() < 0.5, is_resumed)


def make_net(setting: Setting) -> Any:
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

    class Net(BoringModel):
        def log_next(self) -> None:
            self.log("m", torch.tensor(setting.metrics[self.trainer.global_step % len(setting.metrics)]))

        def training_step(self, batch: Any, index: int) -> Any:
            if setting.is_logged_in_training:
                self.log_next()
            return super().training_step(batch, index)

        def on_validation_epoch_end(self) -> None:
            if not setting.is_logged_in_training:
                self.log_next()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(RandomDataset(32, 16))

        val_dataloader = train_dataloader

    return Net()


def train(setting: Setting, make_callback: Callable[..., Any], step_of: Callable[[str], int | None]) -> list[Any]:
    """Train, and again with two epochs more if it is resumed; what is kept after each."""
    from lightning.pytorch import Trainer

    found = []
    for more in [0, 2] if setting.is_resumed else [0]:
        callback = make_callback(**setting.saving)
        training = {**setting.training, "max_epochs": setting.training["max_epochs"] + more}
        trainer = Trainer(accelerator="cpu", devices=1, callbacks=[callback], **training, **QUIET)
        error = ""
        try:
            trainer.fit(make_net(setting), ckpt_path="last" if more else None)
        except Exception as raised:  # noqa: BLE001  (compared)
            error = f"{type(raised).__name__}: {raised}"
        last = callback.last_model_path
        score = callback.best_model_score
        found.append(
            {
                "kept": sorted({step_of(str(path)) for path in Path(callback.dirpath).glob("*")}),
                "last": step_of(last) if last else None,
                "best": step_of(callback.best_model_path),
                "score": None if score is None else round(float(score), 5),
                "list": sorted((step_of(path), round(float(at), 5)) for path, at in callback.best_k_models.items()),
                "step": trainer.global_step,
                "error": error,
            }
        )
    return found


def number_in_name(path: str) -> int | None:
    found = re.search(r"step-(\d+)", Path(path).name)
    return int(found[1]) if found else None


def number_in_file(path: str) -> int | None:
    """The last one has no number in its name."""
    if Path(path).name.startswith("last"):
        return int(torch.load(path, weights_only=False)["global_step"])
    return number_in_name(path)


def compare(setting: Setting, folder: Path, background: bool) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from shardckpt.integrations.lightning import ShardckptModelCheckpoint

    def make_own(**saving: Any) -> Any:
        return ModelCheckpoint(folder / "own", "step-{step:08d}", auto_insert_metric_name=False, **saving)

    def make_ours(**saving: Any) -> Any:
        return ShardckptModelCheckpoint(folder / "run", background=background, **saving)

    assert train(setting, make_ours, number_in_name) == train(setting, make_own, number_in_file), setting


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", BLOCKS)
def test_steps_are_kept_as_by_lightning(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        compare(Setting.draw(seed), tmp_path / f"{seed}", background=seed % 2 == 0)


@pytest.mark.filterwarnings("ignore")
def test_a_step_without_the_metric_stays_only_while_it_is_the_last(tmp_path: Path) -> None:
    saving = {"monitor": "m", "save_top_k": -1, "save_last": True}
    training = {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 0}
    setting = Setting(saving, training, [1.0], is_logged_in_training=False, is_resumed=True)
    compare(setting, tmp_path, background=True)
