"""What does not fit is refused on every rank before anything changes, and told with names and values."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import run
from states import FACES, Net, differing, flat, step

from shardckpt.errors import ShardckptError
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict

FORMS = ("flat", "orig", "in place")


def refused(action, *args, **kwargs) -> str:
    try:
        action(*args, **kwargs)
    except ShardckptError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def spoiled(state: dict, how: str) -> dict:
    made = dict(state)
    if how == "missing":
        del made["last.bias"]
    elif how == "unexpected":
        made["last.other"] = torch.zeros(1)
    elif how == "shape":
        made["last.bias"] = torch.zeros(4)
    elif how == "dtype":
        made["last.bias"] = made["last.bias"].double()
    elif how == "no tensor":
        made["last.bias"] = [1.0]
    return made


@pytest.mark.parametrize("face", FORMS)
def test_a_model_state_that_does_not_fit_on_one_rank_changes_nothing_on_any(face):
    def body(rank, world):
        torch.manual_seed(rank)
        model = FACES[face](Net())
        before = copy.deepcopy(model_state_dict(model))
        torch.manual_seed(9)
        good = Net().state_dict()
        wrong = []
        for how in ("missing", "unexpected", "shape", "dtype", "no tensor"):
            told = refused(load_model_state_dict, model, spoiled(good, how) if rank == 1 else good)
            expected = ("StateMismatchError", "last.") if rank == 1 else ("RankError", "rank 1", "last.")
            wrong += [(how, told)] if not all(each in told for each in expected) else []
            wrong += [(how, each) for each in differing(model_state_dict(model), before)]
            alone = spoiled(good, how) if rank == 0 else {}
            told = refused(load_model_state_dict, model, alone)
            wrong += [(how, "first", told)] if "last." not in told else []
        wrong += differing(model_state_dict(model), before)
        keys = load_model_state_dict(model, spoiled(spoiled(good, "missing"), "unexpected"), strict=False)
        after = model_state_dict(model)
        kept = torch.equal(after["last.bias"], before["last.bias"])
        took = torch.equal(after["first.weight"], good["first.weight"])
        return wrong, keys.missing, keys.unexpected, kept, took

    assert run(2, body) == [([], ("last.bias",), ("last.other",), True, True)] * 2


@pytest.mark.parametrize("face", FORMS)
def test_an_optimizer_state_that_does_not_fit_changes_nothing(face):
    def body(rank, world):
        model = FACES[face](Net())
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim)
        before = copy.deepcopy(optim_state_dict(model, optim))
        wrong = []

        def changed(how):
            made = copy.deepcopy(dict(before))
            slots, groups = made["state"], made["param_groups"]
            if how == "last.other":
                slots["last.other"] = slots.pop("last.bias")
            elif how == "last.bias/exp_avg":
                slots["last.bias"]["exp_avg"] = torch.zeros(5)
            elif how == "step differs" and face == "flat":
                slots["last.bias"]["step"] += 1
            elif how == "lr=0.3":
                groups.append({**groups[0], "params": ["last.bias"], "lr": 0.3})
                groups[0]["params"].remove("last.bias")
            elif how == "number":
                made["state"] = dict(enumerate(slots.values()))
                groups[0]["params"] = list(range(len(groups[0]["params"])))
            elif how == "no state of an optimizer":
                made = {"state": {"last.bias": 3}, "param_groups": [{}]}
            return made

        for how in ("last.other", "last.bias/exp_avg", "step differs", "lr=0.3", "number", "no state of an optimizer"):
            if how == "step differs" and face != "flat":
                continue
            for given in (changed(how), changed(how) if rank == 0 else {}, changed(how) if rank == 1 else before):
                told = refused(load_optim_state_dict, model, optim, given)
                wrong += [(how, told)] if how not in told else []
        told = refused(load_optim_state_dict, model, optim, {**before, "state": {}}, missing="error")
        wrong += [told] if "Missing state of" not in told else []
        told = refused(load_optim_state_dict, model, optim, before, missing="never")
        wrong += [told] if "never" not in told else []
        foreign = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
        wrong += [t for t in [refused(optim_state_dict, model, foreign)] if "ForeignParameterError" not in t]
        return wrong + differing(flat(optim_state_dict(model, optim)), flat(before))

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("face", FORMS)
def test_a_local_state_is_taken_on_its_own_rank_and_units_alone(face):
    def body(rank, world):
        model = FACES[face](Net())
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim)
        taken, kept = model_state_dict(model, "LOCAL"), optim_state_dict(model, optim, "LOCAL")
        cut_otherwise = FACES["orig" if face != "orig" else "flat"](Net())
        wrong = [refused(load_model_state_dict, cut_otherwise, taken)]
        wrong += [refused(load_optim_state_dict, cut_otherwise, torch.optim.Adam(cut_otherwise.parameters()), kept)]
        wrong = [told for told in wrong if "StateMismatchError" not in told]
        for state in (taken, kept):
            state._metadata["shardckpt"]["rank"] = 1 - rank
        for load, args in ((load_model_state_dict, (model, taken)), (load_optim_state_dict, (model, optim, kept))):
            told = refused(load, *args)
            wrong += [told] if "shardckpt consolidate" not in told or f"rank {1 - rank} of 2" not in told else []
        return wrong

    assert run(2, body) == [[], []]


def test_nothing_that_is_handed_in_is_changed():
    def body(rank, world):
        wrong = []
        for face in FORMS:
            model = FACES[face](Net())
            optim = torch.optim.Adam(model.parameters(), lr=0.1)
            step(model, optim)
            for kind in ("FULL", "SHARDED", "LOCAL"):
                taken, kept = model_state_dict(model, kind), optim_state_dict(model, optim, kind)
                names, ids = list(taken), {name: id(value) for name, value in taken.items()}
                inner = {(n, s): id(v) for n, slots in kept["state"].items() for s, v in slots.items()}
                values = copy.deepcopy(flat(kept))
                other = FACES[face](Net())
                theirs = torch.optim.Adam(other.parameters(), lr=0.1)
                load_model_state_dict(other, taken)
                load_optim_state_dict(other, theirs, kept)
                step(other, theirs)
                wrong += differing(flat(kept), values)
                wrong += [face] if list(taken) != names or {n: id(v) for n, v in taken.items()} != ids else []
                wrong += (
                    [face] if {(n, s): id(v) for n, ss in kept["state"].items() for s, v in ss.items()} != inner else []
                )
        return wrong

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("face", [*FORMS, "kept", "whole"])
def test_g5_a_load_between_forward_and_backward_is_not_lost(face):
    def body(rank, world):
        torch.manual_seed(0)
        model = FACES[face](Net())
        torch.manual_seed(1)
        weights = Net().state_dict()
        wrong = []
        for kind in ("FULL", "SHARDED", "LOCAL"):
            source = FACES[face](Net())
            load_model_state_dict(source, weights)
            taken = model_state_dict(source, kind)
            model(torch.randn(4, 5)).sum()
            load_model_state_dict(model, taken)
            wrong += [f"{kind} {each}" for each in differing(model_state_dict(model), dict(weights))]
            plain = Net()
            plain.load_state_dict(weights)
            x = torch.randn(4, 5)
            with torch.no_grad():
                wrong += [] if torch.allclose(model(x), plain(x), atol=1e-6) else [f"{kind}: computes with others"]
                load_model_state_dict(model, Net().state_dict())  # the outermost unit still has its full parameters
                load_model_state_dict(model, taken)
                wrong += [] if torch.allclose(model(x), plain(x), atol=1e-6) else [f"{kind}: kept ones"]
            load_model_state_dict(model, Net().state_dict())
        out = model(torch.randn(4, 5)).sum()
        before = model_state_dict(model)
        out.backward()  # taking the state did not disturb it
        return wrong + differing(model_state_dict(model), dict(before))

    assert run(2, body) == [[], []]
