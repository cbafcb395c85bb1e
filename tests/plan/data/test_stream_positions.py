"""Streams are divided evenly over ranks and workers, or refused with the nearest numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import UsageError
from shardckpt.plan.data.stream_positions import SavedStreams, StreamPlan, StreamPosition


@given(streams=st.integers(1, 200), ranks=st.integers(1, 64))
def test_on_1_to_64_ranks_streams_are_divided_evenly_or_refused_with_numbers_that_fit(streams: int, ranks: int) -> None:
    try:
        plan = StreamPlan(streams, ranks)
    except UsageError as error:
        assert streams % ranks
        assert all(streams % int(word) == 0 for word in str(error).split() if word.isdigit() and int(word) != ranks)
        return
    parts = [plan.find_streams(rank) for rank in range(ranks)]
    assert list(itertools.chain(*parts)) == list(range(streams))
    assert {len(part) for part in parts} == {plan.batches_per_step}


@pytest.mark.parametrize(("most", "used"), [(0, 0), (1, 1), (4, 4), (5, 4), (7, 6), (99, 12), (10**30, 12)])
def test_each_worker_has_as_many_streams_as_the_others(most: int, used: int) -> None:
    assert StreamPlan(24, 2).choose_workers(most) == used


def test_positions_of_all_ranks_come_back_on_other_ranks() -> None:
    positions = {number: StreamPosition(number, 2 * number, {"at": [number, None]}) for number in range(6)}
    halves = [SavedStreams(6, 0, dict(list(positions.items())[at : at + 3])) for at in (0, 3)]
    merged = SavedStreams.merge([SavedStreams.from_state(each.to_state()) for each in halves])
    assert [merged.select(StreamPlan(6, 3), rank) for rank in range(3)] == [
        {number: positions[number] for number in pair} for pair in ((0, 1), (2, 3), (4, 5))
    ]


@pytest.mark.parametrize(("streams", "ranks"), [(0, 1), (4, 0), (-2, 2)])
def test_numbers_below_one_are_refused(streams: int, ranks: int) -> None:
    with pytest.raises(UsageError, match="must be 1 or more"):
        StreamPlan(streams, ranks)
