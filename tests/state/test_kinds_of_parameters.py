"""Ties, types, frozen parts, buffers of lower precision, parameters that are full at the moment: states are right."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed import fsdp as theirs

from shardckpt import core as ours
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from tests.kit.models.states import FRONT_ENDS, Block, Net, differing, flat, in_place, over, step, whole
from tests.kit.ranks.harness import run

FORMS = ("flat", "orig", "in place")


class Tied(nn.Module):
    """Tied within a unit, and across two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(6, 11, bias=False)
        self.blocks[1].down.weight = self.blocks[0].down.weight
        self.last.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(torch.arange(4)) + x.mean()
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Mixed(nn.Module):
    """A unit of low precision, and one with a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([Block().bfloat16(), Block()])
        self.blocks[1].up.weight.requires_grad_(False)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.blocks[0](self.first(x).bfloat16()).float()
        return self.last(self.blocks[1](x))


def members(state) -> dict:
    return {key: value for key, value in flat(state).items() if key[0] != "group"}


def trained(front_end: str, net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a net behind a front end and its optimizer, after one step."""
    model = FRONT_ENDS[front_end](net)
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    return model, optim


def test_tied_parameters_have_one_state_and_stay_tied():
    def body(rank, world, front_end):
        torch.manual_seed(0)
        net = Tied()
        plain = copy.deepcopy(net)
        model = FRONT_ENDS[front_end](net)
        optim = torch.optim.Adam(model.parameters())
        step(model, optim)
        full, kept = model_state_dict(model), optim_state_dict(model, optim)
        names = list(full) == list(plain.state_dict()), full["last.weight"] is full["embed.weight"]
        other = torch.optim.Adam(plain.parameters())
        plain.load_state_dict(full)
        load_optim_state_dict(plain, other, kept)
        wrong = differing(members(optim_state_dict(plain, other)), members(kept))
        one_name = {name: value * 2 for name, value in full.items() if name != "embed.weight"}
        load_model_state_dict(model, one_name)
        after = model_state_dict(model)
        wrong += [] if torch.equal(after["embed.weight"], after["last.weight"]) else ["no tie any more"]
        wrong += (
            [] if torch.equal(after["embed.weight"], full["embed.weight"] * 2) else ["not loaded by its other name"]
        )
        step(model, optim, 1)
        after = model_state_dict(model)
        shared = after["blocks.0.down.weight"] is after["blocks.1.down.weight"]
        wrong += [] if names == (True, True) else ["names or the tie"]
        return wrong + ([] if shared else ["no tie after a step"])

    over(FORMS, body)


def test_types_and_frozen_parts_are_kept_between_front_ends():
    def body(rank, world, front_end):
        torch.manual_seed(0)
        model, optim = trained(front_end, Mixed())
        weights, kept = copy.deepcopy(model_state_dict(model)), optim_state_dict(model, optim)
        wrong = [] if "blocks.1.up.weight" not in kept["state"] else ["a state of what is frozen"]
        wrong += [] if kept["state"]["blocks.0.up.weight"]["exp_avg"].dtype is torch.bfloat16 else ["another type"]
        for target in FORMS:
            other = FRONT_ENDS[target](Mixed())
            again = torch.optim.Adam(other.parameters())
            load_model_state_dict(other, weights)
            load_optim_state_dict(other, again, kept)
            wrong += differing(model_state_dict(other), weights)
            wrong += differing(members(optim_state_dict(other, again)), members(kept))
            load_model_state_dict(model, model_state_dict(other, "SHARDED"))
            wrong += differing(model_state_dict(model), weights)
        return wrong

    over((*FORMS, "offloaded"), body)


def test_states_are_sharded_ones_while_parameters_are_full():
    def body(rank, world, front_end):
        torch.manual_seed(0)
        model, optim = trained(front_end, Net())
        before, weights = members(optim_state_dict(model, optim)), copy.deepcopy(model_state_dict(model))
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 5))
        wrong = differing(members(optim_state_dict(model, optim)), before)
        out = model(torch.randn(4, 5)).sum()
        wrong += differing(members(optim_state_dict(model, optim, "SHARDED")), before)
        load_optim_state_dict(model, optim, optim_state_dict(model, optim, "LOCAL"))
        wrong += differing(dict(model_state_dict(model)), weights)
        out.backward()
        return wrong + differing(members(optim_state_dict(model, optim)), before)

    over((*FORMS, "kept"), body)


def test_sharded_states_go_between_torchs_fully_shard_and_ours():
    def body(rank, world, front_end):
        torch.manual_seed(0)
        torchs = in_place(theirs)(Net((1,)))
        model = FRONT_ENDS[front_end](Net((1,)))
        load_model_state_dict(model, torchs.state_dict())
        wrong = differing(model_state_dict(model), {name: whole(v) for name, v in torchs.state_dict().items()})
        other = FRONT_ENDS[front_end](Net((1,)))
        torchs.load_state_dict(model_state_dict(other, "SHARDED"))
        expected = {name: whole(v) for name, v in torchs.state_dict().items()}
        wrong += differing(model_state_dict(other), expected)
        with torch.no_grad():
            torchs(torch.randn(4, 5))  # its outermost parameters are full now
            load_model_state_dict(torchs, model_state_dict(model))
            x = torch.randn(4, 5)
            near = torch.allclose(torchs(x), model(x), atol=1e-6)
        return wrong + ([] if near else ["computes with others"])

    over(FORMS, body)


def test_buffers_have_the_types_that_they_had():
    def body(rank, world):
        low = ours.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = ours.FullyShardedDataParallel(Net(), mixed_precision=low)
        model(torch.randn(4, 5))
        expected = Net().state_dict()
        expected["scale"] = expected["scale"] * 2
        load_model_state_dict(model, expected)
        return model.module.scale.dtype, differing(model_state_dict(model), dict(expected))

    assert run(2, body) == [(torch.bfloat16, [])] * 2
