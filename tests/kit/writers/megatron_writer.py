"""One rank of a job that saves with megatron-core: `python megatron_writer.py FOLDER RANK WORLD`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from typing import Any

import torch


def truth() -> dict[str, torch.Tensor]:
    """Return the full tensors that the ranks save."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embedding.word_embeddings.weight": (16, 8),
        "model.decoder.layers.mlp.linear_fc1.weight": (2, 12, 8),
        "model.output_layer.bias": (5,),
        "optimizer.state.exp_avg.model.embedding.word_embeddings.weight": (16, 8),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"model.output_layer.bias": tensors["model.output_layer.bias"].bfloat16()}


def write(folder: str, rank: int, world: int) -> None:
    """Save tensors split by tensor parallelism, stacked layers, objects, replicas and common state."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.transformer.enums import AttnBackend

    dist.init_process_group("gloo", init_method=f"file://{folder}.ranks", rank=rank, world_size=world)
    torch.cuda.synchronize, torch.cuda.current_device = (lambda *_: None), (lambda: "cpu")  # no CUDA here
    writer._results_queue = multiprocessing.get_context("fork").Manager().Queue()  # a spawned one imports all of this
    full = truth()

    def rows(name: str) -> Any:
        return ShardedTensor.from_rank_offsets(name, full[name].chunk(world)[rank].clone(), (0, rank, world))

    def layer(number: int, name: str = "model.decoder.layers.mlp.linear_fc1.weight") -> Any:
        part = full[name][number].chunk(world)[rank].clone()
        return ShardedTensor.from_rank_offsets(name, part, (0, number, 2), (1, rank, world), prepend_axis_num=1)

    bias = "model.output_layer.bias"
    state = {
        "args": argparse.Namespace(lr=0.1, attention_backend=AttnBackend.flash),
        "iteration": 10,
        "scheduler": {"mode": AttnBackend.flash, "max_lr": 0.1},
        "model": {
            "embedding": rows("model.embedding.word_embeddings.weight"),
            "layers": [layer(0), layer(1)],
            "bias": ShardedTensor.from_rank_offsets(bias, full[bias], replica_id=rank),
            "extra": ShardedObject("model.layers._extra_state", torch.ByteTensor([1, 2]), (world,), (rank,)),
        },
        "optimizer": {
            "exp_avg": rows("optimizer.state.exp_avg.model.embedding.word_embeddings.weight"),
            "step": ShardedObject("optimizer.step", {"step": 3}, (1,), (0,), replica_id=rank),
            "param_groups": [{"lr": 0.1}],
        },
    }
    dist_checkpointing.save(state, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
