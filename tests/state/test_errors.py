"""What does not fit is refused on every rank before anything changes, and told with names and values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as theirs

from shardckpt.core import fully_shard
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from tests.kit.models.states import (
    FRONT_ENDS,
    Net,
    differing,
    flat,
    in_place,
    kept_differs,
    over,
    refused,
    step,
    wrapper,
)
from tests.kit.ranks.harness import run

FORMS = ("flat", "orig", "in place")


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


def told_rightly(rank: int, told: str, where: int, *words: str) -> bool:
    """The rank at fault says what is wrong, the others whose fault it is."""
    expected = ("Error: ", *words) if rank == where else ("RankError", f"failed on rank {where}", *words)
    return all(each in told for each in expected)


def test_a_model_state_that_does_not_fit_on_one_rank_changes_nothing_on_any():
    def body(rank, world, front_end):
        torch.manual_seed(rank)
        model = FRONT_ENDS[front_end](Net())
        before = copy.deepcopy(model_state_dict(model))
        torch.manual_seed(9)
        good = Net().state_dict()
        wrong = []
        for how in ("missing", "unexpected", "shape", "dtype", "no tensor"):
            told = refused(load_model_state_dict, model, spoiled(good, how) if rank == 1 else good)
            wrong += [(how, told)] if not told_rightly(rank, told, 1, "last.") else []
            alone = spoiled(good, how) if rank == 0 else {}
            told = refused(load_model_state_dict, model, alone)
            wrong += [(how, "first", told)] if not told_rightly(rank, told, 0, "last.") else []
        wrong += differing(model_state_dict(model), before)
        for given in (spoiled(spoiled(good, "missing"), "unexpected"), {}):
            here = given or (spoiled(spoiled(good, "missing"), "unexpected") if rank == 0 else {})
            keys = load_model_state_dict(model, here, strict=False)
            after = model_state_dict(model)
            wrong += [] if (keys.missing, keys.unexpected) == (("last.bias",), ("last.other",)) else [keys]
            wrong += [] if torch.equal(after["last.bias"], before["last.bias"]) else ["changed"]
            wrong += [] if torch.equal(after["first.weight"], good["first.weight"]) else ["not loaded"]
            load_model_state_dict(model, before)
        return wrong

    over((*FORMS, "plain", "ddp"), body)


@pytest.mark.parametrize("kind", ["FULL", "LOCAL"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_without_memory_is_refused_by_name(kind: str, is_sharded: bool):
    def body(rank, world):
        with torch.device("meta"):
            model = nn.BatchNorm1d(4)
        other = nn.BatchNorm1d(4)
        if is_sharded:
            fully_shard(model)
            fully_shard(other)
        told = refused(load_model_state_dict, model, model_state_dict(other, kind))
        return [name for name in model.state_dict() if f"no memory for {name}: it is on the meta device" not in told]

    assert run(2, body) == [[], []]


def changed(before: dict, how: str) -> dict:
    made = {
        "state": {name: dict(slots) for name, slots in before["state"].items()},
        "param_groups": copy.deepcopy(before["param_groups"]),
    }
    slots, groups = made["state"], made["param_groups"]
    if how == "last.other":
        slots["last.other"] = slots.pop("last.bias")
    elif how == "last.bias/exp_avg":
        slots["last.bias"]["exp_avg"] = torch.zeros(5)
    elif how == "step differs":
        slots["last.bias"]["step"] = slots["last.bias"]["step"] + 1
    elif how == "lr=0.3":
        groups.append({**groups[0], "params": ["last.bias"], "lr": 0.3})
        groups[0]["params"].remove("last.bias")
    elif how == "number":
        made["state"] = dict(enumerate(slots.values()))
        groups[0]["params"] = list(range(len(groups[0]["params"])))
    elif how == "not an optimizer's state":
        made = {"state": {"last.bias": 3}, "param_groups": [{}]}
    return made


def test_an_optimizer_state_that_does_not_fit_changes_nothing():
    def body(rank, world, front_end):
        model = FRONT_ENDS[front_end](Net())
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim)
        before = copy.deepcopy(optim_state_dict(model, optim))
        held = {p: dict(optim.state[p]) for p in optim.state}
        wrong = []
        for how in (
            "last.other",
            "last.bias/exp_avg",
            "step differs",
            "lr=0.3",
            "number",
            "not an optimizer's state",
        ):
            if how == "step differs" and front_end != "flat":
                continue
            bad = changed(before, how)
            for given, where in ((bad if rank == 0 else {}, 0), (bad if rank == 1 else before, 1)):
                told = refused(load_optim_state_dict, model, optim, given)
                wrong += [(how, told)] if not told_rightly(rank, told, where, how) else []
            told = refused(load_optim_state_dict, model, optim, bad)
            wrong += [(how, told)] if how not in told or "RankError" in told else []
        wrong += [t for t in [refused(load_optim_state_dict, model, optim, changed(before, "number"))] if "re" not in t]
        told = refused(load_optim_state_dict, model, optim, {**before, "state": {}}, missing="error")
        wrong += [told] if "Missing state of" not in told else []
        told = refused(load_optim_state_dict, model, optim, before, missing="never")
        wrong += [told] if "never" not in told else []
        foreign = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
        wrong += [t for t in [refused(optim_state_dict, model, foreign)] if "ForeignParameterError" not in t]
        told = refused(optim_state_dict, model, foreign if rank == 1 else optim)
        wrong += [] if told_rightly(rank, told, 1, "does not have") else [told]
        same = all(optim.state[p][s] is v for p, slots in held.items() for s, v in slots.items())
        return wrong + ([] if same else ["replaced"]) + differing(flat(optim_state_dict(model, optim)), flat(before))

    over((*FORMS, "plain"), body)


def test_ranks_that_were_given_different_states_are_told_so():
    def body(rank, world, front_end):
        torch.manual_seed(0)
        model = FRONT_ENDS[front_end](Net())
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim)
        weights, moments = copy.deepcopy(model_state_dict(model)), copy.deepcopy(optim_state_dict(model, optim))
        pieces, kept = model_state_dict(model, "SHARDED"), optim_state_dict(model, optim, "SHARDED")
        other_rate = copy.deepcopy(moments)
        other_rate["param_groups"][0]["lr"] = 0.2
        counted = copy.deepcopy(moments)
        for slots in counted["state"].values():
            slots["step"] += 1
        last = rank == world - 1
        cases = {
            "names": (load_model_state_dict, (model,), weights, spoiled(weights, "missing"), {"strict": False}),
            "kinds": (load_model_state_dict, (model,), weights, pieces, {}),
            "rates": (load_optim_state_dict, (model, optim), moments, other_rate, {}),
            "steps": (load_optim_state_dict, (model, optim), moments, counted, {}),
            "optimizer kinds": (load_optim_state_dict, (model, optim), moments, kept, {}),
            "some none": (load_model_state_dict, (model,), {} if rank == 0 else weights, weights, {"strict": False}),
            "some nothing": (load_optim_state_dict, (model, optim), moments, {}, {}),
        }
        wrong = []
        for name, (load, args, most, ours, how) in cases.items():
            told = refused(load, *args, ours if last else most, **how)
            wrong += [] if "StateMismatchError" in told and "rank" in told else [(name, told)]
            wrong += [] if str(0 if name == "some none" else world - 1) in told else [(name, told)]
        for kind in ("SHARDED", "LOCAL"):  # the first rank alone has whole tensors only
            alone = model_state_dict(model, kind), optim_state_dict(model, optim, kind)
            for load, args in (
                (load_model_state_dict, (model, alone[0])),
                (load_optim_state_dict, (model, optim, alone[1])),
            ):
                told = refused(load, *args[:-1], args[-1] if rank == 0 else {})
                wrong += [] if told_rightly(rank, told, 0, kind, "FULL") else [(kind, told)]
        wrong += differing(dict(model_state_dict(model)), dict(weights))
        return wrong + differing(flat(optim_state_dict(model, optim)), flat(moments))

    over(FORMS, body, world=3)


def test_a_local_state_is_taken_on_its_own_rank_and_units_alone():
    def body(rank, world, front_end):
        model = FRONT_ENDS[front_end](Net())
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim)
        taken, kept = model_state_dict(model, "LOCAL"), optim_state_dict(model, optim, "LOCAL")
        cut_otherwise = FRONT_ENDS["orig" if front_end != "orig" else "flat"](Net())
        wrong = [refused(load_model_state_dict, cut_otherwise, taken)]
        wrong += [refused(load_optim_state_dict, cut_otherwise, torch.optim.Adam(cut_otherwise.parameters()), kept)]
        wrong = [told for told in wrong if "StateMismatchError" not in told]
        whole = model_state_dict(model), optim_state_dict(model, optim)
        for state, kind in ((taken, "FULL"), (taken, "SHARDED"), (whole[0], "LOCAL")):
            told = refused(load_model_state_dict, model, state, kind=kind)
            wrong += [] if f"not as {kind}" in told else [told]
        for state, kind in ((kept, "FULL"), (kept, "SHARDED"), (whole[1], "LOCAL")):
            told = refused(load_optim_state_dict, model, optim, state, kind=kind)
            wrong += [] if f"not as {kind}" in told else [told]
        for state in (taken, kept):
            state._metadata["shardckpt"]["rank"] = 1 - rank
        for load, args in ((load_model_state_dict, (model, taken)), (load_optim_state_dict, (model, optim, kept))):
            told = refused(load, *args)
            wrong += [told] if "shardckpt consolidate" not in told or f"rank {1 - rank} of 2" not in told else []
        return wrong

    over(FORMS, body)


def test_what_fails_on_one_rank_leaves_both_optimizers_as_they_were():
    """Of torch's modules too: live tensors are compared, not what is exported."""

    def body(rank, world, front_end):
        torch.manual_seed(0)
        model = in_place(theirs)(Net((1,)))
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, optim)
        torch.manual_seed(0)
        twin = in_place(theirs)(Net((1,)))
        again = torch.optim.AdamW(twin.parameters(), lr=0.1)
        step(twin, again)
        moments = optim_state_dict(model, optim)
        told = refused(load_optim_state_dict, model, optim, changed(moments, "last.other") if rank else moments)
        wrong = [] if told_rightly(rank, told, 1, "last.other") else [told]
        return wrong + kept_differs(model, optim, twin, again)

    over(("torch in place",), body)


