"""Save and resume a training loop of Accelerate with one call.

    pip install '.[accelerate]'
    python examples/accelerate_training.py                             # forks two gloo ranks on the CPU
    accelerate launch --use_fsdp examples/accelerate_training.py       # on GPUs, with any configuration of FSDP or DDP

A small model is trained three times. The first training runs to the end. The second ends after step 10; its newest
checkpoint is that of step 9, in the middle of an epoch. The third resumes from it, with other random weights at first.
Its losses and weights equal those of the first, bit for bit, with dropout.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_fsdp import launch, print_rank0

from shardckpt.integrations.accelerate import register

EPOCHS, BATCHES, SAVE_EVERY, STOPPED_AFTER = 3, 6, 3, 10


class Training:
    """A model, an optimizer, a scheduler and data, prepared by an accelerator that saves with shardckpt."""

    def __init__(self, folder: Path, seed: int) -> None:
        project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
        order = DataLoaderConfiguration(use_seedable_sampler=True)  # the order of an epoch follows from a seed
        self.accelerator = Accelerator(project_config=project, dataloader_config=order)
        self.checkpoints = register(self.accelerator, background=True)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * EPOCHS * BATCHES)
        inputs = torch.linspace(-3, 3, 48 * 16).reshape(48, 16)
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
        batch_size = 8 // self.accelerator.num_processes
        # With a generator of its own, the loader does not draw from the one that dropout uses.
        loader = DataLoader(data, batch_size=batch_size, shuffle=True, generator=torch.Generator())
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.step = 0
        self.accelerator.register_for_checkpointing(self)
        self.losses: dict[int, float] = {}

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps, which is saved too."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load the number of steps."""
        self.step = state["step"]

    def run(self, end: int) -> None:
        """Train up to a step, and save now and then."""
        while self.step < end:
            epoch, skipped = divmod(self.step, BATCHES)
            self.loader.set_epoch(epoch)
            for inputs, targets in self.accelerator.skip_first_batches(self.loader, skipped):
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.step += 1
                self.losses[self.step] = self.accelerator.reduce(loss.detach(), "mean").item()
                if self.step % SAVE_EVERY == 0:
                    self.accelerator.save_state()
                if self.step == end:
                    break
        self.checkpoints.wait()  # as accelerator.end_training() does


def train(folder: Path) -> None:
    """Train three times, and compare."""
    uninterrupted = Training(folder / "uninterrupted", seed=1)
    uninterrupted.run(EPOCHS * BATCHES)

    Training(folder / "run", seed=1).run(STOPPED_AFTER)

    resumed = Training(folder / "run", seed=2)
    resumed.accelerator.load_state()
    print_rank0(f"stopped after step {STOPPED_AFTER}, resumed from step {resumed.step}")
    resumed.run(EPOCHS * BATCHES)

    expected = {step: loss for step, loss in uninterrupted.losses.items() if step in resumed.losses}
    for step, loss in resumed.losses.items():
        print_rank0(f"  step {step:2}: loss {loss:.4f}, without interruption {expected[step]:.4f}")
    pairs = zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
    same = all(torch.equal(first, third) for first, third in pairs) and resumed.losses == expected
    print_rank0(f"losses and weights: {'equal, bit for bit' if same else 'DIFFERENT'}")
    if not same:
        raise SystemExit(1)


def main() -> None:
    """Train on this rank, in a folder of rank 0."""
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names)
        train(Path(names[0]))


if __name__ == "__main__":
    launch(main)
