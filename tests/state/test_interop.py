"""torch's own functions on our models, and ours on torch's: what one gives the other takes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp as theirs
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardckpt import core as ours
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from tests.kit.models.states import (
    FRONT_ENDS,
    Net,
    differing,
    flat,
    in_place,
    over,
    quiet,
    refused,
    step,
    whole,
    wrapper,
)
from tests.kit.ranks.harness import run

FULL = torchs.StateDictOptions(full_state_dict=True)
ALL_WAYS: list[dict[str, bool]] = [
    {},
    {"cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
]
OURS = ("flat", "orig", "in place")
THEIRS = {
    "flat": wrapper(theirs),
    "orig": wrapper(theirs, use_orig_params=True),
    "whole": wrapper(theirs, sharding_strategy=theirs.ShardingStrategy.NO_SHARD),
    "in place": in_place(theirs),
}


def trained(shard, seed: int = 0):
    torch.manual_seed(seed)
    model = shard(Net((1,)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optim)
    return model, optim


def plain(state) -> dict:
    return {name: whole(value) for name, value in state.items()}


def settled(state) -> dict:
    """A flattened state without the types of sequences, which torch's functions change."""
    return {
        name: value.replace("(", "[").replace(")", "]") if "group" in name else value for name, value in state.items()
    }


@pytest.mark.parametrize("front_end", OURS)
def test_torchs_functions_take_and_put_states_of_our_models(front_end):
    def body(rank, world):
        model, optim = trained(FRONT_ENDS[front_end])
        weights = copy.deepcopy(plain(model_state_dict(model)))
        moments = copy.deepcopy(settled(flat(optim_state_dict(model, optim))))
        wrong = []
        for options in ALL_WAYS:
            told = torchs.StateDictOptions(**{**options, "broadcast_from_rank0": False})
            found, kept = quiet(torchs.get_state_dict, model, optim, options=told)
            cut = any(isinstance(value, DTensor) for value in found.values())
            wrong += [] if cut is not told.full_state_dict or not found else [f"{options}: DTensors are {cut}"]
            if rank == 0 or not told.full_state_dict or not told.cpu_offload:
                wrong += differing(plain(found), weights)
            else:
                wrong += list(found) + list(kept)
            other = FRONT_ENDS[front_end](Net((1,)))
            again = torch.optim.AdamW(other.parameters(), lr=0.5)
            told = torchs.StateDictOptions(**{**options, "cpu_offload": False})
            quiet(torchs.set_model_state_dict, other, found, options=told)
            quiet(torchs.set_optimizer_state_dict, other, again, kept, options=told)
            if "broadcast_from_rank0" in options:  # which torch does wrong with tensors that are not contiguous
                other.scale.copy_(model.scale)
            wrong += differing(plain(model_state_dict(other)), weights)
            wrong += differing(settled(flat(optim_state_dict(other, again))), moments)
        return wrong

    assert run(2, body) == [[], []]


def test_torchs_functions_name_members_of_every_flat_parameter():
    def body(rank, world):
        torch.manual_seed(0)
        net = Net((1,))
        net.last.weight.requires_grad_(False)
        net.last.bias.data = net.last.bias.data.double()
        model = quiet(ours.FullyShardedDataParallel, net)
        optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optim.step()
        expected = copy.deepcopy(flat(optim_state_dict(model, optim)))
        kept = quiet(torchs.get_optimizer_state_dict, model, optim, options=FULL)
        optim.state.clear()
        quiet(torchs.set_optimizer_state_dict, model, optim, kept, options=FULL)
        return differing(settled(flat(optim_state_dict(model, optim))), settled(expected)), len(
            list(model.parameters())
        )

    assert run(2, body) == [([], 3), ([], 3)]


