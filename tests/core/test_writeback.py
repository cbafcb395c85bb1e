"""Parameters that a user replaces by others: taken over while sharded, refused between forward and backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from tests.kit.models.under_test import FSDP, STYLES, Strategy, Style, shard, sharder
from tests.kit.ranks.harness import raised_everywhere, run


def pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 7))


@pytest.mark.parametrize("variable", [True, False], ids=["variable", "data"])
def test_an_original_parameter_replaced_while_sharded_is_taken_over(variable):
    def body(rank: int, world: int) -> bool:
        model = shard(pair(), use_orig_params=True)
        last = model.module[2]
        twos = nn.Parameter(torch.ones_like(last.weight) * 2)
        if variable:
            last.weight = twos
        else:
            last.weight.data = twos.data
        with FSDP.summon_full_params(model):
            return bool((last.weight == 2).all()) and last.weight.shape == (7, 5)

    assert run(2, body) == [True, True]


def test_an_original_parameter_of_another_shape_is_refused():
    def body(rank: int, world: int) -> None:
        model = shard(pair(), use_orig_params=True)
        for layer in (model.module[0], model.module[2]):
            layer.weight = nn.Parameter(torch.ones(layer.weight.numel() + 1))
        with FSDP.summon_full_params(model):
            pass

    for each in raised_everywhere(2, body):
        assert each.is_a(RuntimeError)
        assert "Cannot writeback when the parameter shape changes" in each.message


@pytest.mark.parametrize("variable", [True, False], ids=["variable", "data"])
def test_an_original_parameter_replaced_between_forward_and_backward_is_refused(variable):
    def body(rank: int, world: int) -> None:
        model = shard(pair(), use_orig_params=True, sharding_strategy=Strategy.SHARD_GRAD_OP)
        loss = model(torch.ones(2, 5)).sum()
        last = model.module[2]
        if variable:
            last.weight = nn.Parameter(last.weight.detach().clone())
        else:
            last.weight.data = last.weight.detach().clone()
        loss.backward()

    for each in raised_everywhere(2, body):
        assert each.is_a(AssertionError)
        assert "changing the parameters between forward and backward" in each.message


@STYLES
def test_nothing_that_training_does_is_taken_for_a_change(style: Style):
    def body(rank: int, world: int) -> bool:
        model = sharder(style, Strategy.SHARD_GRAD_OP)(pair())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 5))
        return True

    assert run(2, body) == [True, True]


def test_a_module_may_be_wrapped_anew_after_it_was_trained_below_another_root():
    """The instances in it ran below the first root; they belong to the second from its first forward on."""

    def body(rank: int, world: int) -> bool:
        inner = nn.Sequential(shard(nn.Linear(5, 5)), nn.ReLU())
        first = shard(inner)
        optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
        for _ in range(2):
            first(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = first(torch.ones(2, 5))
        second = shard(inner)
        after = second(torch.ones(2, 5))
        after.sum().backward()
        return torch.equal(before, after) and second.check_is_root() and inner[0]._flat_param.grad is not None

    assert run(2, body) == [True, True]


def answer(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(2, 5))


@STYLES
@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD])
def test_a_call_with_other_parameters_changes_no_parameter(style: Style, strategy: Strategy):
    def body(rank: int, world: int) -> list[bool]:
        model = sharder(style, strategy)(pair())
        before = answer(model)
        found = []
        for factor in (0.5, 2.0):
            if not style.wraps:
                model.reshard()  # full parameters may be registered after a forward
            others = {name: each.detach() * factor for name, each in model.named_parameters()}
            plain = {name: each.detach() * factor for name, each in pair().named_parameters()}
            with torch.no_grad() if factor < 1 else contextlib.nullcontext():
                inside = torch.func.functional_call(model, others, (torch.ones(2, 5),))
            found.append(torch.allclose(inside, torch.func.functional_call(pair(), plain, (torch.ones(2, 5),))))
            found.append(torch.equal(answer(model), before))
        return found

    assert run(2, body) == [[True] * 4] * 2


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP])
def test_data_that_is_exchanged_and_put_back_has_the_values_of_before(orig: bool, strategy: Strategy):
    def body(rank: int, world: int) -> list[bool]:
        model = shard(pair(), use_orig_params=orig, sharding_strategy=strategy)
        before = answer(model)
        averages = [each.detach().clone() * 0.5 for each in model.parameters()]
        outputs = []
        for _ in range(4):
            for index, each in enumerate(model.parameters()):
                each.data, averages[index] = averages[index], each.data
            outputs.append(answer(model))
        return [torch.equal(output, before) for output in outputs]

    assert run(2, body) == [[False, True, False, True]] * 2
