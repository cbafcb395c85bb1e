"""Save on two ranks and resume on three, with another kind of sharding: the losses are the same.

    python examples/save_and_load.py                                 # forks gloo ranks on the CPU

The first job uses the wrapper (flat parameters), the second one `fully_shard` (DTensors, sharded by rows). The
checkpoint does not depend on either: it stores named tensors, and every rank reads the boxes that it needs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes
from torch.nn import functional
from train_fsdp import WORDS, Model, print_rank0

import shardckpt
from shardckpt.core import FullyShardedDataParallel, fully_shard

STEPS, SAVED_AT, SEQUENCES = 8, 4, 12


def make_batch(step: int) -> torch.Tensor:
    """Return this rank's part of the token ids of a step, which are the same at any world size."""
    starts = torch.randint(WORDS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return ((starts + torch.arange(16)) % WORDS).chunk(dist.get_world_size())[dist.get_rank()]


def build_training(style: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return a sharded model, its optimizer and a learning rate schedule."""
    torch.manual_seed(dist.get_world_size())  # the resumed job starts with other weights, before it loads
    model: nn.Module = Model()
    if style == "flat":
        model = FullyShardedDataParallel(model, sync_module_states=True)
    else:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def train(style: str, checkpoint: Path, *, resume: bool) -> None:
    """Train on this rank."""
    model, optimizer, schedule = build_training(style)
    state = {"model": model, "optim": optimizer, "schedule": schedule, "step": 0}
    if resume:
        shardckpt.load(state, checkpoint)  # tensors are loaded in place, other values are replaced in the dict
    print_rank0(f"{dist.get_world_size()} ranks, {style}, from step {state['step']}")
    for step in range(state["step"], STEPS):
        if step == SAVED_AT and not resume:
            state["step"] = step
            shardckpt.save(state, checkpoint)
        ids = make_batch(step)
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        print_rank0(f"  step {step}: loss {mean.item():.3f}, lr {schedule.get_last_lr()[0]:.5f}")


def run_rank(rank: int, world: int, store: str, style: str, checkpoint: Path, resume: bool) -> None:
    """Run one of the forked ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    train(style, checkpoint, resume=resume)
    dist.destroy_process_group()


def run_job(world: int, style: str, checkpoint: Path, *, resume: bool) -> None:
    """Fork the ranks of a job and wait for them."""
    store = str(checkpoint.parent / f"store-{world}")
    start_processes(run_rank, (world, store, style, checkpoint, resume), nprocs=world, start_method="fork")


def main() -> None:
    """Run both jobs, then read a tensor of the checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "step-4"
        run_job(2, "flat", checkpoint, resume=False)
        run_job(3, "rows", checkpoint, resume=True)
        weight = shardckpt.open(checkpoint)["model.head.weight"]
        print(f"head.weight in the checkpoint: {weight}; its first elements: {weight[0, :3].tolist()}")


if __name__ == "__main__":
    main()
