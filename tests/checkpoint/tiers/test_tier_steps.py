"""The choice between memory and root: pure."""

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checkpoint.run.step_finder import NO_STEP, FoundStep
from shardckpt.checkpoint.tiers.tier_steps import choose_newest

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
    chosen = choose_newest([held, root])
    loadable = [place for place in (held, root) if place.save is not None]
    if not loadable:
        assert chosen.save is None and chosen.faults == ["root"]
        return
    assert chosen.order == max(place.order for place in loadable)
    assert chosen.save == "memory" or held.save is None or root.order > held.order, "the nearer one of equal steps"
    newest = max(held.newest, root.newest)
    assert (chosen.branch, chosen.number) >= newest if chosen.order == newest else chosen.branch > newest[0]