def test_models_under_torchs_own_wrapper_are_checked_before_torch_changes_anything():
    def body(rank, world, front_end):
        torch.manual_seed(rank)
        model = wrapper(theirs, use_orig_params=front_end == "orig")(Net((1,)))
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim)
        weights, moments = copy.deepcopy(model_state_dict(model)), copy.deepcopy(optim_state_dict(model, optim))
        other = {name: value + 1 for name, value in weights.items()}
        wrong = []
        for how in ("missing", "unexpected", "shape", "dtype", "no tensor"):
            told = refused(load_model_state_dict, model, spoiled(other, how))
            wrong += [] if told_rightly(rank, told, 0, "last.") else [(how, told)]
            told = refused(load_model_state_dict, model, spoiled(other, how) if rank == 1 else other)
            wrong += [] if "StateMismatchError" in told and "rank 1" in told else [(how, told)]
        for how in ("last.other", "lr=0.3", "not an optimizer's state"):
            told = refused(load_optim_state_dict, model, optim, changed(moments, how))
            wrong += [] if how in told else [(how, told)]
            told = refused(load_optim_state_dict, model, optim, changed(moments, how) if rank == 1 else moments)
            wrong += [] if how in told or "rank 1" in told else [(how, told)]
        for load, args in ((load_model_state_dict, (model, other)), (load_optim_state_dict, (model, optim, moments))):
            told = refused(load, *args[:-1], args[-1] if rank == 0 else {})
            wrong += [] if "from every rank" in told else [told]
        wrong += differing(dict(model_state_dict(model)), dict(weights))
        return wrong + differing(flat(optim_state_dict(model, optim)), flat(moments))

    over(("flat", "orig"), body)


