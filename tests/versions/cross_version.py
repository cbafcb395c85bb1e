"""Write checkpoints with the torch that is installed, or read what another torch wrote.

    python tests/versions/cross_version.py write FOLDER
    python tests/versions/cross_version.py read FOLDER

Every form holds the same values: a model of three parameters after one step of AdamW. `read` prints one line for each
checkpoint, `ok` or the error, and its exit code is 1 if one of them is not read bit for bit.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import shardckpt
from shardckpt import core

RANKS = 2
FORMS = ("native-fully_shard", "native-wrapper", "dcp", "torch-file", "rank-files", "full-state")


class Model(nn.Module):
    """A model with a dimension that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3, bias=False)
        with torch.no_grad():  # no random numbers: generators may differ between versions
            for start, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 64 + start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def train_once(model: nn.Module, *, lr: float = 0.125) -> torch.optim.Optimizer:
    """Step AdamW with gradients of ones, which any number of ranks computes exactly."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def shard(model: nn.Module, style: str) -> nn.Module:
    """Shard a model over all ranks."""
    if style == "fully_shard":
        return core.fully_shard(model)
    return core.FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def find_values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Return the values that every form must hold, by name."""
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            slots = optimizer.state[parameter]
            values |= {f"{name}.{slot}": slots[slot].clone() for slot in ("exp_avg", "exp_avg_sq")}
    return values


# ------------------------------------------------------------------------------------------------------- ranks


def _rank(body: Callable[..., None], rank: int, store: str, args: tuple[Any, ...]) -> None:
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
        body(*args)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_ranks(body: Callable[..., None], *args: Any) -> None:
    """Run `body(*args)` on forked ranks.

    Raises:
        RuntimeError: A rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(body, rank, f"{folder}/store", args), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank failed; its trace is above")


# ------------------------------------------------------------------------------------------------------ writing


def write_native(folder: str, style: str) -> None:
    """Save a sharded model and its optimizer; on all ranks."""
    model = shard(Model(), style)
    shardckpt.save({"model": model, "optim": train_once(model), "step": 7}, folder)


def write_rank_files(folder: str) -> None:
    """Write each rank's SHARDED state by `torch.save`: pickles of DTensors; on all ranks."""
    model = shard(Model(), "fully_shard")
    optimizer = train_once(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    torch.save(state, f"{folder}/rank_{dist.get_rank()}.pt")


def write(folder: Path) -> None:
    """Write each form into a folder of its name."""
    for form in FORMS:
        (folder / form).mkdir(parents=True)
    for style in ("fully_shard", "wrapper"):
        run_ranks(write_native, str(folder / f"native-{style}" / "step"), style)
    run_ranks(write_rank_files, str(folder / "rank-files"))
    model = Model()
    optimizer = train_once(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(folder / "dcp"))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "torch-file" / "checkpoint.pt")
    torch.save(model.state_dict(), folder / "full-state" / "pytorch_model.bin")


# ------------------------------------------------------------------------------------------------------ reading


def load_native(folder: str, style: str) -> None:
    """Load into a sharded model of either style and compare; on all ranks."""
    expected_model = Model()
    expected = find_values(expected_model, train_once(expected_model))
    model = shard(Model(), style)
    optimizer = train_once(model, lr=0.5)
    loaded = shardckpt.load({"model": model, "optim": optimizer, "step": 0}, folder)
    assert loaded["step"] == 7
    state, slots = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    if dist.get_rank() == 0 or state:
        found = dict(state)
        for name, parts in slots["state"].items():
            found |= {f"{name}.{slot}": value for slot, value in parts.items() if slot != "step"}
        compare(found, expected)


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare values bit for bit.

    Raises:
        AssertionError: They differ.
    """
    assert set(found) == set(expected), f"names differ: {sorted(set(found) ^ set(expected))}"
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name} differs"


def read_form(form: str, source: Path) -> None:
    """Read one form with everything that reads it."""
    model = Model()
    train_once(model)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "merged"
        shardckpt.consolidate(str(source), str(target))
        found = {name: value for file in target.glob("*.safetensors") for name, value in load_file(file).items()}
        compare(found, find_values(model))
    if form.startswith("native"):
        shardckpt.verify(str(source))
        for style in ("fully_shard", "wrapper"):
            run_ranks(load_native, str(source), style)
    if form == "dcp":
        loaded = shardckpt.load({"model": Model()}, str(source))["model"]
        compare(find_values(loaded), find_values(model))


def read(folder: Path) -> int:
    """Read each form, print a line for it, and return the exit code."""
    failed = 0
    for form in FORMS:
        source = folder / form / "step" if form.startswith("native") else folder / form
        try:
            read_form(form, source)
        except Exception as error:  # noqa: BLE001
            failed, text = 1, f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{form}: {text}", flush=True)
        else:
            print(f"{form}: ok", flush=True)
    return failed


def main(argv: list[str]) -> int:
    """Do what the arguments say, and return the exit code."""
    if len(argv) != 2 or argv[0] not in ("write", "read"):
        print(__doc__)
        return 2
    torch.set_num_threads(1)
    if argv[0] == "read":
        return read(Path(argv[1]))
    write(Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
