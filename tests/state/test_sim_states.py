"""States of models on a device whose group cannot move tensors of the CPU, as under NCCL alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from tests.core.test_sim_training import build, loss_of, offload_of, on_both, optimizer_of
from tests.kit.models.front_ends import FRONT_ENDS
from tests.kit.models.models import Stack

KINDS = ("FULL", "first", "SHARDED", "LOCAL")
"""`first` is FULL on rank 0 alone, on the CPU, from where it is broadcast when it is loaded."""


def trained(model, steps, device) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, device).backward()
        optimizer.step()
    return optimizer


def told(state: Any) -> Any:
    """Return a state as plain numbers; full tensors of DTensors."""
    if isinstance(state, dict):
        return {str(name): told(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [told(value) for value in state]
    if not isinstance(state, torch.Tensor):
        return state if isinstance(state, (int, float, bool, str, type(None))) else None
    if isinstance(state, DTensor):  # an offloaded one cannot be gathered where it is
        state = state.to(state.device_mesh.device_type).full_tensor()
    return state.detach().cpu().tolist()


def taken(model, optimizer, kind) -> tuple[Any, Any]:
    settings = {"rank0_only": True, "offload_to_cpu": True} if kind == "first" else {}
    kind = "FULL" if kind == "first" else kind
    return model_state_dict(model, kind, **settings), optim_state_dict(model, optimizer, kind, **settings)


def goes_round(rank, world, front_end, offloads, device) -> Any:
    """Take the state in each kind, load it into another model, and tell what both kinds and models have."""
    settings = offload_of(front_end) if offloads else {}
    model = build(front_end, device, **settings)
    optimizer = trained(model, range(2), device)
    found = {}
    for kind in KINDS:
        weights, moments = taken(model, optimizer, kind)
        other = build(front_end, device, **settings)
        again = trained(other, range(5, 6), device)
        load_model_state_dict(other, weights)
        load_optim_state_dict(other, again, moments)
        found[kind] = told([weights, moments])
        found[f"{kind} again"] = told([model_state_dict(other), optim_state_dict(other, again)])
        assert found[f"{kind} again"] == found["FULL"], f"{kind} does not go round"
    return found


@pytest.mark.shown_by("[*-offloaded]", "*-two ranks")
@pytest.mark.parametrize(
    ("world", "offloads"), [(1, False), (2, False), (2, True)], ids=["one rank", "two ranks", "offloaded"]
)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_states_of_every_kind_go_round_and_are_those_of_the_cpu(world, offloads, front_end):
    found, expected = on_both(world, goes_round, front_end, offloads)
    assert found == expected


def torch_in_place(device: str):
    """Return a model that torch's fully_shard sharded and offloaded, and its optimizer after a step."""
    torch.default_generator.manual_seed(3)
    model = Stack()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    theirs.fully_shard(model, mesh=mesh, offload_policy=theirs.CPUOffloadPolicy(pin_memory=False))
    return model, trained(model, range(2), device)


def test_torchs_offloaded_models_give_and_take_full_states():
    def body(rank, world, device):
        model, optimizer = torch_in_place(device)
        weights, moments = taken(model, optimizer, "first")
        other, again = torch_in_place(device)
        load_model_state_dict(other, weights)
        load_optim_state_dict(other, again, moments)
        kinds = {parameter.to_local().device.type for parameter in other.parameters()}
        whole = told([model_state_dict(other), optim_state_dict(other, again)])
        assert rank or whole == told([weights, moments])
        return kinds, whole

    found, expected = on_both(2, body)
    assert found == expected
    assert [kinds for kinds, _ in found] == [{"cpu"}] * 2
