"""Train with Ray Train on two workers, of which one is killed in a save, then on one, then on three.

    pip install '.[ray]'
    python examples/ray_training.py                                  # starts Ray on this machine, for a minute or two

All runs belong to one experiment, and each continues from the newest complete step. At the end, the losses that Ray
lists with the steps are compared with those of a training without interruption.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import shardckpt
from shardckpt.integrations.ray import RayCheckpointer

SAMPLES, WIDTH, SAVE_EVERY = 12, 16, 2
KILLED_AT = 4
RUNS = ((2, 6), (1, 8), (3, 12))
"""How many workers train, and to which step."""


def build_model() -> nn.Module:
    """Return the model; it is the same in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for the model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int = 0, world: int = 1) -> float:
    """Train on this worker's part of a step's samples; return the mean loss of all workers."""
    samples = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = (model(samples) - samples.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / world
    if world > 1:
        dist.all_reduce(mean)
    return mean.item()


def train(config: dict[str, Any]) -> int:
    """Train on this worker; return the step from which it continued."""
    model = prepare_model(build_model())
    optimizer = build_optimizer(model)
    state = {"model": model, "optimizer": optimizer}
    checkpointer = RayCheckpointer(save_every=SAVE_EVERY)
    restored = checkpointer.restore(state) or 0
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(restored + 1, config["last"] + 1):
        loss = take_step(model, optimizer, step, rank, world)
        if checkpointer.should_save(step):
            if restored == 0 and (step, rank) == (KILLED_AT, 1):
                die_while_saving()
            checkpointer.async_save(step, state, metrics={"loss": loss})
    checkpointer.wait()
    return restored


def die_while_saving() -> None:
    """Make this process kill itself in the middle of a step's file."""
    write = os.write

    def write_partly(file: int, data: memoryview) -> int:
        if "step-" not in os.readlink(f"/proc/self/fd/{file}"):
            return write(file, data)
        write(file, bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit("this worker was not killed")

    os.write = write_partly


def main() -> None:
    """Run the trainings, and compare them."""
    model = build_model()
    optimizer = build_optimizer(model)
    expected = {step: take_step(model, optimizer, step) for step in range(1, RUNS[-1][1] + 1)}
    with tempfile.TemporaryDirectory() as storage:
        for workers, last in RUNS:
            result = TorchTrainer(
                train,
                train_loop_config={"last": last},
                scaling_config=ScalingConfig(num_workers=workers),
                run_config=RunConfig(name="run", storage_path=storage, failure_config=FailureConfig(max_failures=1)),
            ).fit()
            print(f"{workers} workers: from step {result.return_value} to step {result.metrics['step']}")
        losses = {metrics["step"]: metrics["loss"] for _, metrics in result.best_checkpoints}
        steps = shardckpt.ls(Path(storage) / "run" / "steps").complete
        print(f"Ray lists the steps {sorted(losses)}; all intact: {all(shardckpt.verify(s.path).ok for s in steps)}")
        worst = max(abs(loss - expected[step]) for step, loss in losses.items())
        print(f"losses: {'equal' if worst < 1e-6 else 'DIFFERENT'}, up to {worst:.0e}")


if __name__ == "__main__":
    ray.init("local", num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    try:
        main()
    finally:
        ray.shutdown()
