"""Let transformers' Trainer save in the background and go on from the newest whole step: a callback, no subclass.

    python examples/trainer_callback.py

Three trainings of a small Llama: one to the end, one that is stopped after step 8 (its newest step is 6, in the middle
of an epoch), and one that goes on from there. Losses and weights are those of the first, bit for bit, with dropout.
"""

from __future__ import annotations

import os

# Before torch: nothing may reach for a hub, and matrix products must not depend on where in memory a weight lies.
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
    """Saves steps of a Trainer in the background, and restores the newest one.

    Args:
        root: Folder of the run: a path, or a URL that fsspec knows.
        save_every: Save each step that this divides.
        keep_last: Keep so many of the newest steps.
    """

    def __init__(self, root: str | Path, *, save_every: int, keep_last: int = 2) -> None:
        self.steps = shardckpt.Checkpointer(root, save_every=save_every, keep_last=keep_last)
        self.restored: int | None = None
        self._generators: dict[str, Any] | None = None
        self._under_way: shardckpt.SaveHandle | None = None

    def resume_from(self, folder: Path) -> str | None:
        """Return what to hand to `train(resume_from_checkpoint=...)`, None where there is nothing to go on from.

        The Trainer wants a folder that tells where it was, so that it passes over the batches of the epoch that it had,
        and holds weights. All else is restored in `on_train_begin`.

        Args:
            folder: Where to write it; it is not needed once training has begun.
        """
        saved: dict[str, Any] = {"trainer": ""}
        self.restored = self.steps.restore(saved, partial=["trainer"])
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
        self.steps.restore({**held(kw), "trainer": "", "rng": generators}, step=self.restored)
        # In the middle of an epoch the loader, begun anew, is about to draw from the generator what it drew before.
        per_epoch = state.max_steps // state.num_train_epochs
        self._generators = generators.state_dict() if state.global_step % per_epoch else None

    def on_step_begin(self, *_given: Any, **_kw: Any) -> None:
        """Let the generators go on where they were, if the loader has drawn from them since."""
        if self._generators is not None:
            shardckpt.RNGState().load_state_dict(self._generators)
            self._generators = None

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **kw: Any) -> None:
        """Save in the background where a step is due; what went wrong with the one before is raised here."""
        if self.steps.should_save(state.global_step):
            told = json.dumps(dataclasses.asdict(state))
            saved = {**held(kw), "trainer": told, "rng": shardckpt.RNGState()}
            self._under_way = self.steps.async_save(state.global_step, saved)

    def on_train_end(self, *_given: Any, **_kw: Any) -> None:
        """Wait for the save that is under way, and raise what went wrong with it."""
        if self._under_way is not None:
            self._under_way.result()


def held(given: dict[str, Any]) -> dict[str, Any]:
    """Return what a Trainer holds, of what it hands to a callback."""
    optimizer = given["optimizer"]
    return {
        "model": given["model"],
        "optim": getattr(optimizer, "optimizer", optimizer),  # accelerate's wrapper has the one that we know
        "schedule": given["lr_scheduler"],
    }


class Counting(Dataset):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = (number * 7 + torch.arange(16)) % 128
        return {"input_ids": ids, "labels": ids}


class StopAt(TrainerCallback):
    """Ends training as if the job were over."""

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kw: Any) -> None:
        """Stop."""
        control.should_training_stop = state.global_step == STOPPED_AT


class Losses(TrainerCallback):
    """Keeps the losses that are logged."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_log(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **kw: Any) -> None:
        """Keep one."""
        if "loss" in kw["logs"]:
            self.by_step[state.global_step] = kw["logs"]["loss"]


def train(folder: Path, seed: int, *callbacks: TrainerCallback, resume: str | None = None) -> tuple[Trainer, Losses]:
    """Train from weights that a seed gives, or from what `resume` tells."""
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
    trainer = Trainer(model, arguments, train_dataset=Counting(), callbacks=[losses, *callbacks])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, losses


def main() -> None:
    """Train three times, and compare."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, expected = train(folder, 1)
        train(folder, 1, Checkpoints(folder / "run", save_every=SAVE_EVERY), StopAt())

        callback = Checkpoints(folder / "run", save_every=SAVE_EVERY)
        resumed, found = train(folder, 2, callback, resume=callback.resume_from(folder / "resumed"))
        print(f"stopped after step {STOPPED_AT}, resumed from step {callback.restored}")
        print(f"complete steps at the end: {callback.steps.steps()}")
    for step, loss in found.by_step.items():
        print(f"  step {step:2}: loss {loss:.4f}, without interruption {expected.by_step[step]:.4f}")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    same &= all(expected.by_step[step] == loss for step, loss in found.by_step.items())
    print(f"losses and weights: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if not same or callback.restored != STOPPED_AT // SAVE_EVERY * SAVE_EVERY:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
