"""Let Lightning's Trainer save and resume by a callback: no plugin, no strategy, no other Trainer.

    pip install lightning && python examples/lightning_callback.py

Three trainings: one to the end, one that is stopped after step 8 (its newest step is 6, in the middle of an epoch), and
one that goes on from there. Losses and weights are those of the first, bit for bit, with dropout. The order of samples
is that of `elastic_resume.py`, which any number of ranks can go on from.
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
from elastic_resume import Counting, Order
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from train_fsdp import Model

import shardckpt

STEPS, SAVE_EVERY, STOPPED_AT = 12, 3, 8


class Checkpoints(lightning.Callback):
    """Saves steps in the background, and restores the newest one before training begins.

    Args:
        root: Folder of the run: a path, or a URL that fsspec knows.
        save_every: Save each step that this divides.
        more: What else there is to save: the order of samples, for one.
    """

    def __init__(self, root: str | Path, *, save_every: int, **more: Any) -> None:
        self.steps = shardckpt.Checkpointer(root, save_every=save_every, keep_last=2)
        self.more = more
        self.restored: int | None = None
        self._generators: dict[str, Any] | None = None
        self._under_way: shardckpt.SaveHandle | None = None

    def held(self, trainer: lightning.Trainer, rng: shardckpt.RNGState) -> dict[str, Any]:
        """Return what is saved: the module is a `torch.nn.Module`, sharded or not, and needs nothing else."""
        return {
            "model": trainer.lightning_module,
            "optim": trainer.optimizers,
            "schedules": [each.scheduler for each in trainer.lr_scheduler_configs],
            "loop": trainer.fit_loop.state_dict(),
            "rng": rng,
            **self.more,
        }

    def on_fit_start(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        """Restore: optimizers exist by now, and no batch was drawn."""
        generators = shardckpt.RNGState()
        state = self.held(trainer, generators)
        self.restored = self.steps.restore(state)
        if self.restored is not None:
            trainer.fit_loop.load_state_dict(state["loop"])
            self._generators = generators.state_dict()

    def on_train_batch_start(self, *_given: Any) -> None:
        """Let the generators go on where they were: the loader has drawn from them since they were restored."""
        if self._generators is not None:
            shardckpt.RNGState().load_state_dict(self._generators)
            self._generators = None

    def on_train_batch_end(self, trainer: lightning.Trainer, *_given: Any) -> None:
        """Save in the background where a step is due; what went wrong with the one before is raised here."""
        for each in self.more.values():
            each.advance()
        if self.steps.should_save(trainer.global_step):
            self._under_way = self.steps.async_save(trainer.global_step, self.held(trainer, shardckpt.RNGState()))

    def on_fit_end(self, *_given: Any) -> None:
        """Wait for the save that is under way, and raise what went wrong with it."""
        if self._under_way is not None:
            self._under_way.result()


class Counted(lightning.LightningModule):
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
        """Return AdamW with a schedule that goes by steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(folder: Path, seed: int, last: int, order: Order, callbacks: Iterable[lightning.Callback]) -> Counted:
    """Train from weights that a seed gives, or from what a callback restores."""
    torch.manual_seed(seed)
    module = Counted()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=last,
        callbacks=list(callbacks),
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the order knows the ranks itself
    )
    trainer.fit(module, DataLoader(Counting(), batch_sampler=order))
    return module


def main() -> None:
    """Train three times, and compare."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        orders = [Order(64, 12, 0, 1) for _ in range(3)]
        advancing = Checkpoints(folder / "whole", save_every=100, order=orders[0])
        whole = train(folder, 1, STEPS, orders[0], [advancing])
        stopped = Checkpoints(folder / "run", save_every=SAVE_EVERY, order=orders[1])
        train(folder, 1, STOPPED_AT, orders[1], [stopped])
        resuming = Checkpoints(folder / "run", save_every=SAVE_EVERY, order=orders[2])
        resumed = train(folder, 2, STEPS, orders[2], [resuming])
        print(f"stopped after step {STOPPED_AT}, resumed from step {resuming.restored}")
        print(f"complete steps at the end: {resuming.steps.steps()}")
    for step, loss in resumed.losses.items():
        print(f"  step {step:2}: loss {loss:.4f}, without interruption {whole.losses[step]:.4f}")
    same = all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))
    same &= all(whole.losses[step] == loss for step, loss in resumed.losses.items())
    print(f"losses and weights: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if not same or min(resumed.losses) != STOPPED_AT // SAVE_EVERY * SAVE_EVERY + 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
