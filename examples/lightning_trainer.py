"""Save and resume Lightning's Trainer with one callback.

    pip install '.[lightning]'
    python examples/lightning_trainer.py                                # forks two gloo ranks on the CPU
    torchrun --nproc-per-node 2 examples/lightning_trainer.py           # or any number of ranks

There are three trainings. The first runs to the end. The second stops after step 8; its newest step is 6, in the middle
of an epoch. The third resumes from it, with other random weights at first. Its losses and weights equal those of the
first, bit for bit, with dropout. The position in the data is a state of the loader, valid for any number of ranks.
On GPUs, `strategy="fsdp"` or a `ModelParallelStrategy` changes nothing else.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_resume import CountingSequences
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from train_fsdp import Model, launch, print_rank0

import shardckpt
from shardckpt.data import ElasticBatchSampler
from shardckpt.integrations.lightning import ShardckptModelCheckpoint

STEPS, SAVE_STEPS, STOPPED_AT = 12, 3, 8  # an epoch has five steps


class ElasticLoader(DataLoader):
    """A loader whose state is the position of training; Lightning saves and loads it."""

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return self.batch_sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the position."""
        self.batch_sampler.load_state_dict(state)


class LanguageModule(LightningModule):
    """A plain LightningModule: a small language model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout = Model(), nn.Dropout(0.1)
        self.losses: dict[int, float] = {}

    def train_dataloader(self) -> ElasticLoader:
        """Return the loader of this rank."""
        sampler = ElasticBatchSampler(64, 12, seed=5, drop_last=True)
        return ElasticLoader(CountingSequences(), batch_sampler=sampler)

    def on_train_batch_start(self, *_args: Any) -> None:
        """Advance the position; a loader may have read further."""
        self.trainer.train_dataloader.batch_sampler.advance()

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


def train(folder: Path, seed: int, last: int, *callbacks: Callback, ckpt_path: str | None = None) -> LanguageModule:
    """Train from random weights, or from a step."""
    torch.manual_seed(seed)
    module = LanguageModule()
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_steps=last,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        default_root_dir=str(folder),
        use_distributed_sampler=False,  # the sampler splits batches over ranks
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return module


def compare(folder: Path) -> None:
    """Train three times, and compare."""
    uninterrupted = train(folder, 1, STEPS)

    checkpoint = ShardckptModelCheckpoint(folder / "run", every_n_train_steps=SAVE_STEPS)
    train(folder, 1, STOPPED_AT, checkpoint)
    saved = [step.number for step in shardckpt.ls(folder / "run").complete]

    checkpoint = ShardckptModelCheckpoint(folder / "run", every_n_train_steps=SAVE_STEPS)
    resumed = train(folder, 2, STEPS, checkpoint, ckpt_path="last")
    print_rank0(f"stopped after step {STOPPED_AT}, resumed from step {saved[-1]}")
    for step, loss in resumed.losses.items():
        print_rank0(f"  step {step:2}: loss {loss:.4f}, without interruption {uninterrupted.losses[step]:.4f}")
    pairs = zip(uninterrupted.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(first, third) for first, third in pairs)
    same &= all(uninterrupted.losses[step] == loss for step, loss in resumed.losses.items())
    print_rank0(f"losses and weights: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if not same or min(resumed.losses) != saved[-1] + 1:
        raise SystemExit(1)


def main() -> None:
    """Train on this rank, in a folder of rank 0."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names)
        compare(Path(names[0]))
        dist.barrier()


if __name__ == "__main__":
    launch(main)
