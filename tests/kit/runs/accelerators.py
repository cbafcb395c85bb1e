"""Small trainings with Accelerate for tests, on forked ranks: DDP, FSDP1 and FSDP2 on the CPU."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.state
import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES, SAMPLES = 4, 48  # the samples of a step do not depend on the number of ranks


def shard_on_the_cpu() -> None:
    """Make accelerate use FSDP without an accelerator, which it does not."""
    begin = accelerate.state.AcceleratorState.__init__

    def begin_with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kw: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kw)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            self.device = torch.device("cpu")  # FSDP1 refuses "cpu:0"
            accelerate.state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    accelerate.state.AcceleratorState.__init__ = begin_with_fsdp


def be_rank(rank: int, world: int) -> None:
    """Tell accelerate which rank this fork is."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    ranks["OMP_NUM_THREADS"] = 1
    os.environ.update({name: str(number) for name, number in ranks.items()}, ACCELERATE_USE_CPU="true")
    shard_on_the_cpu()


class Block(nn.Module):
    """Linear layer with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.dropout(torch.tanh(self.linear(values)))


class Average:
    """Running mean of the losses: an object for `register_for_checkpointing`."""

    def __init__(self) -> None:
        self.values = torch.zeros(2)

    def add(self, loss: float) -> None:
        self.values += torch.tensor([loss, 1.0])

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "kind": "mean"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Training:
    """A model, an optimizer, a scheduler, data and an average, prepared by an accelerator."""

    def __init__(self, kind: str, *, seed: int = 1, dropout: float = 0.2, project: Any = None, stateful: bool = False):
        plugin = None
        if kind != "ddp":
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=int(kind[-1]),
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
                use_orig_params=True,
                sync_module_states=False,
                state_dict_type="SHARDED_STATE_DICT",
            )
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(seed)
        world = int(os.environ["WORLD_SIZE"])
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=plugin,
            gradient_accumulation_steps=2,
            step_scheduler_with_optimizer=False,  # otherwise it steps as often as there are ranks
            project_config=ProjectConfiguration(**(project or {})),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful),
        )
        model = nn.Sequential(nn.Linear(8, 8), Block(dropout), Block(dropout), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        inputs = torch.linspace(-1, 1, SAMPLES * 8).reshape(SAMPLES, 8)
        data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
        drawn = torch.Generator()  # not from the generator that dropout uses: an iterator draws from it when it begins
        loader = DataLoader(data, batch_size=SAMPLES // BATCHES // world, shuffle=True, generator=drawn)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)
        self.losses: dict[int, tuple[float, float]] = {}

    def batches(self, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches from a step on, without end."""
        epoch, batch = divmod(start, BATCHES)
        while True:
            self.loader.set_epoch(epoch)
            yield from self.accelerator.skip_first_batches(self.loader, batch) if batch else self.loader
            epoch, batch = epoch + 1, 0

    def run(self, start: int, end: int) -> None:
        """Train from one step to another; note loss and mean loss by step."""
        for step, (inputs, targets) in zip(range(start, end), self.batches(start), strict=False):
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            mean = self.accelerator.reduce(loss.detach(), "mean").item()
            self.average.add(mean)
            self.losses[step] = (loss.item(), self.average.values[0].item() / self.average.values[1].item())


def kill() -> None:
    """End this process without a warning."""
    os.kill(os.getpid(), signal.SIGKILL)


def damage(step: Path) -> None:
    """Flip a bit in the last byte of each payload file of a step."""
    for file in step.glob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def wait_for(file: Path, seconds: float = 30.0) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
