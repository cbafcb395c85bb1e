"""What modules make of their states themselves is the same by torch's recursion and by ours, unsharded or sharded."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed import fsdp as theirs

from shardckpt.state import load_model_state_dict, model_state_dict
from tests.kit.models.states import FRONT_ENDS, Net, differing, in_place, over, refused, whole


class Announced(nn.Linear):
    """Adds to what its parent class gives."""

    def state_dict(self, *args, prefix="", **kwargs):
        made = super().state_dict(*args, prefix=prefix, **kwargs)
        made[f"{prefix}size"] = torch.tensor(float(self.in_features))
        return made


class Doubled(nn.Linear):
    """Saves twice its weight beside the weight, and takes an older name."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}twice"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state, prefix, *args):
        state.pop(f"{prefix}twice", None)
        if f"{prefix}older" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}older")
        super()._load_from_state_dict(state, prefix, *args)


def renames(module, state, prefix, metadata):
    state[f"{prefix}called"] = state.pop(f"{prefix}bias")


def takes(module, state, prefix, *args):
    for name in [name for name in state if name.startswith(f"{prefix}last.called")]:
        state[name.replace("called", "bias")] = state.pop(name)
    state.pop(f"{prefix}first.size", None)


class Own(Net):
    """Its modules override and hook whatever there is."""

    def __init__(self) -> None:
        super().__init__((1,))
        self.first = Announced(5, 6)
        self.blocks[0].up = Doubled(6, 8)
        self.last.register_state_dict_post_hook(renames)
        self.register_load_state_dict_pre_hook(takes)


def whole_of(state) -> dict:
    return {name: whole(value) for name, value in state.items()}


def test_both_ways_give_and_take_the_same():
    def body(rank, world, front_end):
        torch.manual_seed(3)
        plain = Own()
        expected = dict(plain.state_dict())
        torch.manual_seed(4)
        shard = in_place(theirs) if front_end == "torch in place" else FRONT_ENDS[front_end]
        model = shard(Own())
        before = whole_of(model_state_dict(model))
        wrong = [] if list(before) == list(expected) else [f"names {list(before)}"]
        registered = {name: id(parameter) for name, parameter in model.named_parameters()}
        for taken in (model_state_dict(model, "SHARDED"), model_state_dict(model, rank0_only=True)):
            wrong += differing(whole_of(taken), before if taken else {})
        if front_end not in ("ddp", "compiled"):  # whose own has other names
            wrong += differing(whole_of(model.state_dict()), before)
        ways = {
            "given": lambda: load_model_state_dict(model, expected),
            "by the first": lambda: load_model_state_dict(model, expected if rank == 0 else {}),
            "older": lambda: load_model_state_dict(model, older(expected)),
            "pieces": lambda: load_model_state_dict(model, pieces),
        }
        if front_end in ("flat", "orig", "plain"):
            ways["recursion"] = lambda: model.load_state_dict(expected)
            ways["assigned"] = lambda: model.load_state_dict(copy.deepcopy(expected), assign=True)
        if front_end in ("in place", "torch in place"):
            ways["recursion"] = lambda: model.load_state_dict(pieces)
            ways["assigned"] = lambda: model.load_state_dict(dict(pieces), assign=True)
        load_model_state_dict(model, expected)
        pieces = {n: v.clone() for n, v in model_state_dict(model, "SHARDED").items()}
        for way, load in ways.items():
            load_model_state_dict(model, before)
            wrong += [f"not undone before {way}"] if not differing(whole_of(model_state_dict(model)), expected) else []
            load()
            wrong += [f"{way} {each}" for each in differing(whole_of(model_state_dict(model)), expected)]
            with torch.no_grad():
                out, right = model(torch.ones(2, 5)), plain(torch.ones(2, 5))
            wrong += [] if torch.allclose(out, right, atol=1e-6) else [f"{way}: computes with others"]
            if way != "assigned" and front_end != "torch in place":  # which registers others after a forward
                same = {name: id(parameter) for name, parameter in model.named_parameters()} == registered
                wrong += [] if same else [f"{way}: other parameters are registered"]
        told = refused(load_model_state_dict, model, {**expected, "blocks.0.up.weight": torch.zeros(2, 2), "odd": 3})
        wrong += [] if "size mismatch for blocks.0.up.weight" in told and "Unexpected key: odd" in told else [told]
        return wrong

    def older(state):
        return {name.replace("blocks.0.up.weight", "blocks.0.up.older"): value for name, value in state.items()}

    over(("flat", "orig", "in place", "wrapped inside", "compiled", "plain", "ddp", "torch in place"), body)


def test_a_state_dict_that_was_put_on_the_model_is_asked():
    def body(rank, world, front_end):
        model = FRONT_ENDS[front_end](Net((1,)))
        own = model.state_dict
        model.state_dict = lambda *a, **k: {name: value for name, value in own(*a, **k).items() if "up" in name}
        return [name for name in model_state_dict(model) if "up" not in name] or (
            [] if len(model_state_dict(model, "SHARDED")) == 4 else ["not all"]
        )

    over(("flat", "orig", "in place", "plain"), body)
