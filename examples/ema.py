"""Keep an average of the weights while training on two ranks, save it beside them, export it alone.

    python examples/ema.py                                           # forks gloo ranks on the CPU

Each rank averages the part of the model that it has; nothing is gathered. In the checkpoint the average is a variant of
the model: it is loaded on any number of ranks, and `--weights ema` writes it in the place of the model's own weights.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import shardckpt
from shardckpt.core import fully_shard

STEPS, DECAY = 20, 0.8


def build() -> nn.Module:
    """Return a model whose rows the ranks share, unevenly."""
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 1)))


def parts(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what this rank has of each parameter: a plain tensor, which changes with the model."""
    return {name: parameter.detach().to_local() for name, parameter in model.named_parameters()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Train one step on noisy data, the same on all ranks; return the loss."""
    noise = torch.Generator().manual_seed(number)
    x = torch.randn(16, 5, generator=noise)
    loss = (model(x) - x.sum(1, keepdim=True) - torch.randn(16, 1, generator=noise)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(folder: Path) -> None:
    """Be one rank of the job that saves."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ema = {name: part.clone() for name, part in parts(model).items()}
    for number in range(STEPS):
        step(model, optimizer, number)
        for name, part in parts(model).items():
            ema[name].lerp_(part, 1 - DECAY)
    state = {"model": model, "optim": optimizer, "ema": shardckpt.Variant(ema, of=model), "step": STEPS}
    shardckpt.save(state, folder / "step-20")
    averaged = sum(part.numel() for part in ema.values())
    print(f"rank {dist.get_rank()} averages {averaged} elements\n", end="", flush=True)


def resume(folder: Path) -> None:
    """Be one rank of a job of another size, which goes on averaging."""
    model = build()
    ema = {name: torch.empty_like(part) for name, part in parts(model).items()}
    state = {"model": model, "ema": shardckpt.Variant(ema, of=model), "step": 0}
    shardckpt.load(state, folder / "step-20", strict=False)  # this job has no optimizer
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks go on from step {state['step']}, with the average", flush=True)


def be_rank(rank: int, world: int, work: str, folder: Path) -> None:
    """Be one of the forked ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    {"train": train, "resume": resume}[work](folder)
    dist.destroy_process_group()


def job(world: int, work: str, folder: Path) -> None:
    """Run a job to its end."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=be_rank, args=(rank, world, work, folder)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(1)


def main() -> None:
    """Train on two ranks, go on with three, export both sets of weights and compare how well they do."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job(2, "train", folder)
        job(3, "resume", folder)
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
