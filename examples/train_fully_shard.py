"""Train the model of `train_fsdp.py` with shardckpt's `fully_shard`: in place, with DTensor parameters.

    python examples/train_fully_shard.py                             # forks two gloo ranks on the CPU
    torchrun --nproc-per-node 2 examples/train_fully_shard.py        # or any number of ranks

It computes in bfloat16, averages gradients in float32, and accumulates gradients over two batches.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from train_fsdp import STEPS, Model, launch, make_batch, print_rank0, print_row

from shardckpt.core import MixedPrecisionPolicy, clip_grad_norm_, fully_shard

ACCUMULATE = 2


def build_model() -> Model:
    """Return the model with one FSDP unit for each block and one for the other parameters."""
    torch.manual_seed(0)  # the same model on all ranks; alternatively call core.sync_module_states
    model = Model()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    return model


def train() -> None:
    """Train on this rank."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    weight = model.head.weight
    print_rank0(f"head.weight: {tuple(weight.shape)}, of which rank 0 stores {tuple(weight.to_local().shape)}")
    print_rank0("step    loss  gradient norm")
    for step in range(STEPS):
        for part in range(ACCUMULATE):
            model.set_requires_gradient_sync(part == ACCUMULATE - 1)  # reduce after the last batch only
            ids = make_batch(step * ACCUMULATE + part)
            logits = model(ids[:, :-1]).float()
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print_row(step, loss.detach(), norm)


if __name__ == "__main__":
    launch(train)
