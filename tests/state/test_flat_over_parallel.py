"""Flat parameters over tensor parallelism: SHARDED states are cut over the meshes of both."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardckpt
from shardckpt import core as ours
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from tests.kit.models.states import differing, flat, quiet
from tests.kit.models.torch_limits import full_tensor
from tests.kit.ranks.harness import run

FSDP = ours.FullyShardedDataParallel
SHARDED = ours.StateDictType.SHARDED_STATE_DICT


class Stack(nn.Module):
    """The hidden size is a multiple of all ranks, or leaves rows over on those of data parallelism."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.alone = nn.Linear(5, hidden), nn.Linear(hidden, 4), nn.Linear(4, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.alone(self.down(self.up(x).relu())) * self.gain


def trained(mesh, seed: int, hidden: int, steps: int = 1, **settings):
    torch.manual_seed(seed)
    net = parallelize_module(Stack(hidden), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = quiet(FSDP, net, device_mesh=mesh["dp"], **settings)
    quiet(FSDP.set_state_dict_type, model, SHARDED)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 5)).square().mean().backward()
        optim.step()
    return model, optim


def looked_at(model: nn.Module, optim) -> dict:
    return {**model_state_dict(model, "FULL"), **flat(optim_state_dict(model, optim, "FULL"))}


@pytest.mark.shown_by("[True-6]", "True-8")
@pytest.mark.shown_by("[False-6]", "False-8")
@pytest.mark.parametrize("hidden", [8, 6])
@pytest.mark.parametrize("original", [True, False])
def test_sharded_states_lie_over_both_meshes_and_come_back(tmp_path: Path, original: bool, hidden: int) -> None:
    def body(rank: int, world: int) -> list[str]:
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, optim = trained(mesh, 0, hidden, use_orig_params=original)
        expected = looked_at(model, optim)
        weights, moments = model.state_dict(), optim_state_dict(model, optim, "SHARDED")
        wrong = []
        for name, value in {**weights, **moments["state"]["up.weight"]}.items():
            if isinstance(value, DTensor) and value.dim():
                if value.device_mesh.mesh_dim_names != ("dp", "tp"):
                    wrong.append(f"{name} lies over {value.device_mesh.mesh_dim_names}")
            elif value.dim():
                wrong.append(f"{name} is whole")
        held = sum(v.to_local().numel() if isinstance(v, DTensor) else v.numel() for v in weights.values())
        if held > sum(v.numel() for v in weights.values()) * 0.55:
            wrong.append(f"{held} elements are held")
        whole = {name: full_tensor(v) if isinstance(v, DTensor) else v for name, v in weights.items()}
        wrong += differing(whole, model_state_dict(model, "FULL"))

        def back(load) -> None:
            other, again = trained(mesh, 7, hidden, use_orig_params=original)
            load(other, again)
            wrong.extend(differing(looked_at(other, again), expected))

        def directly(other, again) -> None:
            load_model_state_dict(other, weights)
            load_optim_state_dict(other, again, moments)

        def by_the_wrapper(other, again) -> None:
            other.load_state_dict(weights)
            again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, moments))

        def by_dcp(other, again) -> None:
            quiet(dcp.save, {"m": weights, "o": moments["state"]}, checkpoint_id=str(tmp_path / "dcp"))
            mine, kept = other.state_dict(), optim_state_dict(other, again, "SHARDED")
            quiet(dcp.load, {"m": mine, "o": kept["state"]}, checkpoint_id=str(tmp_path / "dcp"))
            other.load_state_dict(mine)
            load_optim_state_dict(other, again, {**moments, "state": kept["state"]})

        def by_shardckpt(other, again) -> None:
            shardckpt.save({"m": dict(weights), "o": moments["state"]}, tmp_path / "native")
            mine, kept = dict(other.state_dict()), optim_state_dict(other, again, "SHARDED")
            shardckpt.load({"m": mine, "o": kept["state"]}, tmp_path / "native")
            other.load_state_dict(mine)
            load_optim_state_dict(other, again, {**moments, "state": kept["state"]})

        def by_objects(other, again) -> None:
            shardckpt.save({"m": model, "o": optim}, tmp_path / "objects")
            shardckpt.load({"m": other, "o": again}, tmp_path / "objects")

        loads = (directly, by_the_wrapper, by_dcp, by_shardckpt, by_objects)
        for load in (
            loads if hidden == 6 else loads[1 - original :: 2]
        ):  # unequal pieces in each way, equal ones in turn
            before = len(wrong)
            back(load)
            wrong[before:] = [f"{load.__name__}: {each}" for each in wrong[before:]]
        return wrong

    assert run(4, body, timeout=150) == [[]] * 4
