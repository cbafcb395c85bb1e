"""What users hold of a sharded model can be saved by `torch.save` and copied: states, parameters, optimizers."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.kit.models.front_ends import FRONT_ENDS, sharder
from tests.kit.models.under_test import TORCH
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(TORCH, reason="asks states of our package")
EACH = pytest.mark.parametrize("front_end", FRONT_ENDS)


def headed() -> nn.Module:
    """The head has one row: of two ranks the second has none of it."""
    return nn.Sequential(nn.Linear(30, 8), nn.Linear(8, 1))


def trained(front_end: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = sharder(front_end)(headed())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


def loaded(value: Any, *, weights_only: bool = True) -> Any:
    """A value as it comes back from a file of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def equal(one: Any, other: Any) -> bool:
    """Whether two states hold the same, tensors part by part."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, DTensor):
        same = one.placements == other.placements and one.shape == other.shape
        return same and equal(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@EACH
def test_sharded_states_are_saved_and_copied_where_a_rank_has_no_row(front_end):
    def body(rank, world):
        from shardckpt import model_state_dict, optim_state_dict

        warnings.simplefilter("ignore")
        model, optimizer = trained(front_end)
        states = [model_state_dict(model, "SHARDED"), optim_state_dict(model, optimizer, "SHARDED")]
        if front_end == "in place":
            states += [model.state_dict(), optimizer.state_dict()]
        empty = [v for v in states[0].values() if isinstance(v, DTensor) and not v.to_local().numel()]
        return [equal(each, loaded(each)) and equal(each, copy.deepcopy(each)) for each in states], len(empty)

    found = run(2, body)
    assert [all(same) for same, _ in found] == [True, True]
    assert found[1][1] == 2, "the second rank has none of the head"


@EACH
def test_parameters_and_optimizers_are_pickled_as_those_of_torch(front_end):
    def body(rank, world):
        warnings.simplefilter("error")
        model, optimizer = trained(front_end)
        held = [*model.parameters()]
        together = loaded(dict(model.named_parameters()))
        kept = loaded(model.state_dict(keep_vars=True))
        of_optimizer = loaded(optimizer, weights_only=False)
        groups = [p.detach() for group in of_optimizer.param_groups for p in group["params"]]
        detached = [each.detach() for each in held]
        return (
            equal(detached, [loaded(each).detach() for each in held]),
            equal(detached, [each.detach() for each in together.values()]),
            sorted(kept) == sorted(model.state_dict()),
            equal(detached, groups),
            equal(optimizer.state_dict(), of_optimizer.state_dict()),
        )

    assert run(2, body) == [(True,) * 5] * 2


@pytest.mark.parametrize("front_end", ["orig", "in place"])
def test_a_loaded_parameter_belongs_to_no_unit(front_end):
    """It is sharded like any other, also while the unit of the one that was saved exists."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        bare = nn.Linear(6, 4)
        model = sharder(front_end)(copy.deepcopy(bare))
        again = nn.Linear(6, 4)
        for name, parameter in model.named_parameters():
            value = dict(bare.named_parameters())[name.split(".")[-1]].detach()
            fresh = nn.Parameter(value.clone())
            fresh.__dict__.update(loaded(parameter).__dict__)
            setattr(again, name.split(".")[-1], fresh)
        again = sharder(front_end)(again)
        x = torch.randn(3, 6)
        return torch.equal(again(x), bare(x)), len(list(again.parameters()))

    assert run(2, body) == [(True, 2)] * 2
