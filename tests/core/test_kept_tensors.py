"""A loss made of tensors that a model keeps, and does not return, has its gradients reduced as any other has."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.kit.models.front_ends import FRONT_ENDS, build_groups, differing, sharder
from tests.kit.models.models import WIDTH, Opaque, blocks_and_root, root_alone, square, tokens
from tests.kit.models.reference import Training, reduce_gradients, sgd
from tests.kit.models.under_test import TORCH, no_sync
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(TORCH, reason="torch is wrong: it learns of gradients from results of units only")

EACH = pytest.mark.parametrize("front_end", FRONT_ENDS)
CLOSE = Training(sgd).close
CUTS = {"units": blocks_and_root, "root": root_alone}


class Entry(nn.Module):
    """Reads tokens; its backward needs no parameter's value, so that nothing gathers the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens):
        return self.embed(tokens) + self.shift


class Keeper(nn.Module):
    """Keeps what a loss is made of; what it returns carries no gradient."""

    entry: type[nn.Module] = Entry

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([type(self).entry(), type(self).entry()])
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, tokens):
        x = self.summed(tokens) + self.scale
        self.kept = x * 2
        return x.detach()

    def summed(self, tokens):
        return sum(block(tokens) for block in self.blocks)


class KeepingEntry(Entry):
    def forward(self, tokens):
        self.kept = super().forward(tokens)
        return self.kept.detach()


class KeepingInside(Keeper):
    """Every unit keeps its own."""

    entry = KeepingEntry

    def summed(self, tokens):
        super().summed(tokens)
        return sum(block.kept for block in self.blocks)


class HidingEntry(Entry):
    def forward(self, tokens):
        return Opaque(super().forward(tokens))


class Hiding(Keeper):
    """Results in objects that no walk through containers knows."""

    entry = HidingEntry

    def summed(self, tokens):
        return sum(block(tokens).value for block in self.blocks)


class CheckpointedEntry(nn.Module):
    """Keeps what a checkpoint gave, which computes again in backward."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def compute(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, tokens):
        x = nn.functional.one_hot(tokens, 11)[..., :WIDTH].float().requires_grad_()
        return checkpoint(self.compute, x, use_reentrant=type(self).reentrant)


class ReentrantEntry(CheckpointedEntry):
    reentrant = True


class Checkpointed(Keeper):
    entry = CheckpointedEntry


class CheckpointedReentrant(Keeper):
    entry = ReentrantEntry


class AroundUnits(Keeper):
    """The units are computed again, inside a checkpoint of the root."""

    reentrant = False

    def summed(self, tokens):
        one = torch.ones(1, requires_grad=True)
        return sum(
            checkpoint(lambda t, x, block=block: block(t) * x, tokens, one, use_reentrant=type(self).reentrant)
            for block in self.blocks
        )


class AroundUnitsReentrant(AroundUnits):
    reentrant = True


def inner(model: nn.Module) -> Any:
    """The user's module."""
    return getattr(model, "_fsdp_wrapped_module", model)


