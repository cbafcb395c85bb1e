"""Forwards without a backward of their own, between a backward and the step: they change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.kit.models.reference import product
from tests.kit.models.torch_limits import full_tensor
from tests.kit.models.under_test import FSDP, STYLES, Strategy, Style, no_sync, shard, sharder
from tests.kit.ranks.harness import raised_everywhere, run

Between = Callable[[Any], object]
STRATEGIES = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)


class Net(nn.Module):
    """Two units below a root that has parameters of its own, which it keeps between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def forward(model: Any) -> torch.Tensor:
    return model(batch(0, 50))


def forward_of_a_unit(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):  # units below the root do not cast their inputs
        model.first(batch(0, 50))


def forward_in_eval(model: Any) -> None:
    model.eval()
    forward(model)
    model.train()


def forward_under_no_sync(model: Any) -> None:
    with no_sync(model):
        forward(model)


def forward_and_state(model: Any) -> None:
    forward(model)
    model.state_dict()


def forward_and_summon(model: Any) -> None:
    forward(model)
    with FSDP.summon_full_params(model, with_grads=True) if isinstance(model, FSDP) else contextlib.nullcontext():
        pass


BETWEEN: dict[str, Between] = {
    "a forward": forward,
    "two forwards": lambda model: (forward(model), forward(model)),
    "a forward of a unit": forward_of_a_unit,
    "a forward in eval": forward_in_eval,
    "a forward without gradients": torch.no_grad()(forward),
    "a forward in inference mode": torch.inference_mode()(forward),
    "a forward under no_sync": forward_under_no_sync,
    "a forward and a state": forward_and_state,
    "a forward and full parameters": forward_and_summon,
}


def trained(rank: int, how: dict[str, Any], between: Between, *, accumulates: str = "") -> list[torch.Tensor]:
    """Return the losses and full parameters of three steps, with something between the backward and the step."""
    apply, net = sharder(**how), Net()
    net.first, net.second = apply(net.first), apply(net.second)
    model = apply(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    found = []
    for step in range(3):
        if accumulates:
            with no_sync(model) if accumulates == "no_sync" else contextlib.nullcontext():
                model(batch(rank, 10 + step)).square().sum().backward()
                between(model)
        loss = model(batch(rank, step)).square().sum()
        loss.backward()
        between(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    full = (full_tensor(each) if isinstance(each, DTensor) else each for each in model.state_dict().values())
    return [*found, *(each.detach().clone() for each in full)]


def differing(rank: int, rows: list[dict[str, Any]], **kwargs: Any) -> list[str]:
    """Return the rows and forwards whose results differ from those without such forwards."""
    wrong = []
    for how in rows:
        wanted = trained(rank, how, lambda _: None, **kwargs)
        for name, between in BETWEEN.items():
            found = trained(rank, how, between, **kwargs)
            if not all(map(torch.equal, found, wanted)):
                wrong.append(f"{how}: {name}")
    return wrong


@STYLES
@pytest.mark.parametrize("world", [1, 2])
def test_a_forward_between_the_backward_and_the_step_changes_nothing(style: Style, world: int):
    def body(rank: int, world: int) -> list[str]:
        return differing(rank, product(style=[style], strategy=STRATEGIES, low=[False, True]))

    assert run(world, body) == [[]] * world


@STYLES
@pytest.mark.parametrize("accumulates", ["reduced", "no_sync"])
def test_a_forward_between_accumulated_backwards_changes_nothing(style: Style, accumulates: str):
    def body(rank: int, world: int) -> list[str]:
        return differing(rank, product(style=[style], strategy=STRATEGIES), accumulates=accumulates)

    assert run(2, body) == [[]] * 2


@STYLES
def test_a_forward_between_with_offloaded_shards_changes_nothing(style: Style):
    def body(rank: int, world: int) -> list[str]:
        return differing(rank, product(style=[style], strategy=STRATEGIES[:2], offload=[True]))

    assert run(2, body) == [[]] * 2


class Branches(nn.Module):
    """Three units, of which a forward uses those that are named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.used = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.used:
            x = self.blocks[index](x).tanh()
        return x


def step_and_evaluate(optimizer: torch.optim.Optimizer, net: Branches, model: torch.nn.Module) -> torch.Tensor:
    """Return the output of all units after an optimizer step."""
    optimizer.step()
    optimizer.zero_grad()
    net.used = (0, 1, 2)
    with torch.no_grad():
        return model(batch(0, 60))


def accumulated(rank: int, world: int, model: Any, net: Branches, used: tuple[int, ...]) -> list[torch.Tensor]:
    """Return outputs behind steps whose last backward reaches some units; a plain model gets batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    is_plain, found = type(model) is Branches, []  # `fully_shard` changes the class
    for step in range(3):
        for each in range(world) if is_plain else [rank]:
            with contextlib.nullcontext() if is_plain else no_sync(model):
                net.used = (0, 1, 2)
                (model(batch(each, step)).square().sum() / (world if is_plain else 1)).backward()
            net.used = used
            (model(batch(each, 10 + step)).square().sum() / (world if is_plain else 1)).backward()
        found.append(step_and_evaluate(optimizer, net, model))
    return found


@STYLES
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_reduces_what_no_sync_held_back_of_units_that_it_does_not_reach(style: Style, strategy: Strategy):
    def body(rank: int, world: int) -> list[str]:
        wrong = []
        for used in ((0, 1, 2), (0, 1), (1, 2), (2,)):
            apply, net, plain = sharder(style, strategy), Branches(), Branches()
            for index, block in enumerate(net.blocks):
                net.blocks[index] = apply(block)
            wanted = accumulated(rank, world, plain, plain, used)
            found = accumulated(rank, world, apply(net), net, used)
            if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True)):
                wrong.append(f"{used}")
        return wrong

    assert run(2, body) == [[]] * 2


