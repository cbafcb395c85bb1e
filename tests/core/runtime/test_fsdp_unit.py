"""Phases of a unit: each transition of the table happens in some scenario, and no other happens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.kit.models.under_test import TORCH
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(TORCH, reason="looks at phases of our engine")
if not TORCH:
    from shardckpt.core import fully_shard
    from shardckpt.core.params.gradient_reduction import GradientReducer
    from shardckpt.core.params.unsharded_params import BucketPhase
    from shardckpt.core.runtime import fsdp_unit
    from shardckpt.core.runtime.fsdp_unit import TRANSITIONS, FSDPUnit, Phase


@contextmanager
def recorded() -> Iterator[set[tuple[str, str, str]]]:
    """Yield the transitions that happen inside."""
    found: set[tuple[str, str, str]] = set()

    def record(name, method):
        @functools.wraps(method)
        def hook(self, *args, **kwargs):
            before = self.phase
            try:
                return method(self, *args, **kwargs)
            finally:
                found.add((before.name, name, self.phase.name))

        return hook

    hooks = {name: getattr(FSDPUnit, name) for name in {hook for _, hook, _ in TRANSITIONS}}
    try:
        for name, method in hooks.items():
            setattr(FSDPUnit, name, record(name, method))
        yield found
    finally:
        for name, method in hooks.items():
            setattr(FSDPUnit, name, method)


class Layer(nn.Module):
    """A linear layer that keeps a tensor, and may call itself, raise or detach its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.kept: torch.Tensor | None = None

    def forward(self, x, depth: int = 0, fails: bool = False, detaches: bool = False):
        if depth:
            return self(x, depth - 1)
        self.kept = self.inner.weight.sum()
        y = self.inner(x)
        if fails:
            raise ValueError("forward")
        return y.detach() if detaches else y