def kept(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss of what the model kept."""
    model(batch)
    return square(inner(model).kept)


Train = Callable[[nn.Module, int, str | None], None]


def once(model: nn.Module, rank: int, front_end: str | None) -> None:
    kept(model, tokens(rank, 0)).backward()


def of_a_hook(model: nn.Module, rank: int, front_end: str | None) -> None:
    """The loss is made of what a forward hook saw inside a unit."""
    seen = []
    embed = inner(inner(model).blocks[0]).embed
    handle = embed.register_forward_hook(lambda module, args, output: seen.append(output))
    model(tokens(rank, 0))
    handle.remove()
    square(seen[0]).backward()


def two_forwards(model: nn.Module, rank: int, front_end: str | None) -> None:
    """Both forwards come before both backwards."""
    losses = [kept(model, tokens(rank, step)) for step in range(2)]
    for loss in losses:
        loss.backward()


def two_backwards(model: nn.Module, rank: int, front_end: str | None) -> None:
    loss = kept(model, tokens(rank, 0))
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated(model: nn.Module, rank: int, front_end: str | None) -> None:
    with no_sync(model) if front_end is not None else contextlib.nullcontext():
        kept(model, tokens(rank, 0)).backward()
    kept(model, tokens(rank, 1)).backward()


def after_an_unused_forward(model: nn.Module, rank: int, front_end: str | None) -> None:
    kept(model, tokens(rank, 5))
    kept(model, tokens(rank, 0)).backward()


ROWS: list[tuple[type[nn.Module], Train]] = [
    (Keeper, once),
    (KeepingInside, once),
    (Hiding, once),
    (Keeper, of_a_hook),
    (Keeper, two_forwards),
    (Keeper, two_backwards),
    (Keeper, accumulated),
    (Keeper, after_an_unused_forward),
    (Checkpointed, once),
    (CheckpointedReentrant, once),
    (AroundUnits, once),
    (AroundUnitsReentrant, once),
]


def parted(front_end: str, cut: str, build: type[nn.Module], train: Train, rank: int) -> list[str]:
    """Where gradients part from those of the unsharded model, in two iterations."""
    torch.manual_seed(17)
    plain = build()
    torch.manual_seed(17)
    model = CUTS[cut](build(), sharder(front_end))
    wrong: list[str] = []
    for step in range(2):
        train(model, rank, front_end)
        train(plain, rank, None)
        reduce_gradients(plain, build_groups(model, plain, front_end))
        wrong += [f"{build.__name__} {train.__name__} {step}: {e}" for e in differing(model, plain, front_end, CLOSE)]
        model.zero_grad()
        plain.zero_grad()
    return wrong


def assert_trains_as_unsharded(front_end: str, rows: list[tuple[str, type[nn.Module], Train]]) -> None:
    """Each row, a cut with a model and its training, gives the gradients of the unsharded model."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        return [f"{cut}: {each}" for cut, build, train in rows for each in parted(front_end, cut, build, train, rank)]

    assert run(2, body, timeout=60.0) == [[], []]


@EACH
def test_a_loss_of_kept_tensors_trains_as_the_unsharded_model(front_end):
    """Each row once; over the front ends it is in units and in the root alone."""
    cuts = list(CUTS)
    turn = FRONT_ENDS.index(front_end)
    assert_trains_as_unsharded(front_end, [(cuts[(turn + i) % 2], *row) for i, row in enumerate(ROWS)])


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@EACH
def test_a_loss_of_kept_tensors_trains_as_the_unsharded_model_in_each_cut(front_end, cut):
    assert_trains_as_unsharded(front_end, [(cut, *row) for row in ROWS])


@pytest.mark.parametrize("cut", CUTS)
@EACH
def test_a_rank_with_kept_tensors_reduces_with_one_that_uses_the_results(front_end, cut):
    """One rank's loss is made of a tensor that the root kept, the other's of what it returned."""

    class Both(Keeper):
        def forward(self, tokens):
            super().forward(tokens)
            self.alone = self.scale * 3
            return self.kept

    def by_rank(model, rank, front_end):
        result = model(tokens(rank, 0))
        square(result if rank else inner(model).alone).backward()

    def body(rank, world):
        warnings.simplefilter("ignore")
        return parted(front_end, cut, Both, by_rank, rank)

    assert run(2, body) == [[], []]


@EACH
def test_a_parameter_that_is_unfrozen_later_is_told_of(front_end):
    """What is watched for gradients follows `requires_grad`."""

    def unfrozen(model, rank, front_end):
        for parameter in model.parameters():
            parameter.requires_grad_()
        once(model, rank, front_end)

    class Frozen(Keeper):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)

    def body(rank, world):
        warnings.simplefilter("ignore")
        return parted(front_end, "root", Frozen, unfrozen, rank)

    assert run(2, body) == [[], []]


@EACH
def test_a_copy_of_the_model_is_told_of_its_own_gradients(front_end):

    def body(rank, world):
        warnings.simplefilter("ignore")
        torch.manual_seed(17)
        plain = Keeper()
        torch.manual_seed(17)
        original = root_alone(Keeper(), sharder(front_end))
        model = copy.deepcopy(original)
        once(model, rank, front_end)
        once(plain, rank, None)
        reduce_gradients(plain, build_groups(model, plain, front_end))
        untouched = [p.grad for p in original.parameters() if p.grad is not None]
        return differing(model, plain, front_end, CLOSE), len(untouched)

    assert run(2, body) == [([], 0)] * 2
