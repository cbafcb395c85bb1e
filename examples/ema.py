"""Train on two ranks with an exponential moving average (EMA) of the weights; save both, export either.

    python examples/ema.py                                           # forks gloo ranks on the CPU

Each rank averages its own shards, so nothing is gathered. In the checkpoint the average is a variant of the model: it
can be loaded at any world size, and `--weights ema` exports it instead of the model's own weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing import start_processes

import shardckpt
from shardckpt.core import fully_shard

STEPS, DECAY = 20, 0.8


def build_model() -> nn.Module:
    """Return a model with unevenly sharded rows."""
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 1)))


def local_shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's shard of each parameter: a plain tensor that shares memory with the model."""
    return {name: parameter.detach().to_local() for name, parameter in model.named_parameters()}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Train one step on noisy data, the same on all ranks, and return the loss."""
    noise = torch.Generator().manual_seed(number)
    x = torch.randn(16, 5, generator=noise)
    loss = (model(x) - x.sum(1, keepdim=True) - torch.randn(16, 1, generator=noise)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(folder: Path) -> None:
    """Train on this rank, and save."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ema = {name: shard.clone() for name, shard in local_shards(model).items()}
    for number in range(STEPS):
        train_step(model, optimizer, number)
        for name, shard in local_shards(model).items():
            ema[name].lerp_(shard, 1 - DECAY)
    state = {"model": model, "optim": optimizer, "ema": shardckpt.Variant(ema, of=model), "step": STEPS}
    shardckpt.save(state, folder / "step-20")
    averaged = sum(shard.numel() for shard in ema.values())
    print(f"rank {dist.get_rank()} averages {averaged} elements\n", end="", flush=True)


def resume(folder: Path) -> None:
    """Load the checkpoint and its average at another world size."""
    model = build_model()
    ema = {name: torch.empty_like(shard) for name, shard in local_shards(model).items()}
    state = {"model": model, "ema": shardckpt.Variant(ema, of=model), "step": 0}
    shardckpt.load(state, folder / "step-20", strict=False)  # this job has no optimizer
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks resume from step {state['step']}, with the average", flush=True)


def run_rank(rank: int, world: int, work: str, folder: Path) -> None:
    """Run one of the forked ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    {"train": train, "resume": resume}[work](folder)
    dist.destroy_process_group()


def main() -> None:
    """Train on two ranks, resume on three, export both sets of weights and compare their errors."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start_processes(run_rank, (2, "train", folder), nprocs=2, start_method="fork")
        start_processes(run_rank, (3, "resume", folder), nprocs=3, start_method="fork")
        print(f"variants in the checkpoint: {', '.join(shardckpt.inspect(folder / 'step-20').parts['variants'])}")
        x = torch.randn(1000, 5, generator=torch.Generator().manual_seed(99))
        for weights in ("live", "ema"):
            shardckpt.consolidate(folder / "step-20", folder / weights, weights=weights)
            model = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 1))
            model.load_state_dict(load_file(folder / weights / "model.safetensors"))
            with torch.no_grad():
                print(f"{weights}: error {(model(x) - x.sum(1, keepdim=True)).square().mean():.3f}")


if __name__ == "__main__":
    main()
