"""Train LoRA adapters on two ranks: a checkpoint stores the adapters and refers to the frozen base.

    python examples/lora.py                                          # forks gloo ranks on the CPU

The base is a folder as `transformers` writes it. Each save compares the frozen parameters with the base. It does not
write them again: its manifest refers to the base. Loading the checkpoint loads the base and the adapters.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing import start_processes

import shardckpt
from shardckpt.core import fully_shard

RANKS, WIDTH, LAYERS, STEPS = 2, 256, 4, 3
NAMES = {r"\.base\.": "."}
"""Key map from the names of the model with adapters to those of the base."""


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank adapter.

    Args:
        base: The frozen layer.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the outputs of the layer and of the adapter."""
        return self.base(x) + self.up(self.down(x))


def build_pretrained() -> nn.Sequential:
    """Return the pretrained model."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def build_adapted(seed: int) -> nn.Sequential:
    """Return the sharded model with adapters."""
    base = build_pretrained()
    torch.manual_seed(seed)
    model = nn.Sequential(*(LoRALinear(layer) for layer in base))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def print_rank0(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def format_size(folder: Path) -> str:
    """Return the size of a folder in kB."""
    return f"{sum(file.stat().st_size for file in folder.iterdir()) / 1000:,.0f} kB"


def train(folder: Path) -> None:
    """Train on this rank, save, and load into a model with new adapters."""
    model = build_adapted(seed=1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    state = {"model": model, "optim": optimizer, "step": 0}
    for step in range(1, STEPS + 1):
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step
        shardckpt.save(state, folder / f"step-{step}", base=folder / "base", trainable_only=True, base_key_map=NAMES)
    print_rank0(f"base: {format_size(folder / 'base')}; step 3 with its optimizer: {format_size(folder / 'step-3')}")

    other = build_adapted(seed=2)
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=1e-2)
    shardckpt.load({"model": other, "optim": fresh, "step": 0}, folder / "step-3")
    data = torch.randn(8, WIDTH)
    dist.broadcast(data, 0)
    same = torch.equal(model(data), other(data))
    print_rank0(f"outputs after loading into new adapters are equal, bit for bit: {same}")

    with torch.no_grad():
        model[0].base.weight.to_local()[0, 0] += 1.0  # by mistake, a frozen parameter changes
    try:
        shardckpt.save(state, folder / "step-4", base=folder / "base", trainable_only=True, base_key_map=NAMES)
    except shardckpt.errors.UsageError as error:
        print_rank0(f"rejected: {str(error).partition(';')[0]}")


def run_rank(rank: int, store: str, folder: Path) -> None:
    """Run one of the forked ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    train(folder)
    dist.destroy_process_group()


def main() -> None:
    """Write a base, train adapters on it, and export the adapters alone and with the base."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "base").mkdir()
        save_file(build_pretrained().state_dict(), folder / "base" / "model.safetensors", metadata={"format": "pt"})
        start_processes(run_rank, (f"{name}/store", folder), nprocs=RANKS, start_method="fork")
        shardckpt.consolidate(folder / "step-3", folder / "adapter", include=["*.down.*", "*.up.*"])
        shardckpt.consolidate(folder / "step-3", folder / "full")
        for export in ("adapter", "full"):
            tensors = load_file(folder / export / "model.safetensors")
            print(f"{export}: {len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()) / 1000:,.0f} kB")
        os.rename(folder / "base", folder / "moved")
        weight = shardckpt.open(folder / "step-3", base=folder / "moved")["model.0.base.weight"]
        print(f"the moved base is found: {torch.equal(weight[...], build_pretrained()[0].weight)}")


if __name__ == "__main__":
    main()
