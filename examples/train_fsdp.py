"""Train a small language model with shardckpt's `FullyShardedDataParallel`, and print a table of losses.

    python examples/train_fsdp.py                                    # forks two gloo ranks on the CPU
    torchrun --nproc-per-node 2 examples/train_fsdp.py               # or any number of ranks

Compared with torch's FSDP, only the two import lines differ.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes
from torch.nn import functional

from shardckpt.core import FullyShardedDataParallel as FSDP  # noqa: N817  was: torch.distributed.fsdp
from shardckpt.core.wrap import ModuleWrapPolicy  # was: torch.distributed.fsdp.wrap

STEPS, WORDS, WIDTH, LAYERS = 20, 256, 64, 4


class Block(nn.Module):
    """A residual layer: causal attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norms[0](x)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.feed(self.norms[1](x))


class Model(nn.Module):
    """A language model: token ids to logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def make_batch(step: int) -> torch.Tensor:
    """Return this rank's token ids of a step: sequences that count upwards, different on each rank."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    starts = torch.randint(WORDS, (16, 1), generator=generator)
    return (starts + torch.arange(16)) % WORDS


def train() -> None:
    """Train on this rank."""
    torch.manual_seed(0)  # the same model on all ranks; alternatively pass sync_module_states=True
    model = Model()
    total = sum(parameter.numel() for parameter in model.parameters())
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),  # each block is gathered, computed and freed as one unit
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stored = sum(parameter.numel() for parameter in model.parameters())
    print_rank0(f"{dist.get_world_size()} ranks; rank 0 stores {stored:,} of {total:,} parameters")
    print_rank0("step    loss  gradient norm")
    for step in range(STEPS):
        ids = make_batch(step)
        logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        print_row(step, loss.detach(), norm)


def print_row(step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
    """Print a row of the table, with the mean loss of all ranks."""
    dist.all_reduce(loss)
    if step % 4 == 0 or step == STEPS - 1:
        print_rank0(f"{step:4}  {loss.item() / dist.get_world_size():6.3f}  {norm.item():13.3f}")


def print_rank0(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def run_rank(rank: int, train: Callable[[], None], world: int, store: str) -> None:
    """Run one of the forked ranks, with the variables that torchrun sets."""
    torch.set_num_threads(1)
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world}", LOCAL_WORLD_SIZE=f"{world}")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    train()
    dist.destroy_process_group()


def fork_ranks(train: Callable[[], None], world: int) -> None:
    """Train on forked ranks; a fork does not import torch again."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(run_rank, (train, world, f"{folder}/store"), nprocs=world, start_method="fork")


def launch(train: Callable[[], None], world: int = 2) -> None:
    """Train under torchrun, or fork the ranks here."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()
    else:
        fork_ranks(train, world)


if __name__ == "__main__":
    launch(train)
