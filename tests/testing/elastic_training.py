"""Train a small model under torchrun at any size; `--fault` begins the data anew after a resume."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn import functional

import shardckpt
from shardckpt.core import fully_shard

STEPS, SAVED_AT, BATCH = 5, 3, 12


def main(root: str, *options: str) -> None:
    """Restore the newest step, and train to the last."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    samples = torch.rand(200, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    state, position = {"model": model, "optim": optim}, 0
    checkpointer = shardckpt.Checkpointer(root, witness=shardckpt.Witness(steps=2))
    start = checkpointer.restore(state) or 0
    if "--fault" not in options:
        position = start * BATCH
    for step in range(start + 1, STEPS + 1):
        batch = samples[position : position + BATCH].tensor_split(world)[rank]
        position += BATCH
        loss = functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        loss.backward()
        optim.step()
        optim.zero_grad()
        checkpointer.witness(step, loss=loss, batch=batch)
        if step == SAVED_AT and start < SAVED_AT:
            checkpointer.save(step, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
