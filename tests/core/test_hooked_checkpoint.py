"""Checkpointing in a module's own hooks: inside those of the engine in forward, around them when it computes again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint

from tests.kit.models.under_test import FSDP, core
from tests.kit.ranks.harness import run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.inner(self.norm(x))))


def gradients_agree(rank: int, world: int, nested: bool, frees: bool) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(4, 1))
    reference = copy.deepcopy(model)
    for block in model[:2]:
        checkpoint(block)
        if nested:
            core.fully_shard(block.inner, reshard_after_forward=frees)
        core.fully_shard(block, reshard_after_forward=frees)
    core.fully_shard(model)
    x = torch.randn(3, 4)
    for _ in range(2):  # the same on all ranks: averages are each rank's own
        model(x).sum().backward()
        reference(x).sum().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return all(torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6) for p, q in pairs)


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_modules_that_checkpoint_in_their_own_hooks_are_computed_again(nested, frees):
    assert run(2, gradients_agree, nested, frees) == [True, True]


def test_a_wrapped_module_may_checkpoint_in_its_own_hooks():
    def body(rank: int, world: int) -> bool:
        torch.manual_seed(0)
        block = Block()
        reference = copy.deepcopy(block)
        checkpoint(block)
        model = FSDP(nn.Sequential(FSDP(block, device_id=torch.device("cpu"))), device_id=torch.device("cpu"))
        x = torch.randn(3, 4)
        model(x).sum().backward()
        reference(x).sum().backward()
        total = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
        return bool(torch.allclose(model.clip_grad_norm_(1e9), total, atol=1e-5))

    assert run(2, body) == [True, True]
