"""An optimizer's state goes by name: training from a loaded state is the uninterrupted run, bit for bit."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.state import (
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from tests.kit.models.states import kept_differs, over
from tests.kit.ranks.harness import run

STYLES = ("flat", "orig", "in place")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.last = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def sharded(net: nn.Module, style: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if style == "plain":
            return net
        if style == "in place":
            for block in net.blocks:
                fully_shard(block)
            return fully_shard(net)
        for index, block in enumerate(net.blocks):
            net.blocks[index] = FullyShardedDataParallel(block, use_orig_params=style == "orig")
        return FullyShardedDataParallel(net, use_orig_params=style == "orig")


def step(model: nn.Module, optim, rank: int, seed: int) -> None:
    torch.manual_seed(seed * 10 + rank)
    optim.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    optim.step()


def flattened(state) -> dict:
    return {(name, slot): value for name, slots in state["state"].items() for slot, value in slots.items()}


def test_training_goes_on_from_a_loaded_state_as_if_it_had_not_stopped():
    """With a parameter that is never used: it has no state, or is one of a flat parameter that has."""

    def body(rank, world, style):
        torch.manual_seed(0)
        net = Net()
        model = sharded(copy.deepcopy(net), style)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
        for seed in range(2):
            step(model, optim, rank, seed)
        weights = copy.deepcopy(model_state_dict(model))
        moments = {
            "FULL": optim_state_dict(model, optim),
            "first": optim_state_dict(model, optim, rank0_only=True),
            "SHARDED": optim_state_dict(model, optim, "SHARDED"),
            "LOCAL": optim_state_dict(model, optim, "LOCAL"),
        }
        for seed in range(2, 4):
            step(model, optim, rank, seed)
        wrong = []
        for kind, kept in moments.items():
            again = sharded(Net(), style)
            load_model_state_dict(again, weights)
            other = torch.optim.AdamW(again.parameters(), lr=0.7)
            load_optim_state_dict(again, other, kept)
            for seed in range(2, 4):
                step(again, other, rank, seed)
            wrong += [(kind, each) for each in kept_differs(model, optim, again, other)]
        return wrong

    over(STYLES, body)


def test_every_style_gives_the_state_of_the_unsharded_optimizer_and_takes_it():
    def body(rank, world):
        torch.manual_seed(0)
        net = Net()
        plain = copy.deepcopy(net)
        optim = torch.optim.Adam(plain.parameters(), lr=0.1)
        for seed in range(2):
            step(plain, optim, 0, seed)
        expected = optim_state_dict(plain, optim)
        wrong = []
        for source in STYLES:
            model = sharded(copy.deepcopy(net), source)
            made = torch.optim.Adam(model.parameters(), lr=0.1)
            load_optim_state_dict(model, made, expected)
            back = optim_state_dict(model, made)
            for key, value in flattened(expected).items():
                got = flattened(back).get(key)
                if got is None or got.dtype != value.dtype or not torch.equal(got, value):
                    wrong.append((source, key))
            extra = (
                set(flattened(back))
                - set(flattened(expected))
                - {("unused", s) for s in ("step", "exp_avg", "exp_avg_sq")}
            )
            wrong += [(source, key) for key in extra]
            pointers = [v.data_ptr() for v in flattened(back).values()]
            if len(set(pointers)) != len(pointers):
                wrong.append((source, "two entries share a tensor"))
        return wrong

    assert run(2, body) == [[], []]


def test_g1_groups_in_another_order_keep_their_own_settings_and_moments():
    def body(rank, world, style):
        torch.manual_seed(0)
        net = Net()
        model = sharded(net, style)
        inner = [p for n, p in model.named_parameters() if "blocks.0" in n]
        outer = [p for n, p in model.named_parameters() if "blocks.1" in n]
        one = torch.optim.Adam([{"params": inner, "lr": 0.1}, {"params": outer, "lr": 0.2}])
        step(model, one, rank, 0)
        saved = optim_state_dict(model, one)
        other = torch.optim.Adam([{"params": outer}, {"params": inner}], lr=9.0)
        load_optim_state_dict(model, other, saved)
        rates = [group["lr"] for group in other.param_groups]
        wrong = [] if rates == [0.2, 0.1] else [rates]
        other.param_groups.reverse()
        return wrong + kept_differs(model, one, model, other)

    over(STYLES, body)


def test_a_rank_without_elements_gets_the_saved_step_if_its_optimizer_has_a_state():
    def body(rank, world, style):
        model = sharded(Net(), style)
        optim = torch.optim.Adagrad(model.parameters(), lr=0.1)
        for seed in range(2):
            step(model, optim, rank, seed)
        wrong = []
        for what in ("FULL", "first", "SHARDED", "static"):
            kind = "FULL" if what in ("first", "static") else what
            saved = optim_state_dict(model, optim, kind, rank0_only=what == "first")
            again = sharded(Net(), style)
            other = torch.optim.Adagrad(again.parameters(), lr=0.7)
            if what == "static":
                other.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(again, other, saved))
            else:
                load_optim_state_dict(again, other, saved)
            for name, p in again.named_parameters():
                expected = 0.0 if name.endswith("unused") else 2.0
                if other.state[p].get("step", -1.0) != expected or other.state[p]["sum"].shape != p.shape:
                    wrong.append((what, name, other.state[p]))
        return wrong

    over(("orig", "in place"), body)
