"""With random settings and metrics the callback keeps the steps that the Trainer's own folders are, and its history."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kit.runs.blocks import BLOCKS


class Net(nn.Module):
    """A network with dropout, so that losses show the state of the generators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number >= len(self):  # ends an iteration
            raise IndexError(number)
        # The Trainer groups samples by the length of `input_ids`, which the network does not take.
        x, ids = torch.sin(number * torch.arange(1.0, 5.0)), torch.zeros(number % 7 + 1)
        return {"x": x, "labels": torch.cos(torch.tensor(float(number))), "input_ids": ids}


@dataclass(frozen=True)
class Setting:
    """Arguments of the Trainer, the loss of each evaluation in turn, and the last step of each part of the training."""

    arguments: dict[str, Any]
    losses: list[float]
    ends: list[int]

    @classmethod
    def draw(cls, seed: int) -> Setting:
        draw = random.Random(seed)
        strategy = draw.choice(["steps", "steps", "steps", "epoch", "best", "no"])
        every = draw.choice([1, 2, 3, 5])
        loads_best = strategy != "no" and draw.random() < 0.5
        evaluations = ["steps", "epoch"] if strategy == "best" else ["steps", "epoch", "no"]
        arguments = {
            "save_strategy": strategy,
            "save_steps": every,
            "save_total_limit": draw.choice([None, 1, 1, 2, 3]),
            "load_best_model_at_end": loads_best,
            "eval_strategy": strategy if loads_best and strategy != "best" else draw.choice(evaluations),
            "eval_steps": draw.choice([each for each in (1, every) if every % each == 0]),
            "save_only_model": draw.random() < 0.15,
            "gradient_accumulation_steps": draw.choice([1, 1, 2]),
            "ignore_data_skip": draw.random() < 0.1,
        }
        if loads_best or strategy == "best":
            arguments["metric_for_best_model"] = draw.choice(["loss", "eval_loss"])
            arguments["greater_is_better"] = draw.choice([True, False, None])
        if draw.random() < 0.3:
            arguments["train_sampling_strategy"] = draw.choice(["group_by_length", "sequential"])
        ends = draw.choice([[9], [7, 12], [4, 8, 13]])
        if arguments["save_only_model"] or strategy == "no" or (loads_best and arguments["save_total_limit"] == 1):
            ends = ends[:1]  # the Trainer cannot resume, or has removed the newest at the end and resumes from the best
        return cls(arguments, [draw.choice([0.0, 1.0, 1.0, 2.0, draw.random()]) for _ in range(13)], ends)


def train(setting: Setting, output: Path, steps: Path | None = None) -> list[dict[str, Any]]:
    """Train part by part, each resumed from the one before; what is kept after each. `steps`: with the callback."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from shardckpt.integrations.transformers import ShardckptCallback

    class Evaluated(Trainer):
        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            found = {"eval_loss": setting.losses[self.state.global_step % len(setting.losses)]}
            self.log(found)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            return found

    found = []
    for end in setting.ends:
        arguments = TrainingArguments(
            str(output),
            max_steps=end,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            lr_scheduler_type="constant",
            **setting.arguments,
        )
        callbacks = [] if steps is None else [ShardckptCallback(steps, background=len(setting.ends) > 1)]
        data, net = Samples(), Net()
        trainer = Evaluated(net, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        error = ""
        try:
            trainer.train(resume_from_checkpoint=end != setting.ends[0])
        except Exception as raised:  # noqa: BLE001  (compared)
            error = f"{type(raised).__name__}: {raised}"
        state = trainer.state
        best = state.best_model_checkpoint
        found.append(
            {
                "kept": {number_of(path) for path in (steps or output).glob("*-*")},
                "best": best and number_of(Path(best)),
                "metric": (state.best_metric, state.best_global_step),
                "step": state.global_step,
                "losses": [(each["step"], each.get("loss", each.get("eval_loss"))) for each in state.log_history],
                "weights": [each.tolist() for each in net.parameters()],
                "error": error,
            }
        )
    return found


def number_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", BLOCKS)
def test_steps_are_kept_and_trained_as_by_the_trainer(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        setting, folder = Setting.draw(seed), tmp_path / f"{seed}"
        expected = train(setting, folder / "own")
        kept = train(setting, folder / "output", folder / "run")
        if setting.arguments["load_best_model_at_end"] and setting.arguments["save_total_limit"] == 1:
            for each in kept:  # the Trainer removes the newest at the end
                each["kept"] = {each["best"]} if each["best"] in each["kept"] else each["kept"]
        assert kept == expected, f"seed {seed}: {setting}"


@pytest.mark.filterwarnings("ignore")
def test_batches_of_worker_processes_continue_as_by_the_trainer(tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 3, "dataloader_num_workers": 1}
    setting = Setting({**arguments, "train_sampling_strategy": "group_by_length"}, [0.0], [4, 8])
    assert train(setting, tmp_path / "output", tmp_path / "run") == train(setting, tmp_path / "own")