def trained_beside_a_branch(style: Style, used: tuple[int, ...], guard: Callable[[], Any], **settings: Any) -> list:
    """Return the outputs after each of three steps, each behind a forward that uses some of the units."""
    apply, net = sharder(style, **settings), Branches()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = apply(block)
    model = apply(net)
    if settings and not style.wraps:
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])
        net.blocks[1].set_modules_to_forward_prefetch([net.blocks[2]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(3):
        net.used = (0, 1, 2)
        model(batch(0, step)).square().sum().backward()
        net.used = used
        with guard():
            model(batch(0, 50))
        found.append(step_and_evaluate(optimizer, net, model))
    return found


@STYLES
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_unit_that_was_prefetched_and_not_called_has_the_values_of_the_next_step(style: Style, guard: Any):
    def body(rank: int, world: int) -> list[str]:
        wrong = []
        for used in ((0, 1), (0, 2), (1, 2), (2, 0), (0,)):
            wanted = trained_beside_a_branch(style, used, guard)
            prefetches = {"forward_prefetch": True} if style.wraps else {"reshard_after_forward": True}
            found = trained_beside_a_branch(style, used, guard, **prefetches)
            if not all(map(torch.equal, found, wanted)):
                wrong.append(f"{used}")
        return wrong

    assert run(2, body) == [[]] * 2


@pytest.mark.parametrize("variable", [True, False], ids=["variable", "data"])
def test_a_parameter_with_a_gradient_replaced_after_such_a_forward_is_taken_over(variable: bool):
    def body(rank: int, world: int) -> bool:
        model = shard(nn.Linear(5, 7), use_orig_params=True)
        model(torch.ones(2, 5)).sum().backward()
        model(torch.ones(2, 5))
        twos = torch.full_like(model.module.weight, 2)
        if variable:
            model.module.weight = nn.Parameter(twos)
        else:
            model.module.weight.data = twos
        model(torch.ones(2, 5))
        with FSDP.summon_full_params(model):
            return bool((model.module.weight == 2).all())

    assert run(2, body) == [True, True]


@pytest.mark.parametrize("variable", [True, False], ids=["variable", "data"])
def test_a_parameter_with_a_gradient_that_is_replaced_before_the_backward_is_refused(variable: bool):
    def body(rank: int, world: int) -> None:
        model = shard(nn.Linear(5, 7), use_orig_params=True)
        model(torch.ones(2, 5)).sum().backward()
        loss = model(torch.ones(2, 5)).sum()
        again = model.module.weight.detach().clone()
        if variable:
            model.module.weight = nn.Parameter(again)
        else:
            model.module.weight.data = again
        loss.backward()

    for each in raised_everywhere(2, body):
        assert each.is_a(AssertionError)
        assert "changing the parameters between forward and backward" in each.message


@STYLES
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad])
def test_a_unit_that_runs_by_itself_has_the_values_of_the_step_before(style: Style, strategy: Strategy, guard: Any):
    def body(rank: int, world: int) -> list[float]:
        apply, net, plain = sharder(style, strategy), Net(), Net()
        net.first, net.second = apply(net.first), apply(net.second)
        pairs = ((plain, plain), (apply(net), net))
        steppers = [torch.optim.SGD(model.parameters(), lr=0.5) for model, _ in pairs]
        gaps = []
        for step in range(3):
            outputs = []
            for (model, parts), optimizer in zip(pairs, steppers, strict=True):
                model(batch(0, step)).square().sum().backward()
                with guard():
                    (model if step % 2 else parts.first)(batch(0, 50))
                optimizer.step()
                optimizer.zero_grad()
                outputs.append(parts.first(batch(0, 51)).detach())
            gaps.append(float((outputs[0] - outputs[1]).abs().max()))
        return gaps

    for gaps in run(2, body):
        assert max(gaps) < 1e-4