@pytest.mark.parametrize("front_end", ["flat", "orig"])
def test_checkpoints_by_torchs_functions_go_from_our_wrapper_to_torchs_and_back(front_end, tmp_path):
    def body(rank, world):
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(0)
        model = FRONT_ENDS[front_end](Net((1,)), mesh)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optim)
        weights = copy.deepcopy(plain(model_state_dict(model)))
        moments = copy.deepcopy(settled(flat(optim_state_dict(model, optim))))
        wrong = []
        for index, shard in enumerate((THEIRS[front_end], FRONT_ENDS[front_end])):
            at = str(tmp_path / str(index))
            found, kept = quiet(torchs.get_state_dict, model, optim)
            quiet(dcp.save, {"model": found, "optim": kept}, checkpoint_id=at)
            torch.manual_seed(1)
            model = shard(Net((1,)), mesh)
            optim = torch.optim.AdamW(model.parameters(), lr=0.5)
            found, kept = quiet(torchs.get_state_dict, model, optim)
            quiet(dcp.load, {"model": found, "optim": kept}, checkpoint_id=at)
            quiet(torchs.set_state_dict, model, optim, model_state_dict=found, optim_state_dict=kept)
            wrong += differing(plain(model_state_dict(model)), weights)
            wrong += differing(settled(flat(optim_state_dict(model, optim))), moments)
        return wrong

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("front_end", OURS)
def test_distributed_checkpoints_of_our_states_load_on_other_front_ends(front_end, tmp_path):
    def body(rank, world):
        model, optim = trained(FRONT_ENDS[front_end])
        weights, moments = model_state_dict(model, "SHARDED"), optim_state_dict(model, optim, "SHARDED")
        expected = copy.deepcopy((plain(model_state_dict(model)), flat(optim_state_dict(model, optim))))
        quiet(dcp.save, {"model": weights, "optim": moments["state"]}, checkpoint_id=str(tmp_path / "step"))
        wrong = []
        for target in OURS:
            other, again = trained(FRONT_ENDS[target], 1)
            mine, kept = model_state_dict(other, "SHARDED"), optim_state_dict(other, again, "SHARDED")
            quiet(dcp.load, {"model": mine, "optim": kept["state"]}, checkpoint_id=str(tmp_path / "step"))
            load_model_state_dict(other, mine)
            load_optim_state_dict(other, again, kept)
            wrong += differing(plain(model_state_dict(other)), expected[0])
            wrong += differing(flat(optim_state_dict(other, again)), expected[1])
        return wrong

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("front_end", list(THEIRS))
def test_torchs_models_give_what_ours_take_and_the_other_way_round(front_end):
    def body(rank, world):
        torch.manual_seed(0)
        model, optim = trained(THEIRS[front_end])
        reference, kept = trained(FRONT_ENDS["in place"])
        wrong = []
        wrong += differing(plain(model_state_dict(model)), plain(model_state_dict(reference)), False)
        theirs_kept = optim_state_dict(model, optim)
        wrong += differing(flat(theirs_kept), flat(optim_state_dict(reference, kept)), False)
        other, again = trained(FRONT_ENDS["orig"], 1)
        load_model_state_dict(other, model_state_dict(model))
        load_optim_state_dict(other, again, theirs_kept)
        weights, moments = model_state_dict(other), optim_state_dict(other, again)
        back, last = trained(THEIRS[front_end], 2)
        load_model_state_dict(back, weights)
        load_optim_state_dict(back, last, moments)
        wrong += differing(plain(model_state_dict(back)), plain(weights))
        wrong += differing(flat(optim_state_dict(back, last)), flat(moments))
        return [each for each in wrong if "group" not in each]  # torch orders names by unit

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("front_end", ["flat", "orig"])
def test_sharded_states_are_cut_over_the_mesh_that_the_wrapper_was_given(front_end):
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        found, texts = [], []
        for engine in (ours, theirs):
            torch.manual_seed(0)
            model = wrapper(engine, use_orig_params=front_end == "orig")(Net((1,)), mesh)
            optim = torch.optim.AdamW(model.parameters(), lr=0.01)
            step(model, optim)
            weights, kept = quiet(torchs.get_state_dict, model, optim)
            found.append(plain(weights) | flat({**kept, "param_groups": []}))
            cut = {n: v for n, v in weights.items() if isinstance(v, DTensor)}
            cut |= {(n, s): v for n, slots in kept["state"].items() for s, v in slots.items() if isinstance(v, DTensor)}
            assert all(value.device_mesh == mesh for value in cut.values())
            texts.append({name: str(value.placements) for name, value in cut.items()})
        return differing(found[0], found[1], exact=False), [n for n, t in texts[0].items() if texts[1][n] != t]

    assert run(4, body) == [([], [])] * 4


class Planner(dcp.DefaultSavePlanner):
    """A planner of a user, which adds to torch's."""

    def set_up_planner(self, *args, **kwargs):
        super().set_up_planner(*args, **kwargs)


def save_by_dcp(way, state, path):
    if way == "save":
        dcp.save(state, checkpoint_id=path)
    elif way == "background":
        dcp.async_save(state, checkpoint_id=path).result()
    else:  # an older name, which does not go through the others
        options = {"planner": Planner()} if way == "planner" else {}
        quiet(dcp.save_state_dict, state, dcp.FileSystemWriter(path), **options)


@pytest.mark.parametrize("way", ["save", "background", "save_state_dict", "planner"])
def test_dcp_refuses_local_states_of_which_it_would_keep_one_ranks(tmp_path, way):
    def told_of(state, path):
        try:
            return refused(save_by_dcp, way, state, path)
        except dcp.CheckpointException as error:
            return str(error)

    def body(rank, world, front_end):
        model = FRONT_ENDS[front_end](Net((1,)))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optim)
        states = [model_state_dict(model, "LOCAL"), {"optim": optim_state_dict(model, optim, "LOCAL")}]
        if front_end == "flat":
            kind = ours.StateDictType.LOCAL_STATE_DICT
            with quiet(ours.FullyShardedDataParallel.state_dict_type, model, kind):
                states += [model.state_dict(), {"deep": {"model": model.state_dict()}}]
        told = [told_of(state, str(tmp_path / front_end)) for state in states]
        save_by_dcp(way, model_state_dict(model, "SHARDED"), str(tmp_path / f"{front_end} rows"))
        return [each for each in told if "LOCAL" not in each]

    over(["flat", "orig", "in place"], body)
    assert not any((tmp_path / front_end / ".metadata").exists() for front_end in ("flat", "orig", "in place"))
