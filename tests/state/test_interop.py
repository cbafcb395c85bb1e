"""torch's own functions on our models, and ours on torch's: what one gives the other takes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import run
from states import FACES, Net, differing, flat, in_place, quiet, step, whole, wrapper
from torch.distributed import fsdp as theirs
from torch.distributed.checkpoint import state_dict as torchs

from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict

FULL = torchs.StateDictOptions(full_state_dict=True)
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


@pytest.mark.parametrize("face", OURS)
def test_torchs_functions_take_and_put_the_state_of_our_models(face):
    def body(rank, world):
        model, _ = trained(FACES[face])
        expected = copy.deepcopy(plain(model_state_dict(model)))
        wrong = []
        for options in (FULL, None):
            found = quiet(torchs.get_model_state_dict, model, options=options)
            wrong += differing(plain(found), expected)
            other, _ = trained(FACES[face], 1)
            quiet(torchs.set_model_state_dict, other, found, options=options)
            wrong += differing(plain(model_state_dict(other)), expected)
        return wrong

    assert run(2, body) == [[], []]


def test_torchs_functions_take_and_put_optimizers_of_models_sharded_in_place():
    def body(rank, world):
        model, optim = trained(FACES["in place"])
        expected = copy.deepcopy(optim_state_dict(model, optim))
        wrong = []
        for options in (FULL, None):
            _, found = quiet(torchs.get_state_dict, model, optim, options=options)
            wrong += differing(flat({**found, "param_groups": []}), flat({**expected, "param_groups": []}))
            other, again = trained(FACES["in place"], 1)
            weights = quiet(torchs.get_model_state_dict, model, options=options)
            quiet(
                torchs.set_state_dict, other, again, model_state_dict=weights, optim_state_dict=found, options=options
            )
            wrong += differing(flat(optim_state_dict(other, again)), flat(expected))
        return [each for each in wrong if "'group'" not in each]  # torch turns tuples into lists

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("face", OURS)
def test_distributed_checkpoints_of_our_states_load_on_other_faces(face, tmp_path):
    def body(rank, world):
        model, optim = trained(FACES[face])
        weights, moments = model_state_dict(model, "SHARDED"), optim_state_dict(model, optim, "SHARDED")
        expected = copy.deepcopy((plain(model_state_dict(model)), flat(optim_state_dict(model, optim))))
        quiet(dcp.save, {"model": weights, "optim": moments["state"]}, checkpoint_id=str(tmp_path / "step"))
        wrong = []
        for target in OURS:
            other, again = trained(FACES[target], 1)
            mine, kept = model_state_dict(other, "SHARDED"), optim_state_dict(other, again, "SHARDED")
            quiet(dcp.load, {"model": mine, "optim": kept["state"]}, checkpoint_id=str(tmp_path / "step"))
            load_model_state_dict(other, mine)
            load_optim_state_dict(other, again, kept)
            wrong += differing(plain(model_state_dict(other)), expected[0])
            wrong += differing(flat(optim_state_dict(other, again)), expected[1])
        return wrong

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("face", list(THEIRS))
def test_torchs_models_give_what_ours_take_and_the_other_way_round(face):
    def body(rank, world):
        torch.manual_seed(0)
        model, optim = trained(THEIRS[face])
        reference, kept = trained(FACES["in place"])
        wrong = []
        wrong += differing(plain(model_state_dict(model)), plain(model_state_dict(reference)), False)
        theirs_kept = optim_state_dict(model, optim)
        wrong += differing(flat(theirs_kept), flat(optim_state_dict(reference, kept)), False)
        other, again = trained(FACES["orig"], 1)
        load_model_state_dict(other, model_state_dict(model))
        load_optim_state_dict(other, again, theirs_kept)
        weights, moments = model_state_dict(other), optim_state_dict(other, again)
        back, last = trained(THEIRS[face], 2)
        load_model_state_dict(back, weights)
        load_optim_state_dict(back, last, moments)
        wrong += differing(plain(model_state_dict(back)), plain(weights))
        wrong += differing(flat(optim_state_dict(back, last)), flat(moments))
        return [each for each in wrong if "group" not in each]  # torch orders names by unit

    assert run(2, body) == [[], []]
