"""The choice between memory and root: pure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checkpoint.run.step_finder import NO_STEP, FoundStep
from shardckpt.checkpoint.tiers.tiered_finder import choose_newest, is_of_this_run

ORDERS = st.tuples(st.integers(0, 3), st.integers(0, 9))


@st.composite
def places(draw, name):
    """A place with some complete steps, of which the newest that may be loaded is chosen."""
    orders = draw(st.sets(ORDERS, max_size=4))
    newest = max(orders, default=NO_STEP)
    loadable = draw(st.sampled_from(sorted(orders))) if orders and draw(st.booleans()) else None
    if loadable is None:
        return FoundStep([name], newest=newest)
    return FoundStep([name], loadable[1], name, name, order=loadable, newest=newest)


@given(places("memory"), places("root"))
def test_the_newest_step_that_can_be_loaded_is_chosen_and_its_successors_are_newer_than_all(held, root):
    chosen = choose_newest(held, root)
    loadable = [place for place in (held, root) if place.save is not None]
    if not loadable:
        assert chosen.save is None and chosen.faults == ["root"]
        return
    assert chosen.order == max(place.order for place in loadable)
    assert chosen.save == "memory" or held.save is None or root.order > held.order, "the nearer one of equal steps"
    newest = max(held.newest, root.newest)
    assert (chosen.branch, chosen.number) >= newest if chosen.order == newest else chosen.branch > newest[0]


@pytest.mark.parametrize(
    ("after", "newest", "belongs"),
    [
        (None, NO_STEP, True),
        ([-1, -1], NO_STEP, True),
        ([0, 5], NO_STEP, False),
        ([0, 5], (0, 4), False),
        ([0, 5], (0, 5), True),
        ([0, 5], (1, 2), True),
        ("junk", (1, 2), False),
        ([1], (1, 2), False),
    ],
)
def test_a_capture_belongs_to_a_run_that_has_the_step_that_preceded_it_or_a_newer_one(after, newest, belongs):
    assert is_of_this_run({} if after is None else {"run.after": json.dumps(after)}, newest) is belongs
