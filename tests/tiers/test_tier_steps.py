"""The choice between memory and root, and the attempt that a step comes from: pure."""

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checkpoint.run.step_finder import NO_STEP, FoundStep
from shardckpt.native.run_directory import StepFolder
from shardckpt.tiers.lineage.root_position import RootPosition
from shardckpt.tiers.tier_steps import Capture, choose_newest, find_attempt, find_earlier_attempts

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


def test_of_a_step_that_a_start_saved_twice_the_last_attempt_is_chosen_if_it_loads():
    order, names = (
        (0, 2),
        {"memory": "a-1-x", "local": "a-2-x", "other start": "b-1-x", "other text": "a-x", "none": ""},
    )
    captures = [Capture(name, order, RootPosition().encode(attempt)) for name, attempt in names.items()]
    captures += [Capture("other step", (0, 1), RootPosition().encode("a-1-x"))]
    earlier = find_earlier_attempts(captures)
    assert earlier == {"memory"}
    memory, local = (FoundStep([], 2, "step-00000002", name, order=order, newest=order) for name in ("memory", "local"))
    lost = FoundStep([], newest=order)
    assert choose_newest([memory, local, FoundStep([])], earlier).save == "local"
    assert choose_newest([memory, lost, FoundStep([])], earlier).save == "memory"
    newer = memory._replace(number=3, order=(0, 3))
    assert choose_newest([newer, local, FoundStep([])], earlier).save == "memory", "it may be of another step"


FIRST, SECOND = (RootPosition().encode(attempt) for attempt in ("first", "second"))
IN_ROOT = StepFolder(2, "step-00000002", save="root")


def find(found: str, *captures: Capture) -> tuple[str, set[str]]:
    return find_attempt(FoundStep([], 2, IN_ROOT.name, found, order=(0, 2)), captures, IN_ROOT)


def test_the_saves_of_an_attempt_are_its_captures_and_its_known_step_in_the_root():
    memory, local = (Capture(name, (0, 2), FIRST, is_in_root=True) for name in ("memory", "local"))
    assert find("memory", memory, local) == (FIRST, {"memory", "local", "root"})
    assert find("root", memory, local) == (FIRST, {"memory", "local", "root"})
    assert find("root", memory._replace(order=(0, 1)), local._replace(is_of_run=False)) == ("", {"root"})


def test_captures_of_another_attempt_do_not_count_if_the_root_cannot_be_read():
    memory, local = Capture("memory", (0, 2), SECOND), Capture("local", (0, 2), FIRST)
    assert find("memory", memory, local) == (SECOND, {"memory"})
    assert find("local", memory, local) == (FIRST, {"local"})
    assert find("root", memory, local) == ("", {"root"})
    assert find("memory", memory._replace(after="")) == ("", {"memory"}), "its attempt is unknown"
