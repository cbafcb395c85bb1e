"""An optimizer's state goes by name: training from a loaded state is the uninterrupted run, bit for bit."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from harness import run
from torch import nn

from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.state import (
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)

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


@pytest.mark.parametrize("kind", ["FULL", "first", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("style", STYLES)
def test_training_goes_on_from_a_loaded_state_as_if_it_had_not_stopped(style, kind):
    def body(rank, world):
        torch.manual_seed(0)
        net = Net()
        model = sharded(copy.deepcopy(net), style)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
        for seed in range(2):
            step(model, optim, rank, seed)
        how = {"rank0_only": True} if kind == "first" else {}
        name = "FULL" if kind == "first" else kind
        weights, moments = copy.deepcopy(model_state_dict(model, "FULL")), optim_state_dict(model, optim, name, **how)
        again = sharded(Net(), style)
        load_model_state_dict(again, weights)
        other = torch.optim.AdamW(again.parameters(), lr=0.7)
        load_optim_state_dict(again, other, moments)
        for seed in range(2, 4):
            step(model, optim, rank, seed)
            step(again, other, rank, seed)
        a, b = model_state_dict(model), model_state_dict(again)
        live = [
            set(optim.state.get(p, {})) == set(other.state.get(q, {}))
            and all(
                torch.equal(_plain(v), _plain(other.state[q][s])) and v.dtype == other.state[q][s].dtype
                for s, v in optim.state.get(p, {}).items()
            )
            for p, q in zip(model.parameters(), again.parameters(), strict=True)
        ]
        return all(torch.equal(a[n], b[n]) for n in a), all(live), other.param_groups[0]["lr"]

    assert run(2, body) == [(True, True, 0.1)] * 2


def _plain(value):
    return value.to_local() if hasattr(value, "to_local") else value


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


@pytest.mark.parametrize("style", STYLES)
def test_g1_groups_in_another_order_keep_their_own_settings_and_moments(style):
    def body(rank, world):
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
        same = all(
            torch.equal(_plain(one.state[p]["exp_avg"]), _plain(other.state[p]["exp_avg"]))
            if p in one.state
            else p not in other.state
            for p in [*inner, *outer]
        )
        return same, [g["lr"] for g in other.param_groups]

    assert run(2, body) == [(True, [0.2, 0.1])] * 2
