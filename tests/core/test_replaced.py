"""Parameters that a user replaces while their unit is sharded are adopted or refused by name, never lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.kit.models.models import PLAIN, Case, Tied, blocks_and_root, built, floats, square, tokens
from tests.kit.models.under_test import FSDP, TORCH, Strategy, core, shard, torch_is_wrong
from tests.kit.ranks.harness import run

if not TORCH:
    from shardckpt.core.tools.summon_full_params import iter_full_params

STRATEGIES = pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.NO_SHARD], ids=lambda s: s.name)


def cut(which: Case, **settings) -> tuple[nn.Module, nn.Module]:
    plain = built(which)
    return plain, which.cut(copy.deepcopy(plain), lambda module: shard(module, **settings))


def differences(model: nn.Module, plain: nn.Module) -> list[str]:
    found = dict(iter_full_params(model))
    return [name for name, p in plain.named_parameters() if not torch.equal(found.pop(name), p)] + list(found)


@torch_is_wrong("with a flat parameter the new value is lost without a word")
@STRATEGIES
def test_flat_a_full_parameter_in_its_place_is_cut(strategy):
    def body(rank, world):
        plain, model = cut(PLAIN, sharding_strategy=strategy)
        square(model(floats(rank, 0))).backward()
        model.zero_grad()
        for net in (model, plain):
            net.blocks[1].up.weight = nn.Parameter(torch.full((9, 7), 0.5))
        wrong = [] if torch.allclose(model(floats(rank, 0)), plain(floats(rank, 0))) else ["forward"]
        names = [name for name, _ in model.named_parameters()]
        return wrong + differences(model, plain) + [name for name in names if "_flat_param" not in name]

    assert run(2, body) == [[]] * 2


@torch_is_wrong("with a flat parameter the new value is lost without a word")
def test_flat_a_parameter_of_another_shape_is_refused_by_name():
    def body(rank, world):
        _, model = cut(PLAIN)
        model.blocks[1].up.weight = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(RuntimeError, match=r"Cannot writeback when the parameter shape changes: up\.weight"):
            model(floats(rank, 0))
        model.blocks[1].up.weight = nn.Parameter(torch.ones(9, 7))
        model(floats(rank, 0))

    run(2, body)


@torch_is_wrong("the new object is ignored")
def test_flat_another_flat_parameter_is_adopted():
    def body(rank, world):
        _, model = cut(PLAIN)
        inner = model.blocks[0].module
        inner._flat_param = nn.Parameter(torch.full_like(inner._flat_param, 0.25))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        values = [v for name, v in iter_full_params(model) if name.startswith("blocks.0")]
        square(model(floats(rank, 0))).backward()
        had = inner._flat_param.grad is not None
        optimizer.step()
        return all(bool((v == 0.25).all()) for v in values), had, bool((inner._flat_param != 0.25).any())

    assert run(2, body) == [(True, True, True)] * 2


@torch_is_wrong("a rank that has no part of it does not notice")
@STRATEGIES
def test_original_another_part_is_adopted(strategy):
    def body(rank, world):
        _, model = cut(PLAIN, use_orig_params=True, sharding_strategy=strategy)
        square(model(floats(rank, 0))).backward()
        model.zero_grad()
        weight = model.blocks[0].up.weight
        given = model.blocks[0].up.weight = nn.Parameter(torch.full_like(weight, 0.25))
        square(model(floats(rank, 0))).backward()
        with FSDP.summon_full_params(model):
            values = model.blocks[0].up.weight.detach().clone()
        same = model.blocks[0].up.weight is given
        return bool((values == 0.25).all()), same, given.numel() == 0 or given.grad is not None

    assert run(2, body) == [(True, True, True)] * 2


@torch_is_wrong("a rank that has no part of it does not notice")
def test_original_a_parameter_of_another_shape_is_refused():
    def make_model():
        return cut(PLAIN, use_orig_params=True)[1]

    assert_another_shape_is_refused(make_model, nn.Parameter(torch.ones(2, 2)))


def assert_another_shape_is_refused(make_model, value):
    def body(rank, world):
        model = make_model()
        model.blocks[1].up.weight = value
        with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes") as caught:
            model(floats(rank, 0))
        return str(caught.value)

    assert all("up.weight" in each and "blocks.1" in each for each in run(2, body))


@torch_is_wrong("the wrapper's parameters only")
def test_in_place_what_load_state_dict_assigns_is_adopted():
    def body(rank, world):
        plain = built(PLAIN)
        model = blocks_and_root(copy.deepcopy(plain), core.fully_shard)
        square(model(floats(rank, 0))).backward()
        mesh = model.first.weight.device_mesh
        state = {}
        for name, p in model.named_parameters():
            other = plain.get_parameter(name)
            with torch.no_grad():
                other.add_(1.0)
            state[name] = distribute_tensor(other.detach(), mesh, p.placements)
        model.load_state_dict(state, assign=True)
        with torch.no_grad():
            wrong = [] if torch.allclose(model(floats(rank, 0)), plain(floats(rank, 0))) else ["forward"]
        wrong += [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
        return wrong + differences(model, plain)

    assert run(2, body) == [[]] * 2


@torch_is_wrong("an error about mixed tensors")
def test_in_place_a_plain_parameter_of_another_shape_is_refused_by_name():
    def make_model():
        return blocks_and_root(built(PLAIN), core.fully_shard)

    assert_another_shape_is_refused(make_model, nn.Parameter(torch.ones(9, 7)))


@torch_is_wrong("what is in the second place is lost")
@pytest.mark.parametrize("orig", [False, True])
def test_any_place_of_a_tied_parameter_counts(orig):
    def body(rank, world):
        which = Case("tied", Tied, tokens)
        plain, model = cut(which, use_orig_params=orig)
        shape = model.head.weight.shape
        model.head.weight = nn.Parameter(torch.full(shape, 0.5))
        with torch.no_grad():
            plain.head.weight.fill_(0.5)
        wrong = [] if torch.allclose(model(tokens(rank, 0)), plain(tokens(rank, 0))) else ["forward"]
        return wrong + differences(model, plain)

    assert run(2, body) == [[]] * 2


@torch_is_wrong("what is written to it is lost")
def test_flat_writing_to_what_stands_for_a_parameter_is_refused():
    def body(rank, world):
        _, model = cut(PLAIN)
        weight = model.blocks[0].up.weight
        writes = [
            lambda: weight.data.fill_(1.0),
            lambda: setattr(weight, "data", torch.ones(9, 7)),
            lambda: setattr(weight, "requires_grad", False),
            lambda: nn.init.ones_(weight),
        ]
        for write in writes:
            with pytest.raises(
                RuntimeError, match=r"up\.weight is used outside its unit's forward.*summon_full_params"
            ):
                write()
        return tuple(weight.shape), weight.dtype, str(weight.device), weight.requires_grad

    assert run(2, body) == [((9, 7), torch.float32, "cpu", True)] * 2
