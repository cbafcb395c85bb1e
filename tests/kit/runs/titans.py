"""A small training with torchtitan's own components, as its trainer drives them, on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from shardckpt.integrations.torchtitan import CheckpointManager

__all__ = ["CheckpointManager", "TitanCheckpointManager", "Training", "train", "train_and_die"]

STEPS = 8


class Numbers(IterableDataset):
    """Samples of one rank, with a position."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            generator = torch.Generator().manual_seed(1000 * self.rank + self.at)
            yield torch.randn(6, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Net(nn.Sequential):
    """A small model."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


class Metrics:
    """Metrics of the first step and of each tenth."""

    def __init__(self) -> None:
        self.logged: list[int] = []

    def should_log(self, step: int) -> bool:
        return step == 1 or step % 10 == 0

    def log(self, step: int, *values: float, extra_metrics: dict[str, Any]) -> None:
        self.logged.append(step)


class Training:
    """Model, optimizer, schedule, loader and manager; the methods that torchtitan's `Trainer` has."""

    def __init__(
        self, base: Path, manager: Any, seed: int = 1, adapter: Any = None, accumulated: int = 1, **config: Any
    ) -> None:
        torch.manual_seed(seed)
        self.step, self.losses, self.seen, self.accumulated = 0, {}, 0, accumulated
        self.metrics_processor = Metrics()
        self.model = Net()
        self.model_parts = [self.model]
        fully_shard(self.model)
        optimizer = default_adamw(lr=1e-2)
        optimizer.implementation = "for-loop"
        self.optimizers = optimizer.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.loader = ParallelAwareDataloader(Numbers(rank), rank, world, batch_size=2)
        self.checkpointer = manager.Config(enable=True, **config).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=adapter,
            base_folder=str(base),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seen = state["step"], state["ntokens_seen"]

    def train(self, until: int = STEPS, step: int = -1) -> dict[int, float]:
        """Load, train and save as `Trainer.train` does; the losses of this rank by step."""
        self.checkpointer.load(step=step)
        batches = iter(self.loader)
        while self.step < until:
            self.step += 1
            self.train_step(batches)
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
        return self.losses

    def train_step(self, batches: Iterator[torch.Tensor]) -> None:
        """Train a step of some batches, as `Trainer.train_step` does, which logs the first step and each tenth."""
        self.optimizers.zero_grad()
        losses = []
        for _ in range(self.accumulated):
            batch = next(batches)
            self.seen += len(batch)
            losses.append(self.compute_loss(batch))
            losses[-1].backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedulers.step()
        loss = sum(losses).item()
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(self.step, loss, loss, norm.item(), extra_metrics={})
        self.losses[self.step] = loss

    def compute_loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.model(batch) - batch.flip(0)).square().mean()

    def full(self) -> dict[str, torch.Tensor]:
        """Return the full weights and moments."""
        assert isinstance(self.model, FSDPModule)
        states = {**self.model.state_dict(), **self.optimizers.state_dict()}
        return {name: value.full_tensor() for name, value in states.items() if isinstance(value, DTensor)}

    def close(self) -> None:
        """Wait for a save in the background, as a process that ends does."""
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()


def train(base: Path, manager: Any = CheckpointManager, until: int = STEPS, **config: Any) -> dict[int, float]:
    training = Training(base, manager, **config)
    losses = training.train(until)
    training.close()
    return losses


def train_and_die(base: Path, until: int, **config: Any) -> None:
    training = Training(base, CheckpointManager, **config)
    training.train(until)
    training.checkpointer.maybe_wait_for_saving()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
