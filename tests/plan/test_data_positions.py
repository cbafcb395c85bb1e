"""Steps divide an epoch, ranks and batches divide a step, and positions that cannot be continued are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardckpt.errors import FormatError, UsageError
from shardckpt.plan.data_positions import (
    BatchPlan,
    DataPosition,
    InexactPositionError,
    SavedPosition,
    SavedStreams,
    StreamPlan,
    StreamPosition,
)


def steps_from(plan: BatchPlan, consumed: int = 0) -> Iterator[range]:
    """Yield the places of each step to the end of the epoch."""
    while size := plan.step_size(consumed):
        yield range(consumed, consumed + size)
        consumed += size


def parts_of(plan: BatchPlan, step: range) -> list[range]:
    """Return the places of each batch of each rank, in their order."""
    places = ((batch, rank) for rank in range(plan.num_replicas) for batch in range(plan.accumulate))
    return [plan.find_batch(step.start, batch, rank) for batch, rank in places]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_on_1_to_64_ranks_every_step_has_each_of_its_samples_once(accumulate: int, drop_last: bool) -> None:
    for world in range(1, 65):
        plan = BatchPlan(1500, 400, accumulate, world, drop_last)
        for step in steps_from(plan):
            parts = parts_of(plan, step)
            assert [place for part in parts for place in part] == list(step)
            assert max(map(len, parts)) - min(map(len, parts)) <= 2
            assert min(map(len, parts)) > 0


@given(samples=st.integers(1, 300), batch=st.integers(1, 60), drop_last=st.booleans())
def test_steps_divide_an_epoch(samples: int, batch: int, drop_last: bool) -> None:
    assume(not drop_last or batch <= samples)
    plan = BatchPlan(samples, batch, drop_last=drop_last)
    steps = list(steps_from(plan))
    assert [place for step in steps for place in step] == list(
        range(samples - samples % batch if drop_last else samples)
    )
    assert len(steps) == plan.count_steps(0)
    for step in steps:
        rest = [len(each) for each in steps_from(plan, step.start)]
        assert (plan.count_steps(step.start), plan.smallest_step(step.start)) == (len(rest), min(rest))
        assert batch // 2 <= len(step) <= batch or len(steps) == 1


def test_the_last_two_steps_share_the_rest_of_an_epoch() -> None:
    assert [len(step) for step in steps_from(BatchPlan(27, 8, drop_last=False))] == [8, 8, 6, 5]
    assert [len(step) for step in steps_from(BatchPlan(27, 8))] == [8, 8, 8]


def test_the_next_step_of_the_last_one_is_the_next_epoch() -> None:
    plan = BatchPlan(20, 8)
    assert plan.go_to_next_step(DataPosition(3, 0)) == DataPosition(3, 8)
    assert plan.go_to_next_step(DataPosition(3, 8)) == DataPosition(4, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((8, 0), "batch_size must be 1 or more, got 0"),
        ((8, 2.5), "batch_size must be an integer, got 2.5"),
        ((8, 4, 0), "accumulate must be 1 or more, got 0"),
        ((8, 9), "batch_size 9 leaves out all 8 samples"),
        ((80, 8, 3, 3), "a step of 8 samples is too small for 3 ranks x 3 batches"),
        ((82, 8, 1, 8, False), "a step of 5 samples .* drop_last=True"),
    ],
)
def test_impossible_plans_are_refused(arguments: tuple[int, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        BatchPlan(*arguments)


class TestSavedPositions:
    saved = SavedPosition(2, 30, 0, 100, 5, "swap-or-not-32")

    def test_a_position_comes_back_from_its_state(self) -> None:
        assert SavedPosition.from_state(self.saved.to_state()) == self.saved
        assert str(self.saved.position) == "sample 30 of epoch 2"

    @pytest.mark.parametrize("change", [{"samples": 120}, {"seed": 6}, {"order": "sequential"}])
    @pytest.mark.parametrize(("consumed", "nearest"), [(30, 2), (70, 3)])
    def test_another_order_is_refused_with_the_beginning_of_the_nearest_epoch(
        self, change: dict[str, object], consumed: int, nearest: int
    ) -> None:
        saved = replace(self.saved, consumed=consumed)
        with pytest.raises(InexactPositionError, match=f"saved with {next(iter(change))}=") as caught:
            saved.require_same_order(replace(saved, **change))
        assert caught.value.nearest == DataPosition(nearest)

    def test_at_the_beginning_of_an_epoch_every_order_continues_exactly(self) -> None:
        replace(self.saved, consumed=0).require_same_order(replace(self.saved, samples=7, seed=1, order="sequential"))

    def test_without_a_shuffle_the_seed_does_not_matter(self) -> None:
        saved = replace(self.saved, order="sequential")
        saved.require_same_order(replace(saved, seed=9))

    @pytest.mark.parametrize(
        "state",
        [
            None,
            [],
            {},
            {"epoch": True},
            {"consumed": -1},
            {"consumed": 1.0},
            {"order": 3},
            {"seed": "5"},
            {"samples": []},
            {"epoch": 1 << 62},
            {"epoch": 10**5000},
            {"seed": -(10**5000)},
            {"order": "x" * 10**6},
            {"consumed": 101},
        ],
    )
    def test_values_of_another_kind_are_refused(self, state: object) -> None:
        broken = {**self.saved.to_state(), **state} if isinstance(state, dict) and state else state
        with pytest.raises(FormatError, match="data position must be") as caught:
            SavedPosition.from_state(broken)
        assert len(str(caught.value)) < 2000

    def test_a_rest_with_fewer_samples_than_ranks_is_refused_with_the_next_epoch(self) -> None:
        plan = BatchPlan(100, 50, 1, 25, drop_last=False)
        plan.require_parts(DataPosition(1, 75))
        with pytest.raises(
            InexactPositionError, match=r"12 samples remain, with a step of 12: .* at most 12 ranks"
        ) as caught:
            plan.require_parts(DataPosition(1, 88))
        assert caught.value.nearest == DataPosition(2)
        BatchPlan(100, 50, 1, 25).require_parts(DataPosition(1, 88))  # left out by drop_last


@given(streams=st.integers(1, 200), ranks=st.integers(1, 64))
def test_on_1_to_64_ranks_streams_are_split_evenly_or_refused_with_numbers_that_fit(streams: int, ranks: int) -> None:
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
