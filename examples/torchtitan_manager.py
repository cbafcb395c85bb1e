"""Save and resume with torchtitan's parts and shardckpt's manager of checkpoints, on the CPU.

    pip install '.[torchtitan]'
    python examples/torchtitan_manager.py                            # forks two gloo ranks on the CPU

The trainer of torchtitan needs a GPU. So this loop calls the manager as the trainer does: it loads first, and saves
after each step. With the trainer, the config is all that changes. One training stops after step 5; its newest step
is 4. Another resumes from it, with other weights at first, and its losses equal those of a training without
interruption, bit for bit.
"""

from __future__ import annotations

import os

os.environ["MKL_CBWR"] = "COMPATIBLE"  # before torch: matrix products that do not depend on the address of a weight

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from train_fsdp import Model, launch, make_batch, print_rank0

import shardckpt
from shardckpt.integrations.torchtitan import CheckpointManager  # was: torchtitan.components.checkpoint

STEPS, STOPPED_AT = 8, 5
CONFIG = CheckpointManager.Config(
    enable=True, interval=2, async_mode="async", keep_latest_k=2, last_save_model_only=False
)


class Training:
    """The parts of a training, and its position."""

    def __init__(self, folder: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.step, self.losses = 0, []
        self.model = Model()
        fully_shard(self.model)
        optimizer = default_adamw(lr=3e-3)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.checkpointer = CONFIG.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
        )
        del self.checkpointer.states["dataloader"]  # batches depend on the step alone

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a position."""
        self.step = state["step"]

    def train(self, last: int) -> None:
        """Load the newest step, and train."""
        self.checkpointer.load()
        print_rank0(f"from step {self.step}")
        while self.step < last:
            self.step += 1
            ids = make_batch(self.step)
            loss = functional.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.losses.append(loss.item())
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()


def main() -> None:
    """Train three times on this rank, in a folder of rank 0."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        names = [name]
        dist.broadcast_object_list(names)
        uninterrupted = Training(f"{names[0]}/a", seed=1)
        uninterrupted.train(STEPS)
        Training(f"{names[0]}/b", seed=1).train(STOPPED_AT)
        resumed = Training(f"{names[0]}/b", seed=2)
        resumed.train(STEPS)
        same = resumed.losses == uninterrupted.losses[-len(resumed.losses) :]
        print_rank0(f"losses: {'equal, bit for bit' if same else 'DIFFERENT'}")
        saved = [step.number for step in shardckpt.ls(Path(names[0]) / "b" / "checkpoint").complete]
        print_rank0(f"steps: {saved}")
        dist.barrier()


if __name__ == "__main__":
    launch(main)
