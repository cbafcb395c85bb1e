"""Units in eval mode that compute in the stored types, on wish of the environment, also backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.kit.models.under_test import core, shard
from tests.kit.ranks.harness import run


def trained_in_turns(rank: int, world: int, original: bool, toggled: bool) -> bool:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    reference = copy.deepcopy(plain)
    low = {"mixed_precision": core.MixedPrecision(param_dtype=torch.bfloat16), "use_orig_params": original}
    for index in (0, 2):
        plain[index] = shard(plain[index], **low)
    model = shard(plain, **low)
    for training in (True, False, True, False):
        model.train(training)
        for each in (model, reference):
            each.zero_grad()
        x = torch.randn(3, 4)
        loss, wanted = model(x).square().sum(), reference(x).square().sum()
        if toggled:
            model.train(not training)
        loss.backward()
        wanted.backward()
        norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
        tolerance = 0.1 if training else 1e-5
        if not torch.allclose(model.clip_grad_norm_(1e9).float(), norm, rtol=tolerance):
            return False
    return True


@pytest.mark.parametrize("toggled", [False, True], ids=["as it was", "toggled before backward"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "orig"])
def test_gradients_of_a_forward_in_full_precision_are_exact(monkeypatch, original, toggled):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    assert run(2, trained_in_turns, original, toggled) == [True, True]


def differentiated_behind_inference(rank: int, world: int, original: bool) -> bool:
    """Evaluate in full precision in inference mode, then compute gradients of the same."""
    model = shard(nn.Linear(4, 4), mixed_precision=core.MixedPrecision(torch.bfloat16), use_orig_params=original)
    model.eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        expected = model(x).clone()
    found = model(x)
    found.sum().backward()
    return torch.equal(found, expected) and all(each.grad is not None for each in model.parameters() if each.numel())


@pytest.mark.parametrize("original", [False, True], ids=["flat", "orig"])
def test_parameters_that_are_first_gathered_in_inference_mode_may_be_trained(monkeypatch, original):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    assert run(2, differentiated_behind_inference, original) == [True, True]


def differentiated_behind_prefetch(rank: int, world: int) -> bool:
    """Evaluate in inference mode, in which the second layer is gathered while the first one computes; then train."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        core.fully_shard(layer, mp_policy=core.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    core.fully_shard(model)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model.eval()
    x = torch.randn(3, 4)
    with torch.inference_mode():
        expected = model(x).clone()
    found = model(x)
    found.sum().backward()
    return torch.equal(found, expected) and all(each.grad is not None for each in model.parameters())


def test_parameters_that_are_prefetched_in_inference_mode_may_be_trained(monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    assert run(2, differentiated_behind_prefetch) == [True, True]


def differentiated_around_inference(rank: int, world: int, original: bool) -> bool:
    """Compare gradients of a forward with those of one that is followed by a forward in full precision."""
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        low = {"mixed_precision": core.MixedPrecision(torch.bfloat16), "use_orig_params": original}
        model = shard(nn.Sequential(shard(nn.Linear(4, 4), **low), nn.Tanh(), nn.Linear(4, 4)), **low)
        x = torch.randn(3, 4)
        loss = model(x).square().sum()
        if evaluates:
            with torch.no_grad():
                model.eval()(x)
            model.train()
        loss.backward()
        found.append([each.grad for each in model.parameters() if each.grad is not None])
    return all(map(torch.equal, *found)) and bool(found[0])


@pytest.mark.parametrize("original", [False, True], ids=["flat", "orig"])
def test_a_forward_in_full_precision_before_the_backward_of_another_changes_nothing(monkeypatch, original):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    assert run(2, differentiated_around_inference, original) == [True, True]
