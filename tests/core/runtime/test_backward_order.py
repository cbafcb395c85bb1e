"""The order of backward as plain data: which hooks of other calls a rank runs before those that autograd calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.kit.models.under_test import TORCH

pytestmark = pytest.mark.skipif(TORCH, reason="tests a class of our engine")
if not TORCH:
    from shardckpt.core.runtime.backward_order import RECOMPUTED, BackwardOrder, ForwardCall, Step


def chain(names: str, forward_id: int = 1) -> list[ForwardCall[str]]:
    """Return calls of units that compute one after the other."""
    return [ForwardCall(name, index, True, forward_id) for index, name in enumerate(names)]


def listed(steps: Iterable[tuple[Step, ForwardCall[str]]]) -> list[str]:
    """Return the steps as text."""
    return [f"{step.name.lower()} {call.unit}" for step, call in steps]


def reduced(calls: list[ForwardCall[str]], reached: Iterable[str]) -> list[str]:
    """Return the units in the order of their reductions, on a rank whose gradients reach some units."""
    order, found = BackwardOrder(calls), []

    def run(steps: Iterator[tuple[Step, ForwardCall[str]]]) -> None:
        found.extend(call.unit for step, call in steps if step is not Step.ENTER)

    for name in reached:
        call = next(each for each in calls if each.unit == name)
        run(order.enter(call))
        run(order.leave(call))
        found.append(name)
    run(order.finish())
    return found


@pytest.mark.parametrize("reached", ["CBA", "CA", "CB", "C", "BA", "B", "A"])
def test_all_ranks_reduce_in_reverse_order_of_forward(reached):
    """The example of the module: whatever gradients reach, units are reduced in the order C, B, A."""
    assert reduced(chain("ABC"), reached) == ["C", "B", "A"]


def test_a_backward_that_reaches_nothing_reduces_nothing():
    assert reduced(chain("ABC"), "") == []


def test_calls_of_other_forwards_are_not_skipped():
    first, second = chain("AB", forward_id=1), [ForwardCall("C", 2, True, 2), ForwardCall("D", 3, True, 2)]
    order = BackwardOrder([*first, *second])
    assert listed(order.enter(first[1])) == [], "the second forward waits for its own backward"
    assert listed(order.finish()) == ["skip A"]
    assert order.forward_ids == {1}


def test_a_call_around_a_reached_one_is_entered_before_it():
    """Outer began before A and B did, and finished after them; its own outputs were not reached."""
    a, b = ForwardCall("A", 0, True, 1), ForwardCall("B", 1, True, 1)
    outer = ForwardCall("outer", 0, True, 1)
    order = BackwardOrder([a, b, outer])
    assert listed(order.enter(b)) == ["enter outer"]
    assert listed(order.leave(b)) == []
    assert listed(order.leave(outer)) == ["skip A"], "A is nested in outer, whose gradients are complete"


def test_a_call_whose_inputs_need_no_gradients_is_closed_when_backward_has_passed_it():
    """Autograd calls the pre-backward hook only: no post-backward hook is in front of its inputs."""
    a, b = ForwardCall("A", 0, False, 1), ForwardCall("B", 1, False, 1)
    order = BackwardOrder([a, b])
    assert listed(order.enter(b)) == []
    assert listed(order.enter(a)) == ["close B"]
    assert listed(order.finish()) == ["close A"]


def test_unfinished_calls_that_are_nested_are_closed_when_the_outer_call_is_left():
    inner, outer = ForwardCall("inner", 0, False, 1), ForwardCall("outer", 0, True, 1)
    order = BackwardOrder([inner, outer])
    assert listed(order.enter(outer)) == []
    assert listed(order.enter(inner)) == []
    assert listed(order.leave(outer)) == ["close inner"]
    assert listed(order.finish()) == []


def test_a_call_that_is_not_recorded_changes_nothing():
    """A call of an earlier iteration, or one that a checkpoint computes again."""
    order = BackwardOrder(chain("AB"))
    assert listed(order.enter(ForwardCall("C", 0, True, 7))) == []
    assert listed(order.leave(ForwardCall("C", 0, True, RECOMPUTED))) == []
    assert order.forward_ids == set()


def test_the_next_call_is_that_before_the_last_reached_of_the_same_forward():
    calls = [*chain("AB"), ForwardCall("C", 2, True, 2)]
    order = BackwardOrder(calls)
    assert order.find_next() is None, "no forward has been reached"
    assert listed(order.enter(calls[1])) == []
    assert order.find_next() is calls[0]
    assert listed(order.enter(calls[0])) == []
    assert order.find_next() is None


def test_a_hook_may_go_on_while_the_steps_are_run():
    """The post-backward hook of a skipped call calls `leave`, before the next step is taken."""
    calls = chain("ABCD")
    order, found = BackwardOrder(calls), []

    def run(steps):
        for step, call in steps:
            run(order.leave(call))
            found.append(f"{step.name.lower()} {call.unit}")

    run(order.enter(calls[0]))
    assert found == ["skip D", "skip C", "skip B"]


def test_an_outer_call_stays_open_while_a_nested_one_is_entered():
    inner, outer = ForwardCall("inner", 0, True, 1), ForwardCall("outer", 0, False, 1)
    order = BackwardOrder([inner, outer])
    assert listed(order.enter(outer)) == []
    assert listed(order.enter(inner)) == [], "outer is not closed before inner, which is nested in it"
    assert listed(order.finish()) == ["close outer"]
