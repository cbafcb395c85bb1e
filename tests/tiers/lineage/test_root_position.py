"""Whether captures belong to a root, by the steps that they followed: pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.checkpoint.run.step_finder import NO_STEP
from shardckpt.tiers.lineage.root_position import RootPosition

ORDERS = st.tuples(st.integers(0, 3), st.integers(0, 9))


@pytest.mark.parametrize(
    ("newest", "is_empty", "belongs"),
    [
        ((0, 50), False, True),
        ((0, 100), False, True),
        ((0, 40), False, True),
        (NO_STEP, False, True),
        (NO_STEP, True, False),
        ((0, 60), False, False),
        ((0, 110), False, False),
        ((1, 10), False, False),
    ],
)
def test_captures_belong_to_a_root_that_has_what_they_followed_or_lost_it(newest, is_empty, belongs):
    position = RootPosition(committed=(0, 50), started=(0, 100))
    assert position.leads_to(newest, is_empty=is_empty) is belongs


@pytest.mark.parametrize("is_empty", [True, False])
def test_captures_before_the_roots_first_step_belong_to_a_root_without_steps(is_empty):
    assert RootPosition().leads_to(NO_STEP, is_empty=is_empty)
    assert RootPosition(started=(0, 100)).leads_to(NO_STEP, is_empty=is_empty)
    assert RootPosition(committed=(0, 50)).leads_to(NO_STEP, is_empty=is_empty) is not is_empty
    assert not RootPosition().leads_to((0, 1), is_empty=False)


def test_a_capture_belongs_to_a_root_that_completed_the_save_before_the_last_one():
    position = RootPosition((0, 50)).start((0, 100)).start((0, 150))
    orders = [(0, 100), (0, 120), (0, 150)]
    assert [position.leads_to(order, is_empty=False) for order in orders] == [True, False, True]


@given(ORDERS, ORDERS, ORDERS)
def test_a_position_is_read_back_and_other_text_is_none(committed, started, before):
    position = RootPosition(committed, started, before)
    text = position.encode("an id")
    assert RootPosition.decode(text) == position
    assert RootPosition.read_attempt(text) == "an id"
    for text in ("", "junk", "[1]", "[[1, 2], 3]", '[[1, 2], [3, "x"]]', '[[0, 50], [0, 100], "an id"]'):
        assert RootPosition.decode(text) is None
        assert RootPosition.read_attempt(text) == ""
