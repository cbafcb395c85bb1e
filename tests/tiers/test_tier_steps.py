"""The choice between memory and root, and the save that a step comes from: pure."""

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checkpoint.run.step_finder import NO_STEP, FoundStep
from shardckpt.native.commit import SaveMark
from shardckpt.native.run_directory import StepFolder
from shardckpt.tiers.tier_steps import choose_newest, find_earlier_saves, find_identity

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
def test_the_newest_step_that_loads_is_chosen_and_its_successors_are_newer_than_all(held, root):
    chosen = choose_newest([held, root])
    loadable = [place for place in (held, root) if place.save is not None]
    if not loadable:
        assert chosen.save is None and chosen.faults == ["root"]
        return
    assert chosen.order == max(place.order for place in loadable)
    assert chosen.save == "memory" or held.save is None or root.order > held.order, "the nearer one of equal steps"
    newest = max(held.newest, root.newest)
    assert (chosen.branch, chosen.number) >= newest if chosen.order == newest else chosen.branch > newest[0]


def capture(name: str, start: str, sequence: int, number: int = 2) -> StepFolder:
    return StepFolder(number, f"step-{number:08d}", name, 1, SaveMark("a", start, sequence))


def test_of_a_step_that_a_start_saved_twice_the_last_save_is_chosen_if_it_loads():
    order = (1, 2)
    captures = [capture("memory", "a", 1), capture("local", "a", 2), capture("other start", "b", 1)]
    captures += [capture("other step", "a", 1, number=1), StepFolder(2, "step-00000002", "no mark", 1)]
    earlier = find_earlier_saves(captures)
    assert earlier == {"memory"}
    memory, local = (FoundStep([], 2, "step-00000002", name, order=order, newest=order) for name in ("memory", "local"))
    lost = FoundStep([], newest=order)
    assert choose_newest([memory, local, FoundStep([])], earlier).save == "local"
    assert choose_newest([memory, lost, FoundStep([])], earlier).save == "memory"
    newer = memory._replace(number=3, order=(1, 3))
    assert choose_newest([newer, local, FoundStep([])], earlier).save == "memory", "it may be of another step"


def test_copies_of_one_save_have_one_mark_and_a_save_without_it_its_id():
    assert find_identity("memory", SaveMark("a", "b", 1)) == find_identity("root", SaveMark("a", "b", 1))
    assert find_identity("memory", SaveMark("a", "b", 1)) != find_identity("memory", SaveMark("a", "b", 2))
    assert find_identity("memory", None) == "memory" != find_identity("root", None)
