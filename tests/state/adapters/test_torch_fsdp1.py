"""Models under torch's own wrapper: their states on the CPU too, and torch's settings are left as they were."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed import fsdp as theirs
from torch.distributed.checkpoint import state_dict as functions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardckpt import core
from shardckpt.state import (
    ForeignShardingError,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from tests.kit.models.states import FRONT_ENDS, Net, differing, flat, step, whole, wrapper
from tests.kit.ranks.harness import run

Theirs = theirs.FullyShardedDataParallel
WHOLE = functions.StateDictOptions(full_state_dict=True)


def trained(shard):
    torch.manual_seed(0)
    model = shard(Net((1,)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optim)
    return model, optim


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_whole_states_are_on_the_cpu_where_they_are_wanted_there(orig):
    def body(rank, world):
        model, optim = trained(wrapper(theirs, use_orig_params=orig))
        plain, kept = trained(FRONT_ENDS["plain"])
        expected = dict(plain.state_dict()), flat({**optim_state_dict(plain, kept), "param_groups": []})
        wrong = []
        for first in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                how = {"offload_to_cpu": True, "rank0_only": first}
                weights, moments = model_state_dict(model, **how), optim_state_dict(model, optim, **how)
            if first and rank:
                wrong += [] if not weights and not moments["state"] else ["not the first rank's alone"]
                continue
            wrong += differing(dict(weights), expected[0], exact=False)
            wrong += differing(flat({**moments, "param_groups": []}), expected[1], exact=False)
        step(model, optim)
        return wrong

    assert run(2, body) == [[], []]


def test_torchs_settings_are_what_they_were_after_a_failure_too():
    def body(rank, world):
        model, _ = trained(wrapper(theirs))
        before = Theirs.get_state_dict_type(model)
        state = model_state_dict(model)
        del state["gain"]
        with pytest.raises(RuntimeError, match="gain"):
            load_model_state_dict(model, state)
        return Theirs.get_state_dict_type(model) == before

    def sharded(rank, world):
        model, _ = trained(wrapper(theirs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            Theirs.set_state_dict_type(model, theirs.StateDictType.SHARDED_STATE_DICT)
        model_state_dict(model)
        return Theirs.get_state_dict_type(model).state_dict_type is theirs.StateDictType.SHARDED_STATE_DICT

    assert run(2, body) == [True, True]
    assert run(2, sharded) == [True, True]


@pytest.mark.parametrize("meshed", [False, True], ids=["ShardedTensor", "DTensor"])
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_sharded_states_have_dtensors_and_go_back(orig, meshed):
    def body(rank, world):
        mesh = init_device_mesh("cpu", (world,)) if meshed else None
        model, optim = trained(lambda net: wrapper(theirs, use_orig_params=orig)(net, mesh))
        expected = whole_of(model_state_dict(model)), flat(optim_state_dict(model, optim))
        weights, moments = model_state_dict(model, "SHARDED"), optim_state_dict(model, optim, "SHARDED")
        assert all(isinstance(weights[name], DTensor) for name in weights if name != "scale")
        assert all(isinstance(slots["exp_avg"], DTensor) for slots in moments["state"].values())
        wrong = differing(whole_of(weights), expected[0]) + differing(flat(moments), expected[1])
        for shard in (wrapper(theirs, use_orig_params=orig), FRONT_ENDS["flat"], FRONT_ENDS["in place"]):
            other, again = trained(shard)
            step(other, again, 1)
            load_model_state_dict(other, weights)
            load_optim_state_dict(other, again, moments)
            wrong += differing(whole_of(model_state_dict(other)), expected[0])
            found = flat({**optim_state_dict(other, again), "param_groups": []})
            wrong += differing(found, flat({**moments, "param_groups": []}))
        return wrong

    assert run(2, body) == [[], []]


def test_local_states_are_refused():
    def body(rank, world):
        model, optim = trained(wrapper(theirs))
        told = []
        for take in (lambda: model_state_dict(model, "LOCAL"), lambda: optim_state_dict(model, optim, "LOCAL")):
            with pytest.raises(ForeignShardingError, match="found LOCAL; expected FULL or SHARDED") as caught:
                take()
            told.append(str(caught.value))
        return len(told)

    assert run(2, body) == [2, 2]


def whole_of(state) -> dict:
    return {name: whole(value) for name, value in state.items()}


@pytest.mark.parametrize("settings", [False, True], ids=["the class", "its settings too"])
def test_our_wrapper_may_be_put_where_torchs_was(settings, monkeypatch):
    """Libraries are changed this way; models under either wrapper have their states, torch's functions included."""
    monkeypatch.setattr(theirs, "FullyShardedDataParallel", core.FullyShardedDataParallel)
    for name in ("StateDictType", "FullStateDictConfig", "FullOptimStateDictConfig") if settings else ():
        monkeypatch.setattr(theirs, name, getattr(core, name))

    def body(rank, world):
        plain, kept = trained(FRONT_ENDS["plain"])
        wrong = []
        for wrap in (FRONT_ENDS["flat"], lambda net: Theirs(net, device_id=torch.device("cpu"))):
            model, optim = trained(wrap)
            moments = optim_state_dict(model, optim)
            wrong += differing(dict(model_state_dict(model)), dict(plain.state_dict()), exact=False)
            wrong += differing(
                dict(functions.get_model_state_dict(model, options=WHOLE)), dict(plain.state_dict()), exact=False
            )
            wrong += (
                [] if sorted(moments["state"]) == sorted(optim_state_dict(plain, kept)["state"]) else [str(moments)]
            )
            load_model_state_dict(model, model_state_dict(model))
            load_optim_state_dict(model, optim, moments)
        return wrong

    assert run(2, body) == [[], []]