class Model(nn.Module):
    """Two layers, and two more that are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x, how: str = ""):
        if how == "repeated":
            return self.last(self.a(self.a(x), 2))
        if how.startswith("checkpoint"):
            with set_checkpoint_early_stop("to the end" not in how):
                for _ in range(2):
                    x = checkpoint(self.a, x, use_reentrant="reentrant" in how)
                return self.last(x)
        if how == "kept by a call without outputs":
            self.a(x, detaches=True)
            return self.a.kept
        if how == "kept, then an input":
            self.a(x, detaches=True)
            return self.a(x * self.a.kept)
        if how == "fails in backward behind a unit":
            x = x * 1
            x.register_hook(fail)
        if how == "pair":
            return self.right(self.left(x))
        if how == "half a pair":
            return self.left(x)
        if how == "half a pair, then an exception":
            self.left(x)
            raise ValueError("forward")
        x = self.b(self.a(x, fails=how == "fails"))
        if how == "fails in backward":
            x.register_hook(fail)
        return self.last(x)


def fail(grad):
    raise ValueError("backward")


SCENARIOS = [
    "",
    "repeated",
    "checkpoint",
    "checkpoint, to the end",
    "checkpoint, reentrant",
    "pair",
    "half a pair",
    "half a pair, then an exception",
    "fails",
    "fails in backward",
    "fails in backward behind a unit",
    "kept by a call without outputs",
    "kept, then an input",
]


def transitions_of(how: str) -> set[tuple[str, str, str]]:
    """Return the transitions of two iterations, the second one after a possible failure."""

    def body(rank, world):
        model = Model()
        for each in (model.a, model.b, [model.left, model.right]):
            fully_shard(each)
        fully_shard(model)
        with recorded() as found:
            try:
                model(torch.ones(2, 4, requires_grad=True), how).sum().backward()
            except ValueError:
                assert "fail" in how or "exception" in how
            model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.a.parameters())
        return found

    return run(1, body)[0]


def test_the_table_of_phases_is_what_happens():
    happened = set().union(*map(transitions_of, SCENARIOS))
    allowed = {(before.name, hook, after.name) for before, hook, after in TRANSITIONS}
    assert happened - allowed == set(), "transitions outside of the table"
    assert allowed - happened == set(), "transitions that no scenario has"


def test_the_docstring_shows_each_hook_of_the_table():
    table = [line.split("|")[2].strip() for line in fsdp_unit.__doc__.splitlines() if line.startswith("| ")]
    shown = {hook.strip() for cell in table[1:] for hook in cell.split(",")}
    assert shown == {hook for _, hook, _ in TRANSITIONS}


@contextmanager
def recorded_reductions() -> Iterator[list[str]]:
    """Yield the starts of reductions that happen inside, and the waits for them."""
    events: list[str] = []
    start, wait = GradientReducer._launch_reduce_scatter, GradientReducer.wait_reduce_scatter

    def started(self, *args):
        events.append("start")
        return start(self, *args)

    def waited(self):
        events.extend([] if self._reduction is None else ["wait"])
        return wait(self)

    GradientReducer._launch_reduce_scatter, GradientReducer.wait_reduce_scatter = started, waited
    try:
        yield events
    finally:
        GradientReducer._launch_reduce_scatter, GradientReducer.wait_reduce_scatter = start, wait


def test_buckets_of_a_unit_reduce_at_the_same_time():
    """A bucket waits for an earlier reduction of its unit, not for those of the other buckets."""

    def body(rank, world):
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.single, self.wide = nn.Linear(4, 4), nn.Linear(4, 4).double()

            def forward(self, x):
                return self.wide(self.single(x).double())

        model = fully_shard(Mixed())
        with recorded_reductions() as events:
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return events

    assert run(2, body) == [["start", "start", "wait", "wait"] * 2] * 2


@pytest.mark.parametrize(
    ("how", "first", "then"),
    [
        ("one forward", "grad start grad start", "grad start grad start"),
        ("two forwards in one loss", "grad grad grad start grad start", "grad start grad start"),
        ("a forward that no backward follows", "grad grad start start", "grad start grad start"),
    ],
)
def test_a_unit_is_reduced_once_behind_the_last_call_that_a_backward_may_reach(how, first, then):
    def body(rank, world):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        x = torch.ones(2, 4, requires_grad=True)
        with recorded_reductions() as events:
            for layer in model:
                layer.register_full_backward_hook(lambda *_: events.append("grad"))
            loss = model(x).sum()
            if how == "two forwards in one loss":
                loss = loss + model(x).sum()
            elif how == "a forward that no backward follows":
                loss = model(x).sum()
            loss.backward()
            found = [event for event in events if event != "wait"]
            events.clear()
            model(x).sum().backward()
            return " ".join(found), " ".join(event for event in events if event != "wait")

    assert run(2, body) == [(first, then)] * 2


def test_a_unit_that_cannot_be_reset_leaves_no_other_unsharded():
    """The first error is raised after the last unit was reset."""

    def body(rank, world):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for layer in model:
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(model)
        model(torch.ones(2, 4))
        units = [layer._fsdp_state.unit for layer in model]
        with pytest.MonkeyPatch.context() as patch:
            for number in (0, 1):
                registration = units[number].registrations[0]
                patch.setattr(registration, "reset_after_error", partial(fail, number))
            with pytest.raises(ValueError, match="unit 0"):
                model._fsdp_state.root_state.reset_after_error()
        return [unit.params.phases for unit in units], [unit.phase for unit in units]

    def fail(number):
        raise ValueError(f"unit {number}")

    assert run(2, body) == [([{BucketPhase.SHARDED}] * 3, [Phase.IDLE] * 3)] * 2


def test_a_reshard_keeps_a_parameter_that_replaced_a_kept_one_for_the_next_forward():
    def body(rank, world):
        model = fully_shard(nn.Linear(4, 4, bias=False), reshard_after_forward=False)
        sharded = model.weight
        model(torch.ones(1, 4))
        assert model.weight is not sharded
        model.weight = nn.Parameter(torch.full_like(sharded, 2.0))
        model.reshard()
        return model(torch.ones(1, 4)).tolist()

    assert run(2, body) == [[[8.0] * 4]] * 2


def test_a_unit_that_a_backward_prefetched_in_vain_is_gathered_anew():
    """Nothing computed with its parameters, so a user may change them before the next forward."""

    def body(rank, world):
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model[1].set_reshard_after_backward(False)
        model[0].set_modules_to_backward_prefetch([model[1]])
        with torch.no_grad():
            model(torch.ones(1, 4))  # both are below one root
        used = model[0](torch.ones(1, 4, requires_grad=True))
        used.sum().backward()
        phases = model[1]._fsdp_state.unit.params.phases
        with torch.no_grad():
            model[1].weight.to_local().fill_(2.0)
        return phases, model[1](torch.ones(1, 4)).tolist()

    assert run(2, body) == [({BucketPhase.SHARDED}, [[8.0] * 4])] * 2
