"""Faults of resumes that others reported, injected into small training runs of each style.

A fault changes what a resumed job restores, or what it does between the restore and its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as theirs
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shardckpt
from shardckpt import core
from shardckpt.checkpoint.stateful.flatten import flatten_state
from shardckpt.state.local.local_shards import LocalShard

VOCABULARY, SAMPLES, BATCH = 7, 48, 4  # seven rows on two ranks: uneven shards
SAVED_AT, STEPS = 3, 5


class Net(nn.Module):
    """A language model of one block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(functional.dropout(self.norm(self.embed(tokens)), 0.2, self.training))


def shard_units(shard: Callable[..., Any], net: nn.Module) -> nn.Module:
    for each in (net.embed, net.head, net):
        shard(each)
    return net


STYLES: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "ddp": DistributedDataParallel,
    "wrapper": core.FullyShardedDataParallel,
    "originals": lambda net: core.FullyShardedDataParallel(net, use_orig_params=True),
    "fully_shard": lambda net: shard_units(core.fully_shard, net),
    "torch fsdp2": lambda net: shard_units(theirs.fully_shard, net),
}
WORLDS = {"plain": 1}


class Data:
    """Shuffled samples, a batch for each rank, and the position in them."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.at = rank, world, 0
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, 9), generator=generator)
        self.order = torch.randperm(SAMPLES, generator=generator)

    def next(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the next samples."""
        chosen = self.order[self.at : self.at + BATCH * 2][self.rank :: self.world]
        self.at += BATCH * 2
        return {"input": self.tokens[chosen, :-1], "labels": self.tokens[chosen, 1:]}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Job:
    """One process of a training run."""

    def __init__(self, style: str, rank: int, world: int, seed: int, root: Path, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = STYLES[style](Net())
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optim, 1, 0.9)
        self.data = Data(rank, world)
        self.rank, self.world = rank, world
        self.state = {"model": self.model, "optim": self.optim, "schedule": self.schedule, "data": self.data}
        self.state["rng"] = shardckpt.RNGState()
        torch.manual_seed(100 * seed + rank)
        self.checkpointer = shardckpt.Checkpointer(root, witness=shardckpt.Witness(**options))
        self.step = 0

    def train(self, steps: int = STEPS, saved_at: int = -1, *, in_background: bool = False) -> None:
        """Train to a step; save one of them."""
        handle = None
        while self.step < steps:
            self.step += 1
            batch = self.data.next()
            loss = self.train_step(batch)
            self.checkpointer.witness(self.step, loss=loss, batch=batch)
            if self.step == saved_at:
                save = self.checkpointer.async_save if in_background else self.checkpointer.save
                handle = save(self.step, self.state)
        if handle is not None:
            handle.result()

    def train_step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = functional.cross_entropy(self.model(batch["input"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        self.optim.step()
        self.optim.zero_grad()
        self.schedule.step()
        return loss.detach()

    def restore(self, *left_out: str) -> None:
        """Restore the newest step; parts that are left out keep the values that they have."""
        include = [name for name in self.state if name not in left_out]
        self.step = self.checkpointer.restore(self.state, include=include if left_out else None)

    @torch.no_grad()
    def change(self, change: Callable[[LocalShard], Any], *path: str) -> None:
        """Change this rank's shard of a tensor of the state in place."""
        flat = flatten_state({"model": self.model, "optim": self.optim}, self.rank, self.world)
        if path in flat.arrays:  # of a flat parameter, a rank may have no part of a member
            for shard in flat.arrays[path].shards:
                change(shard)


@dataclass(frozen=True)
class Fault:
    """A fault, and how the verdict has to name it.

    Attributes:
        origin: Where it was reported.
        resume: Restores a job with the fault.
        cause: Cause of the divergence.
        name: Name of what differs first; empty for any.
        ranks: Ranks that differ, in two; None for any.
    """

    origin: str
    resume: Callable[[Job], None]
    cause: str
    name: str = ""
    ranks: tuple[int, ...] | None = None


def lose_rows_of_an_uneven_vocabulary(job: Job) -> None:
    def lose_last_row(shard: LocalShard) -> None:
        if shard.box.stop[0] == VOCABULARY:
            shard.tensor[-1:] *= 0.5

    job.restore()
    job.change(lose_last_row, "model", "embed.weight")


def quantize_a_slot(job: Job) -> None:
    job.restore()
    job.change(lambda shard: shard.tensor.mul_(1e-4), "optim", "state", "head.weight", "exp_avg_sq")


def advance_a_fresh_optimizer(job: Job) -> None:
    job.restore("optim")
    rates = [group["lr"] for group in job.optim.param_groups]
    for group in job.optim.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    job.optim.step()
    job.optim.zero_grad()
    for group, rate in zip(job.optim.param_groups, rates, strict=True):
        group["lr"] = rate


def seed_ranks_anew(job: Job) -> None:
    job.restore()
    if job.rank or job.world == 1:
        torch.manual_seed(1234)


def forget_the_position(job: Job) -> None:
    job.restore("data")


def begin_from_scratch(job: Job) -> None:
    job.restore("model")


FAULTS: Mapping[str, Fault] = {
    "uneven vocabulary": Fault("torchtitan#1136", lose_rows_of_an_uneven_vocabulary, "parameter", "model.embed.weight"),
    "quantized slot": Fault("flashoptim#3", quantize_a_slot, "optimizer", "optim.state.head.weight.exp_avg_sq"),
    "fresh optimizer": Fault("Megatron-Bridge#5680", advance_a_fresh_optimizer, "optimizer", "optim.state.*.step"),
    "other random states": Fault("Megatron-LM#6858", seed_ranks_anew, "random state", "torch", (1,)),
    "repeated samples": Fault("accelerate#3938", forget_the_position, "batch", "repeated"),
    "from scratch": Fault("DeepSpeed#6691", begin_from_scratch, "parameter", "model.embed.weight"),
}
