"""Save steps from a script that uses `torch.distributed.checkpoint`, with one changed line.

    python examples/dcp_drop_in.py                                   # forks gloo ranks on the CPU

The first job trains on two ranks and saves in the background; the second resumes on three. The state is that of torch's
tutorial on DCP: an object with `state_dict` and `load_state_dict`. At the end the last step is verified and merged.
torch's own `fully_shard`, which this script uses, needs GPUs with torch 2.6.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes
from torch.nn import functional
from train_fsdp import WORDS, Model, print_rank0

import shardckpt
from shardckpt.integrations import dcp  # was: import torch.distributed.checkpoint as dcp

SEQUENCES = 12


class AppState:
    """Model, optimizer and step, as one entry of the state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state, by names that do not depend on the sharding."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def train(folder: Path, last: int) -> None:
    """Train on this rank up to a step, from the newest step that the folder has."""
    torch.manual_seed(dist.get_world_size())  # the resumed job starts with other weights, before it loads
    model = Model()
    fully_shard(model)
    app = AppState(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    steps = shardckpt.ls(folder).complete
    if steps:
        dcp.load({"app": app}, checkpoint_id=folder / f"step-{steps[-1].number}")
    print_rank0(f"{dist.get_world_size()} ranks, from step {app.step}")
    while app.step < last:
        starts = torch.randint(WORDS, (SEQUENCES, 1), generator=torch.Generator().manual_seed(app.step))
        ids = ((starts + torch.arange(16)) % WORDS).chunk(dist.get_world_size())[dist.get_rank()]
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        app.optimizer.step()
        app.optimizer.zero_grad()
        app.step += 1
        dist.all_reduce(mean := loss.detach())
        print_rank0(f"  step {app.step}: loss {mean.item() / dist.get_world_size():.3f}")
    saving = dcp.async_save({"app": app}, checkpoint_id=folder / f"step-{app.step}")
    saving.result()


def run_rank(rank: int, world: int, folder: Path, last: int) -> None:
    """Run one of the forked ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}-store-{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    train(folder, last)
    dist.destroy_process_group()


def main() -> None:
    """Run both jobs, then verify and merge the last step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        folder.mkdir()
        for world, last in ((2, 4), (3, 8)):
            start_processes(run_rank, (world, folder, last), nprocs=world, start_method="fork")
        print(f"steps: {[step.number for step in shardckpt.ls(folder).complete]}")
        print(f"intact: {shardckpt.verify(str(folder / 'step-8')).ok}")
        report = shardckpt.consolidate(str(folder / "step-8"), f"{folder}.safetensors", model_key="app.model")
        print(f"merged: {report.tensor_count} tensors")


if __name__ == "__main__":
    main()
