"""Train adapters on a frozen base, sharded over two ranks: a checkpoint holds the adapters and refers to the base.

    python examples/lora.py                                          # forks gloo ranks on the CPU

The base lies in a folder as `transformers` writes it. Each save compares the frozen parameters with it, writes none of
them, and says in its manifest where they lie; whoever loads the checkpoint gets all of it, base and adapters.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import shardckpt
from shardckpt.core import fully_shard

RANKS, WIDTH, LAYERS, STEPS = 2, 256, 4, 3
NAMES = {r"\.base\.": "."}
"""From the names of the adapted model to those of the base."""


class Adapted(nn.Module):
    """A frozen layer, and what is learnt beside it.

    Args:
        base: The layer.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer gives, changed by the adapter."""
        return self.base(x) + self.up(self.down(x))


def pretrained() -> nn.Sequential:
    """Return the model that somebody else trained."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def adapted(seed: int) -> nn.Sequential:
    """Return the model with adapters, sharded over the ranks."""
    base = pretrained()
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted(layer) for layer in base))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def say(text: str) -> None:
    """Print on the first rank alone."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def size(folder: Path) -> str:
    """Return the bytes of a folder, as people read them."""
    return f"{sum(file.stat().st_size for file in folder.iterdir()) / 1000:,.0f} kB"


def train(folder: Path) -> None:
    """Be one rank: train, save, and load into a model whose adapters are new."""
    model = adapted(seed=1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    state = {"model": model, "optim": optimizer, "step": 0}
    for step in range(1, STEPS + 1):
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        shardckpt.save(state, folder / f"step-{step}", base=folder / "base", trainable_only=True, base_key_map=NAMES)
    say(f"the base: {size(folder / 'base')}; step 3 with its optimizer: {size(folder / 'step-3')}")

    other = adapted(seed=2)
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=1e-2)
    shardckpt.load({"model": other, "optim": fresh, "step": 0}, folder / "step-3")
    data = torch.randn(8, WIDTH)
    dist.broadcast(data, 0)
    say(f"loaded into other adapters, the outputs are equal, bit for bit: {torch.equal(model(data), other(data))}")

    with torch.no_grad():
        model[0].base.weight.to_local()[0, 0] += 1.0  # somebody trains what should be frozen
    try:
        shardckpt.save(state, folder / "step-4", base=folder / "base", trainable_only=True, base_key_map=NAMES)
    except shardckpt.UsageError as error:
        say(f"refused: {str(error).partition(';')[0]}")


def be_rank(rank: int, store: str, folder: Path) -> None:
    """Be one of the forked ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    train(folder)
    dist.destroy_process_group()


def main() -> None:
    """Lay a base, train on it, and export what was learnt, alone and with the base."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "base").mkdir()
        save_file(pretrained().state_dict(), folder / "base" / "model.safetensors", metadata={"format": "pt"})
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=be_rank, args=(rank, f"{name}/store", folder)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(1)
        shardckpt.consolidate(folder / "step-3", folder / "adapter", include=["*.down.*", "*.up.*"])
        shardckpt.consolidate(folder / "step-3", folder / "whole")
        for export in ("adapter", "whole"):
            tensors = load_file(folder / export / "model.safetensors")
            print(f"{export}: {len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()) / 1000:,.0f} kB")
        os.rename(folder / "base", folder / "moved")
        found = shardckpt.open(folder / "step-3", base=folder / "moved")["model.0.base.weight"]
        print(f"the base was moved, and is found: {torch.equal(found[...], pretrained()[0].weight)}")


if __name__ == "__main__":
    main()
