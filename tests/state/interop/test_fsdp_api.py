"""`state_dict`, `load_state_dict` and the statics of the wrapper give what torch's give; what goes in comes back."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from shardckpt import core as ours
from shardckpt.state import model_state_dict
from tests.kit.models.states import compiled
from tests.kit.ranks.harness import run

CPU = torch.device("cpu")


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"note": 7}

    def set_extra_state(self, state):
        self.loaded = state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2)])
        self.last = Extra(7, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def wrapped(engine, net: nn.Module, orig: bool, **settings) -> nn.Module:
    if engine is theirs:
        settings["device_id"] = CPU
    for index, block in enumerate(net.blocks):
        net.blocks[index] = engine.FullyShardedDataParallel(block, use_orig_params=orig, **settings)
    return engine.FullyShardedDataParallel(net, use_orig_params=orig, **settings)


def step(model: nn.Module, optim, rank: int, seed: int = 0) -> None:
    torch.manual_seed(seed * 10 + rank)
    optim.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    optim.step()


def quiet():
    warnings.simplefilter("ignore")


def seeded_net() -> Net:
    """Return the same net on each rank, and show no warnings from now on."""
    quiet()
    torch.manual_seed(0)
    return Net()


def near(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        a, b = (x.full_tensor() if isinstance(x, DTensor) else x for x in (a, b))
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=1e-6)
    if isinstance(a, dict):
        return list(map(str, sorted(a, key=str))) == list(map(str, sorted(b, key=str))) and all(
            near(a[k], b[k]) for k in a
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(near(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def without(value, key):
    return {k: without(v, key) for k, v in value.items() if k != key} if isinstance(value, dict) else value


FLAT_AND_ORIG = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


@FLAT_AND_ORIG
def test_full_state_dicts_are_those_of_the_unsharded_model(orig):
    def body(rank, world):
        net = seeded_net()
        expected = net.state_dict()
        model = wrapped(ours, copy.deepcopy(net), orig)
        found = model.state_dict()
        again = model_state_dict(model)
        parent = nn.Sequential(model).state_dict()
        return (
            list(found) == list(expected) == list(again),
            near(dict(found), dict(expected)),
            near(dict(again), dict(found)),
            list(parent) == [f"0.{name}" for name in expected],
            [n for n, p in model.named_parameters() if "_flat_param" in n] != [] or orig,
        )

    assert run(2, body) == [(True,) * 5] * 2


@pytest.mark.parametrize("kind", list(ours.StateDictType), ids=lambda kind: kind.name)
@FLAT_AND_ORIG
def test_what_a_state_dict_gives_load_state_dict_takes(orig, kind):
    def body(rank, world):
        model = wrapped(ours, seeded_net(), orig)
        torch.manual_seed(1)
        other = wrapped(ours, Net(), orig)
        with ours.FullyShardedDataParallel.state_dict_type(model, kind):
            state = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in model.state_dict().items()}
        with ours.FullyShardedDataParallel.state_dict_type(other, kind):
            told = other.load_state_dict(state)
        a, b = (copy.deepcopy(dict(model_state_dict(each))) for each in (model, other))
        optim = torch.optim.SGD(other.parameters(), lr=0.1)
        step(other, optim, rank)
        return near(a, b), told.missing_keys, told.unexpected_keys, other.last.loaded

    assert run(2, body) == [(True, [], [], {"note": 7})] * 2


def test_compiled_and_recomputing_modules_load_by_names_with_or_without_wrappers():
    def body(rank, world):
        quiet()
        torch.manual_seed(0)
        model, other, third = (wrapped(ours, compiled_inside(), True) for _ in range(3))
        expected = copy.deepcopy(dict(model_state_dict(model)))
        wrong = []
        for kind, assign in itertools.product(ours.StateDictType, (False, True)):
            for each in (model, other, third):
                ours.FullyShardedDataParallel.set_state_dict_type(each, kind)
            state = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in model.state_dict().items()}
            segments = "blocks.0._orig_mod._checkpoint_wrapped_module.0"
            long = {name.replace("blocks.0.0", segments): value for name, value in state.items()}
            for target, given in ((other, state), (third, long)):
                with torch.no_grad():
                    for parameter in target.parameters():
                        parameter.zero_()
                told = target.load_state_dict(given, assign=assign)
                same = near(dict(model_state_dict(target)), expected)
                wrong += [] if same and not any(told) else [(kind.name, assign, given is long)]
        return wrong, long != state

    assert run(2, body) == [([], True)] * 2


def compiled_inside() -> Net:
    net = Net()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = compiled(checkpoint_wrapper(block))
    return net


@pytest.mark.parametrize("inside", [False, True], ids=["called on the wrapper", "called on a plain module"])
@FLAT_AND_ORIG
def test_a_load_that_a_module_ends_on_the_way_leaves_the_sharding_in_place(orig, inside):
    def body(rank, world):
        model = wrapped(ours, seeded_net(), orig)
        names = [name for name, _ in model.named_parameters()]
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        top = nn.Sequential(model) if inside else model
        state = top.state_dict()
        model.module.last.set_extra_state = refuse
        with pytest.raises(KeyError, match="not mine"):
            top.load_state_dict(state)
        del model.module.last.set_extra_state
        if inside:
            top.load_state_dict(state)
        assert [name for name, _ in model.named_parameters()] == names
        step(model, optim, rank)
        return len(model_state_dict(model)) == len(state)

    def refuse(state):
        raise KeyError("not mine")

    assert run(2, body) == [True, True]


def test_what_differs_is_reported_by_names_of_the_unsharded_model():
    def body(rank, world):
        quiet()
        model = wrapped(ours, Net(), False)
        state = model.state_dict()
        del state["blocks.1.0.weight"]
        state["blocks.1.0.wrong"] = torch.zeros(1)
        told = model.load_state_dict(state, strict=False)
        return told.missing_keys, told.unexpected_keys

    assert run(2, body) == [(["blocks.1.0.weight"], ["blocks.1.0.wrong"])] * 2


def test_rank0_only_and_offload_give_the_first_rank_everything():
    def body(rank, world):
        quiet()
        model = wrapped(ours, Net(), False)
        config = ours.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with ours.FullyShardedDataParallel.state_dict_type(model, ours.StateDictType.FULL_STATE_DICT, config):
            return len(model.state_dict())

    assert run(2, body) == [len(Net().state_dict()), 0]


@FLAT_AND_ORIG
def test_the_statics_of_optimizers_give_what_torchs_give(orig):
    def body(rank, world):
        net = seeded_net()
        kept = []
        for engine in (ours, theirs):
            fsdp = engine.FullyShardedDataParallel
            model = wrapped(engine, copy.deepcopy(net), orig)
            optim = torch.optim.Adam(model.parameters(), lr=0.1)
            step(model, optim, rank)
            full = fsdp.full_optim_state_dict(model, optim, rank0_only=False)
            first = fsdp.full_optim_state_dict(model, optim)
            current = copy.deepcopy(fsdp.optim_state_dict(model, optim))
            sharded = fsdp.shard_full_optim_state_dict(full, model, optim=optim)
            scattered = fsdp.scatter_full_optim_state_dict(first if rank == 0 else None, model, optim=optim)
            loaded = fsdp.optim_state_dict_to_load(model, optim, current)
            plain = copy.deepcopy(net)
            plain_optim = torch.optim.Adam(plain.parameters(), lr=0.1)
            ids = fsdp.rekey_optim_state_dict(full, engine.OptimStateKeyType.PARAM_ID, plain, optim=plain_optim)
            names = fsdp.rekey_optim_state_dict(ids, engine.OptimStateKeyType.PARAM_NAME, plain, optim=plain_optim)
            optim.load_state_dict(loaded)
            step(model, optim, rank, 1)
            kept.append(
                {
                    "full": full,
                    "first": first,
                    "current": current,
                    "sharded": sharded,
                    "scattered": scattered,
                    "loaded": loaded,
                    "ids": ids,
                    "names": names["state"],  # torch sorts a group's names here
                }
            )
        if not near(kept[0].pop("current"), kept[0]["full"]):
            return ["current"]
        if orig:  # torch 2.13 gives exp_avg the values of exp_avg_sq: looked at in the flat run alone
            kept = [without(each, "exp_avg") for each in kept]
        return [name for name in kept[0] if not near(kept[0][name], kept[1][name])]

    assert run(2, body) == [[], []]


@FLAT_AND_ORIG
def test_an_optimizers_own_state_is_taken_by_numbers_or_by_live_names(orig):
    def body(rank, world):
        quiet()
        torch.manual_seed(0)
        fsdp = ours.FullyShardedDataParallel
        model = wrapped(ours, Net(), orig)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim, rank)
        numbered = optim.state_dict()
        names = [name for name, _ in model.named_parameters()]
        named = {**numbered, "state": {names[number]: state for number, state in numbered["state"].items()}}
        found = [fsdp.optim_state_dict(model, optim, given) for given in (None, numbered, named)]
        return near(found[0], found[1]), near(found[0], found[2]), len(found[0]["state"])

    assert run(2, body) == [(True, True, 10)] * 2


def test_names_get_numbers_with_the_settings_of_the_group_that_had_them():
    fsdp = ours.FullyShardedDataParallel
    net = Net()
    weights = [p for name, p in net.named_parameters() if name.endswith("weight")]
    rest = [p for name, p in net.named_parameters() if not name.endswith("weight")]
    optim = torch.optim.Adam([{"params": weights, "lr": 0.1}, {"params": rest, "lr": 0.2}, {"params": [], "lr": 0.3}])
    net(torch.randn(4, 5)).sum().backward()
    optim.step()
    names = fsdp.rekey_optim_state_dict(optim.state_dict(), ours.OptimStateKeyType.PARAM_NAME, net, optim=optim)
    other = torch.optim.Adam([{"params": rest}, {"params": []}, {"params": weights}], lr=7.0)
    other.load_state_dict(fsdp.rekey_optim_state_dict(names, ours.OptimStateKeyType.PARAM_ID, net, optim=other))
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.3, 0.1]
    assert all(torch.equal(other.state[p]["exp_avg"], optim.state[p]["exp_avg"]) for p in net.parameters())
    mixed = torch.optim.Adam(net.parameters(), lr=7.0)
    with pytest.raises(ValueError, match=r"lr=0.1 of .*; lr=0.2 of"):
        fsdp.rekey_optim_state_dict(names, ours.OptimStateKeyType.PARAM_ID, net, optim=mixed)


@FLAT_AND_ORIG
def test_sharded_optimizer_states_are_flattened_for_the_optimizer_again(orig):
    def body(rank, world):
        torch.manual_seed(0)
        fsdp = ours.FullyShardedDataParallel
        model = wrapped(ours, Net(), orig)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim, rank)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            sharded = fsdp.sharded_optim_state_dict(model, optim)
            flattened = fsdp.flatten_sharded_optim_state_dict(sharded, model, optim)
            whole = fsdp.full_optim_state_dict(model, optim, rank0_only=False)
        deprecated = sum(issubclass(each.category, FutureWarning) for each in told)
        cut = all(isinstance(each, DTensor) for slots in sharded["state"].values() for each in (slots["exp_avg"],))
        other = torch.optim.Adam(model.parameters(), lr=0.7)
        other.load_state_dict(flattened)
        live = near(optim.state_dict(), other.state_dict())
        return deprecated, cut, near(sharded, whole), live

    assert run(2, body) == [(3, True, True, True)] * 2
