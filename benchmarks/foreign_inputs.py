"""Write checkpoints as other frameworks do, without these frameworks, for `formats.py`; check outputs.

    python benchmarks/foreign_inputs.py make KIND FOLDER BYTES
    python benchmarks/foreign_inputs.py check KIND FOLDER BYTES DTYPE

Model, world size and elements are those of `inputs.py`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from inputs import RANKS, SHARDED, check, make, shapes, truth
from safetensors.torch import save_file
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.tensor import DTensor

State = dict[str, DTensor]


def layers(state: dict[str, object]) -> Iterator[tuple[str, list[str]]]:
    """Yield the module of each layer and the names of its parameters."""
    for module, names in groupby(state, key=lambda name: ".".join(name.split(".")[:3])):
        yield module, [name.removeprefix(f"{module}.") for name in names]


def save_rank_file(state: State, folder: Path) -> None:
    """Save with torch.save on every rank."""
    folder.mkdir(exist_ok=True)
    torch.save({"model": state, "step": 3}, folder / f"rank{dist.get_rank()}.pt")


def save_local(state: State, folder: Path) -> None:
    """Save FSDP1's LOCAL state: a flat parameter for each layer, and on rank 0 the metadata of its members.

    A rank's shard of a flat parameter differs from its rows of each tensor, so it is taken from the full tensor.
    """
    folder.mkdir(exist_ok=True)
    rank = dist.get_rank()
    tensors, handles = {}, []
    for module, names in layers(state):
        shapes_by_name = {name: tuple(state[f"{module}.{name}"].shape) for name in names}
        flat = torch.cat([truth(f"{module}.{name}", shape).reshape(-1) for name, shape in shapes_by_name.items()])
        numel = flat.numel() // RANKS
        shard = Shard.from_tensor_and_offsets(flat[rank * numel :][:numel].clone(), [rank * numel], rank)
        tensors[f"{module}._flat_param"] = init_from_local_shards([shard], flat.numel())
        handles.append({"module": module, "fqns": names, "shapes": list(shapes_by_name.values())})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch recommends DTensors
        torch.save(tensors, folder / f"model_rank{rank}.pt")
    if rank == 0:
        metadata = {"world_size": RANKS, "rank": 0, "handles": handles}
        (folder / "flat_param_metadata_rank0.json").write_text(json.dumps(metadata))


def save_accelerate(state: State, folder: Path) -> None:
    """Save as `Accelerator.save_state` does with SHARDED_STATE_DICT."""
    dcp.save({"model": state}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    torch.save({"step": 3}, folder / f"random_states_{dist.get_rank()}.pkl")


def save_fabric(state: State, folder: Path) -> None:
    """Save as Lightning's strategies for FSDP do."""
    dcp.save({"model": state}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save({"step": 3}, folder / "meta.pt")


def make_zero3(folder: Path, nbytes: int) -> None:
    """Write a ZeRO-3 checkpoint as DeepSpeed's `save_checkpoint` does: the flat partition of each rank."""
    step = folder / "global_step3"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    tensors = shapes("large", nbytes)
    param_shapes = OrderedDict((name, torch.Size(shape)) for name, shape in tensors.items())
    module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in tensors)
    model = {"module": module, "buffer_names": [], "optimizer": None, "param_shapes": [param_shapes]}
    model |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {}, "ds_version": "0.19.8"}
    model |= {"dp_world_size": RANKS, "mp_world_size": 1, "global_steps": 3}
    for rank in range(RANKS):
        masters = torch.cat([truth(name, shape).view(RANKS, -1)[rank] for name, shape in tensors.items()])
        slots = {"step": torch.tensor(3.0), "exp_avg": masters * 0.1, "exp_avg_sq": masters * 0.01}
        base = {"state": {0: slots}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        zero = {"zero_stage": 3, "partition_count": RANKS, "ds_version": "0.19.8"}
        zero |= {"optimizer_state_dict": base, "fp32_flat_groups": [masters]}
        torch.save({"optimizer_state_dict": zero}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save(model, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def make_plain(folder: Path, nbytes: int) -> None:
    """Write the weights only, as large as a consolidated checkpoint."""
    folder.mkdir()
    save_file({n: truth(n, shape) for n, shape in shapes("large", nbytes).items()}, folder / "model.safetensors")


SHARDED |= {
    "dtensors": (save_rank_file, 0),
    "local": (save_local, 0),
    "accelerate": (save_accelerate, 0),
    "fabric": (save_fabric, 0),
}
ALONE = {"zero3": make_zero3, "plain": make_plain}


if __name__ == "__main__":
    verb, the_kind, where, size, *more = sys.argv[1:]
    if verb == "check":
        check(the_kind, Path(where), int(size), *more)
    elif the_kind in ALONE:
        ALONE[the_kind](Path(where), int(size))
    else:
        make(the_kind, Path(where), int(size))
