"""ShardedTensors of torch's wrapper without a mesh load: SHARDED on any front end, LOCAL on the same units."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh

from shardckpt.core import FullyShardedDataParallel as Ours
from shardckpt.core import StateDictType
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.state import (
    StateKind,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
    to_names,
)
from shardckpt.state.keys.kinds import detect_kind, is_sharded_tensor, tensors
from tests.kit.models.states import FRONT_ENDS, Net, differing, flat, quiet, step, wrapper
from tests.kit.ranks.harness import raised_everywhere, run

Theirs = theirs.FullyShardedDataParallel
LOCAL, SHARDED = theirs.StateDictType.LOCAL_STATE_DICT, theirs.StateDictType.SHARDED_STATE_DICT


def trained(shard, seed: int = 0, mesh=None):
    torch.manual_seed(seed)
    model = shard(Net((1,)), mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optim, seed)
    return model, optim


def old(model, optim, kind):
    """What a script saves that was written before there were DTensors."""
    previous = quiet(Theirs.set_state_dict_type, model, kind)
    try:
        return quiet(model.state_dict), quiet(Theirs.optim_state_dict, model, optim) if kind is SHARDED else None
    finally:
        quiet(Theirs.set_state_dict_type, model, previous.state_dict_type)


def groupless(state) -> dict:
    """torch orders groups by unit."""
    return flat({**state, "param_groups": []})


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_sharded_states_of_torchs_wrapper_load_on_every_front_end(orig, tmp_path):
    def body(rank, world):
        model, optim = trained(wrapper(theirs, use_orig_params=orig))
        torch.save(old(model, optim, SHARDED), tmp_path / f"{rank}.pt")
        expected = model_state_dict(model), groupless(optim_state_dict(model, optim))
        wrong = []
        for front_end in ("flat", "orig", "in place", "whole", "ddp"):
            other, again = trained(FRONT_ENDS[front_end], 1)
            weights, moments = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
            assert all(any(is_sharded_tensor(v) for v in tensors(state)) for state in (weights, moments))
            load_model_state_dict(other, weights)
            load_optim_state_dict(other, again, moments)
            wrong += [f"{front_end}: {each}" for each in differing(model_state_dict(other), expected[0])]
            wrong += [
                f"{front_end}: {each}" for each in differing(groupless(optim_state_dict(other, again)), expected[1])
            ]
        return wrong

    assert run(3, body, timeout=60) == [[], [], []]


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_local_states_of_torchs_wrapper_load_on_the_same_units(orig):
    def body(rank, world):
        model, optim = trained(wrapper(theirs, use_orig_params=orig))
        weights, _ = old(model, optim, LOCAL)
        other, _ = trained(FRONT_ENDS["orig" if orig else "flat"], 1)
        load_model_state_dict(other, weights)
        return detect_kind(weights) is StateKind.LOCAL, differing(model_state_dict(other), model_state_dict(model))

    assert run(2, body) == [(True, [])] * 2


@pytest.mark.parametrize("kind", ["LOCAL", "SHARDED"])
@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_the_wrapper_takes_them_as_torchs_does(orig, kind):
    def body(rank, world):
        model, optim = trained(wrapper(theirs, use_orig_params=orig))
        weights, moments = old(model, optim, theirs.StateDictType[f"{kind}_STATE_DICT"])
        other, again = trained(FRONT_ENDS["orig" if orig else "flat"], 1)
        with quiet(Ours.state_dict_type, other, StateDictType[f"{kind}_STATE_DICT"]):
            other.load_state_dict(weights)
            if moments is not None:
                again.load_state_dict(Ours.optim_state_dict_to_load(other, again, moments))
        wrong = differing(model_state_dict(other), model_state_dict(model))
        expected = optim_state_dict(model, optim) if moments is not None else optim_state_dict(other, again)
        return wrong + differing(groupless(optim_state_dict(other, again)), groupless(expected))

    assert run(2, body) == [[], []]


def test_what_torchs_optimizer_keeps_of_flat_parameters_loads_on_the_same_units():
    def body(rank, world):
        model, optim = trained(wrapper(theirs))
        own = to_names(optim.state_dict(), [[clean(name) for name, _ in model.named_parameters()]])
        other, again = trained(FRONT_ENDS["flat"], 1)
        again.param_groups[0]["lr"] = 7.0
        load_optim_state_dict(other, again, own, kind="LOCAL")
        wrong = differing(groupless(optim_state_dict(other, again)), groupless(optim_state_dict(model, optim)))
        return wrong, again.param_groups[0]["lr"]

    assert run(3, body) == [([], 0.01)] * 3


def test_replicas_take_what_each_group_of_theirs_has_cut():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
        groups = (mesh.get_group(1), mesh.get_group(0))
        settings = {"process_group": groups, "sharding_strategy": theirs.ShardingStrategy.HYBRID_SHARD}
        model, optim = trained(wrapper(theirs, **settings))
        weights, moments = old(model, optim, SHARDED)
        wrong = []
        for front_end in ("flat", "in place"):
            other, again = trained(FRONT_ENDS[front_end], 1, mesh)
            load_model_state_dict(other, weights)
            load_optim_state_dict(other, again, moments)
            wrong += differing(model_state_dict(other), model_state_dict(model))
            wrong += differing(groupless(optim_state_dict(other, again)), groupless(optim_state_dict(model, optim)))
        return wrong

    assert run(4, body, timeout=60) == [[]] * 4


def test_what_no_mesh_of_the_model_fits_is_refused_by_name():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2))
        settings = {"process_group": (mesh.get_group(1), mesh.get_group(0))}
        model, optim = trained(wrapper(theirs, **settings, sharding_strategy=theirs.ShardingStrategy.HYBRID_SHARD))
        weights, _ = old(model, optim, SHARDED)
        other, _ = trained(FRONT_ENDS["flat"], 1)
        load_model_state_dict(other, weights)

    for rank, raised in enumerate(raised_everywhere(4, body)):
        assert "must be split into rows as a DTensor over these ranks" in raised.message, rank
        assert raised.message.startswith(("gain:", "first.weight:", "fit a state")), rank


def test_local_states_of_other_units_are_refused():
    def body(rank, world):
        model, optim = trained(wrapper(theirs))
        weights, _ = old(model, optim, LOCAL)
        other = quiet(FRONT_ENDS["flat"], Net((2,)))
        load_model_state_dict(other, weights)

    for raised in raised_everywhere(2, body):
        assert "size mismatch for _flat_param" in raised.message
