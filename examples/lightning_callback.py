"""Save and resume Lightning's Trainer with a callback: without a plugin, a strategy or another Trainer.

    pip install lightning && python examples/lightning_callback.py

There are three trainings. The first runs to the end. The second stops after step 8; its newest checkpoint is step 6, in
the middle of an epoch. The third resumes from it. Its losses and weights equal those of the first, bit for bit, with
dropout. The batch sampler is the one of `elastic_resume.py`, so training could resume at any world size.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
import torch
from elastic_resume import CountingSequences, ElasticBatchSampler
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from train_fsdp import Model

import shardckpt

STEPS, SAVE_EVERY, STOPPED_AT = 12, 3, 8


class Checkpoints(lightning.Callback):
    """Save steps in the background, and restore the newest one before training begins.

    Args:
        root: Run directory: a path or an fsspec URL.
        save_every: Save every step that is a multiple of this.
        samplers: Batch samplers to save and to advance.
    """

    def __init__(self, root: str | Path, *, save_every: int, **samplers: ElasticBatchSampler) -> None:
        self.steps = shardckpt.Checkpointer(root, save_every=save_every, keep_last=2)
        self.samplers = samplers
        self.restored: int | None = None
        self._generators: dict[str, Any] | None = None
        self._handle: shardckpt.SaveHandle | None = None

    def build_state(self, trainer: lightning.Trainer, rng: shardckpt.RNGState) -> dict[str, Any]:
        """Return the state to save: the module is a `torch.nn.Module`, sharded or not, so it is passed as it is."""
        return {
            "model": trainer.lightning_module,
            "optim": trainer.optimizers,
            "schedules": [config.scheduler for config in trainer.lr_scheduler_configs],
            "loop": trainer.fit_loop.state_dict(),
            "rng": rng,
            **self.samplers,
        }

    def on_fit_start(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        """Restore: the optimizers exist, and the loader has not started."""
        generators = shardckpt.RNGState()
        state = self.build_state(trainer, generators)
        self.restored = self.steps.restore(state)
        if self.restored is not None:
            trainer.fit_loop.load_state_dict(state["loop"])
            self._generators = generators.state_dict()

    def on_train_batch_start(self, *_args: Any) -> None:
        """Restore the RNG states again, because the loader used the generators after `on_fit_start`."""
        if self._generators is not None:
            shardckpt.RNGState().load_state_dict(self._generators)
            self._generators = None

    def on_train_batch_end(self, trainer: lightning.Trainer, *_args: Any) -> None:
        """Save in the background if a step is due; an error of the previous save is raised here."""
        for sampler in self.samplers.values():
            sampler.advance()
        if self.steps.should_save(trainer.global_step):
            self._handle = self.steps.async_save(trainer.global_step, self.build_state(trainer, shardckpt.RNGState()))

    def on_fit_end(self, *_args: Any) -> None:
        """Wait for the last save, and raise its error if it failed."""
        if self._handle is not None:
            self._handle.result()


class LanguageModule(lightning.LightningModule):
    """A plain LightningModule: a small language model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout = Model(), nn.Dropout(0.1)
        self.losses: dict[int, float] = {}

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _number: int) -> torch.Tensor:
        """Return the loss."""
        _, ids = batch
        logits = self.dropout(self.net(ids[:, :-1]))
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with a schedule that advances with each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(
    folder: Path, seed: int, last: int, sampler: ElasticBatchSampler, callbacks: Iterable[lightning.Callback]
) -> LanguageModule:
    """Train from random weights, or from a step that a callback restores."""
    torch.manual_seed(seed)
    module = LanguageModule()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=last,
        callbacks=list(callbacks),
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the sampler splits batches over ranks
    )
    trainer.fit(module, DataLoader(CountingSequences(), batch_sampler=sampler))
    return module


def main() -> None:
    """Train three times, and compare."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samplers = [ElasticBatchSampler(64, 12, 0, 1) for _ in range(3)]
        advancing = Checkpoints(folder / "uninterrupted", save_every=100, sampler=samplers[0])
        uninterrupted = train(folder, 1, STEPS, samplers[0], [advancing])
        stopped = Checkpoints(folder / "run", save_every=SAVE_EVERY, sampler=samplers[1])
        train(folder, 1, STOPPED_AT, samplers[1], [stopped])
        resuming = Checkpoints(folder / "run", save_every=SAVE_EVERY, sampler=samplers[2])
        resumed = train(folder, 2, STEPS, samplers[2], [resuming])
        print(f"stopped after step {STOPPED_AT}, resumed from step {resuming.restored}")
        print(f"complete steps at the end: {resuming.steps.steps()}")
    for step, loss in resumed.losses.items():
        print(f"  step {step:2}: loss {loss:.4f}, without interruption {uninterrupted.losses[step]:.4f}")
    pairs = zip(uninterrupted.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(first, third) for first, third in pairs)
    same &= all(uninterrupted.losses[step] == loss for step, loss in resumed.losses.items())
    print(f"losses and weights: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if not same or min(resumed.losses) != STOPPED_AT // SAVE_EVERY * SAVE_EVERY + 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
