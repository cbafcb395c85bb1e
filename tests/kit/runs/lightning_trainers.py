"""Small Trainers of Lightning for tests, on forked ranks: DDP, FSDP1 and FSDP2 on the CPU."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from shardckpt.integrations.lightning import ShardckptModelCheckpoint

__all__ = ["EMAWeightAveraging", "EarlyStopping", "MixedPrecision", "ModelCheckpoint", "ShardckptModelCheckpoint"]

STEPS, BATCH = 4, 12  # of an epoch; the samples of a step do not depend on the number of ranks


class ShardingOnCPU(FSDPStrategy):
    """FSDP without an accelerator: the Trainer refuses the class itself, and torch its `device_id`."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class WholeAdamW(torch.optim.AdamW):
    """AdamW that the harness lets step DTensors themselves: Lightning computes gradients inside of `step`."""


class Batches:
    """Batches of this rank, whose position is a state."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.taken, self.restored = rank, world, 0, -1

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.rand(())  # as a DataLoader does, for the seeds of its workers
        self.taken %= STEPS
        return self._iterate()

    def _iterate(self) -> Iterator[torch.Tensor]:
        while self.taken < STEPS:
            self.taken += 1
            samples = torch.arange(BATCH).view(-1, self.world)[:, self.rank] + self.taken * BATCH
            yield torch.sin(samples[:, None] * torch.arange(1, 9))

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "rank": torch.tensor([self.rank])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken, self.restored = state["taken"], int(state["rank"])


class Data(LightningDataModule):
    """Data with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fitted = 0

    def train_dataloader(self) -> Batches:
        self.fitted += 1
        return Batches(self.trainer.global_rank, self.trainer.world_size)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(torch.linspace(-1, 1, 32).view(4, 8), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"fitted": self.fitted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fitted = state["fitted"]


class Net(LightningModule):
    """A network whose losses are noted, with what may lie in a checkpoint."""

    def __init__(self, kind: str, dropout: float, act: Any = torch.relu, folder: Path = Path("runs")) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=[] if kind == "one" else ["act", "folder"])
        self.kind, self.losses = kind, dict[int, float]()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.Sequential(nn.Linear(16, 8), nn.Tanh()))

    def configure_model(self) -> None:
        if self.kind == "fsdp2" and not hasattr(self.net[0], "unshard"):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = (self.net(batch) - batch.cos()).square().mean()
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("score", (self.net(batch) - batch.cos()).square().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = WholeAdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ShuffledData(Data):
    """Data whose loader draws the order of an epoch from torch's generator."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.linspace(-1, 1, 128).view(16, 8), batch_size=4, shuffle=True)


class RankNote(Callback):
    """A callback whose state differs between ranks."""

    def __init__(self, rank: int) -> None:
        self.rank, self.restored = rank, -1

    def state_dict(self) -> dict[str, int]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.restored = state["rank"]


class Acting(Callback):
    """Calls a function when so many steps are done."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def wait_for(file: Path) -> None:
    """Wait until a file exists, for half a minute at most."""
    end = time.monotonic() + 30
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)


def kill() -> None:
    """End this process without a warning."""
    os.kill(os.getpid(), signal.SIGKILL)


class KilledAt(Callback):
    """Ends the process without a warning, once a file exists."""

    def __init__(self, step: int, file: Path) -> None:
        self.step, self.file = step, file

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            wait_for(self.file)
            kill()


def be_rank(rank: int, world: int) -> None:
    """Tell Lightning which rank this fork is."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "NODE_RANK": 0}
    os.environ.update({name: str(number) for name, number in ranks.items()})
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def build_strategy(kind: str, world: int) -> Any:
    if kind == "fsdp1":
        return ShardingOnCPU(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), state_dict_type="sharded")
    if kind == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    return DDPStrategy() if kind == "ddp" else SingleDeviceStrategy()


def build(
    kind: str,
    rank: int,
    world: int,
    folder: Path,
    *callbacks: Callback,
    seed: int = 1,
    net: Any = None,
    **arguments: Any,
) -> tuple[Trainer, Any]:
    """Return a Trainer, and a given network or one with random weights."""
    be_rank(rank, world)
    torch.manual_seed(seed)
    dropout = arguments.pop("dropout", 0.2)
    net = net or Net(kind, dropout)
    torch.manual_seed(10 * seed + rank)
    given = {"max_epochs": 2, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=build_strategy(kind, world),
        callbacks=list(callbacks),
        default_root_dir=str(folder),
        **{**given, **arguments},
    )
    return trainer, net
