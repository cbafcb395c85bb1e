"""Save and resume transformers' Trainer with a callback: saves run in the background.

    python examples/trainer_callback.py

A small Llama is trained three times. The first training runs to the end. The second stops after step 8; its newest
checkpoint is step 6, in the middle of an epoch. The third resumes from it. Its losses and weights equal those of the
first, bit for bit, with dropout.
"""

from __future__ import annotations

import os

# Set before torch is imported: no downloads, and matrix products that do not depend on the address of a weight.
os.environ.update(HF_HUB_OFFLINE="1", MKL_CBWR="COMPATIBLE", TOKENIZERS_PARALLELISM="false")

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import shardckpt

STEPS, SAVE_EVERY, STOPPED_AT = 12, 3, 8


class Checkpoints(TrainerCallback):
    """Save steps of a Trainer in the background, and restore the newest one.

    Args:
        root: Run directory: a path or an fsspec URL.
        save_every: Save every step that is a multiple of this.
        keep_last: Number of newest steps to keep.
    """

    def __init__(self, root: str | Path, *, save_every: int, keep_last: int = 2) -> None:
        self.steps = shardckpt.Checkpointer(root, save_every=save_every, keep_last=keep_last)
        self.restored: int | None = None
        self._generators: dict[str, Any] | None = None
        self._handle: shardckpt.SaveHandle | None = None

    def resume_from(self, folder: Path) -> str | None:
        """Return the folder for `train(resume_from_checkpoint=...)`, or None for an empty run.

        The Trainer needs a folder with weights and with its position, so that it skips the batches that it has already
        used. `on_train_begin` restores everything else.

        Args:
            folder: The folder to write. It can be deleted once training has begun.
        """
        saved: dict[str, Any] = {"trainer": ""}
        self.restored = self.steps.restore(saved, include=["trainer"])
        if self.restored is None:
            return None
        shardckpt.consolidate(self.steps.path(self.restored), folder)
        (folder / "trainer_state.json").write_text(saved["trainer"])
        return str(folder)

    def on_train_begin(
        self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **kw: Any
    ) -> None:
        """Restore everything."""
        if self.restored is None:
            return
        generators = shardckpt.RNGState()
        self.steps.restore({**build_state(kw), "trainer": "", "rng": generators}, step=self.restored)
        # In the middle of an epoch the new loader will draw the same random numbers again.
        per_epoch = state.max_steps // state.num_train_epochs
        self._generators = generators.state_dict() if state.global_step % per_epoch else None

    def on_step_begin(self, *_args: Any, **_kw: Any) -> None:
        """Restore the RNG states again, if the loader has used the generators since `on_train_begin`."""
        if self._generators is not None:
            shardckpt.RNGState().load_state_dict(self._generators)
            self._generators = None

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **kw: Any) -> None:
        """Save in the background if a step is due; an error of the previous save is raised here."""
        if self.steps.should_save(state.global_step):
            trainer = json.dumps(dataclasses.asdict(state))
            saved = {**build_state(kw), "trainer": trainer, "rng": shardckpt.RNGState()}
            self._handle = self.steps.async_save(state.global_step, saved)

    def on_train_end(self, *_args: Any, **_kw: Any) -> None:
        """Wait for the last save, and raise its error if it failed."""
        if self._handle is not None:
            self._handle.result()


def build_state(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the objects to save, from the keyword arguments of a callback."""
    optimizer = arguments["optimizer"]
    return {
        "model": arguments["model"],
        "optim": getattr(optimizer, "optimizer", optimizer),  # remove accelerate's wrapper
        "schedule": arguments["lr_scheduler"],
    }


class CountingSequences(Dataset):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (number * 7 + torch.arange(16)) % 128
        return {"input_ids": ids, "labels": ids}


class StopAt(TrainerCallback):
    """Stop training early, like the end of a job."""

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kw: Any) -> None:
        """Stop after `STOPPED_AT` steps."""
        control.should_training_stop = state.global_step == STOPPED_AT


class Losses(TrainerCallback):
    """Record the logged losses."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_log(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **kw: Any) -> None:
        """Record a loss."""
        if "loss" in kw["logs"]:
            self.by_step[state.global_step] = kw["logs"]["loss"]


def train(folder: Path, seed: int, *callbacks: TrainerCallback, resume: str | None = None) -> tuple[Trainer, Losses]:
    """Train from random weights, or resume from a folder."""
    set_seed(seed)
    losses = Losses()
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        num_train_epochs=3,  # of four steps
        per_device_train_batch_size=5,
        learning_rate=1e-2,
        seed=11,
        logging_steps=1,
        save_strategy="no",  # the callback saves
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(model, arguments, train_dataset=CountingSequences(), callbacks=[losses, *callbacks])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, losses


def main() -> None:
    """Train three times, and compare."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        uninterrupted, expected = train(folder, 1)
        train(folder, 1, Checkpoints(folder / "run", save_every=SAVE_EVERY), StopAt())

        callback = Checkpoints(folder / "run", save_every=SAVE_EVERY)
        resumed, losses = train(folder, 2, callback, resume=callback.resume_from(folder / "resumed"))
        print(f"stopped after step {STOPPED_AT}, resumed from step {callback.restored}")
        print(f"complete steps at the end: {callback.steps.steps()}")
    for step, loss in losses.by_step.items():
        print(f"  step {step:2}: loss {loss:.4f}, without interruption {expected.by_step[step]:.4f}")
    pairs = zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(first, third) for first, third in pairs)
    same &= all(expected.by_step[step] == loss for step, loss in losses.by_step.items())
    print(f"losses and weights: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if not same or callback.restored != STOPPED_AT // SAVE_EVERY * SAVE_EVERY:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