class Thin(nn.Module):
    """Units of one element: most ranks have no element of any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for each in (self.first, self.second):
            nn.init.constant_(each.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


@STYLES
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad])
def test_a_unit_that_runs_alone_has_the_values_of_a_step_that_few_ranks_see(
    style: Style, strategy: Strategy, guard: Any
):
    def body(rank: int, world: int) -> list[float]:
        apply, net = sharder(style, strategy), Thin()
        net.first, net.second = apply(net.first), apply(net.second)
        model = apply(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x, values = torch.ones(1, 1), []
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            with guard():
                net.first(x)
            optimizer.step()
            values.append(float(net.first(x)))
        return values

    outputs = run(3, body)
    assert outputs[0] == outputs[1] == outputs[2] and len({*outputs[0]}) == 3


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_called_behind_a_penalty_over_another_one_leaves_its_gradients(strategy: Strategy):
    def body(rank: int, world: int) -> list[list[float]]:
        apply, net = sharder(Style.ORIGINAL, strategy), nn.Sequential(Scale(), Scale())
        net[0], net[1] = apply(net[0]), apply(net[1])
        model, x = apply(net), torch.ones(1, 2)
        with torch.no_grad():
            model(x)
        first = net[0](x)
        penalty = next(net[0].parameters()).square().sum() if strategy is not Strategy.FULL_SHARD else 0.0
        (net[1](first).sum() + penalty).backward()
        with FSDP.summon_full_params(model, with_grads=True):
            return [each.grad.tolist() for each in model.parameters()]

    penalized = [1.5, 6.0] if strategy is not Strategy.FULL_SHARD else [0.5, 2.0]
    assert run(2, body) == [[penalized, [0.5, 2.0]]] * 2


class Reversed(nn.Module):
    """Units that are registered in another order than they compute in; two have inputs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last, self.beside, self.middle, self.first = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(x).tanh()).tanh()
        return self.last(hidden * self.beside(x))


@STYLES
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("used", [((0, 1), (1,)), ((0, 1), (0,)), ((0,), (1,))])
def test_ranks_with_other_forwards_in_their_losses_reduce_in_one_order(
    style: Style, strategy: Strategy, used: tuple[tuple[int, ...], ...]
):
    def body(rank: int, world: int) -> float:
        apply, net, plain = sharder(style, strategy), Reversed(), Reversed()
        for name, child in list(net.named_children()):
            setattr(net, name, apply(child))
        model = apply(net)
        ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
        for step in range(3):
            for optimizer, each, of, share in ((ours, model, [rank], 1), (theirs, plain, range(world), world)):
                optimizer.zero_grad()
                for index in of:
                    outputs = [each(batch(index, 2 * step + at)) for at in range(2)]
                    sum(outputs[at].square().mean() / share for at in used[index]).backward()
                optimizer.step()
        with torch.no_grad():
            return float((model(batch(0, 60)) - plain(batch(0, 60))).abs().max())

    assert max(run(2, body)) < 1e-5