def test_nothing_that_is_handed_in_is_changed():
    def body(rank, world):
        wrong = []
        for front_end in FORMS:
            model = FRONT_ENDS[front_end](Net())
            optim = torch.optim.Adam(model.parameters(), lr=0.1)
            step(model, optim)
            for kind in ("FULL", "SHARDED", "LOCAL"):
                taken, kept = model_state_dict(model, kind), optim_state_dict(model, optim, kind)
                names, ids = list(taken), {name: id(value) for name, value in taken.items()}
                inner = {(n, s): id(v) for n, slots in kept["state"].items() for s, v in slots.items()}
                values = copy.deepcopy(flat(kept))
                other = FRONT_ENDS[front_end](Net())
                theirs = torch.optim.Adam(other.parameters(), lr=0.1)
                load_model_state_dict(other, taken)
                load_optim_state_dict(other, theirs, kept)
                step(other, theirs)
                wrong += differing(flat(kept), values)
                wrong += [front_end] if list(taken) != names or {n: id(v) for n, v in taken.items()} != ids else []
                wrong += (
                    [front_end]
                    if {(n, s): id(v) for n, ss in kept["state"].items() for s, v in ss.items()} != inner
                    else []
                )
        return wrong

    assert run(2, body) == [[], []]


def test_g5_a_load_between_forward_and_backward_is_not_lost():
    def body(rank, world, front_end):
        torch.manual_seed(0)
        model = FRONT_ENDS[front_end](Net())
        torch.manual_seed(1)
        weights = Net().state_dict()
        wrong = []
        for kind in ("FULL", "SHARDED", "LOCAL"):
            source = FRONT_ENDS[front_end](Net())
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

    over((*FORMS, "kept", "whole"), body)
