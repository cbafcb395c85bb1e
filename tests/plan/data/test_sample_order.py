"""The order of samples is a permutation for each epoch, is the specified one, and needs no permutation in memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import UsageError
from shardckpt.plan.data.sample_order import SampleOrder


def take(samples: int, seed: int, epoch: int, places: range | None = None) -> list[int]:
    return SampleOrder(samples, seed).take(epoch, [places or range(samples)])[0]


@given(samples=st.integers(1, 400), seed=st.integers(-3, 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_has_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    assert sorted(take(samples, seed, epoch)) == list(range(samples))


@given(samples=st.integers(1, 400), cuts=st.lists(st.integers(0, 400), max_size=4))
def test_places_may_be_taken_in_any_parts(samples: int, cuts: list[int]) -> None:
    order, ends = SampleOrder(samples, 7), sorted({0, samples, *(min(cut, samples) for cut in cuts)})
    parts = order.take(2, [range(start, stop) for start, stop in itertools.pairwise(ends)])
    assert list(itertools.chain(*parts)) == take(samples, 7, 2)
    assert [order.take(2, [range(at, at + 1)]) for at in ends[:-1]] == [[part[:1]] for part in parts]


def test_the_order_is_the_one_that_old_checkpoints_were_saved_with() -> None:
    assert take(10, 0, 0) == GOLDEN
    assert take(10**12, 5, 3, range(4)) == GOLDEN_LARGE
    assert (SampleOrder(4).name, SampleOrder(4, shuffle=False).name) == ("swap-or-not-32", "sequential")


GOLDEN = [9, 2, 5, 1, 3, 4, 7, 0, 6, 8]
GOLDEN_LARGE = [207940786900, 118342153819, 40150759726, 12862245711]


def test_without_a_shuffle_samples_come_in_order() -> None:
    assert SampleOrder(5, 3, shuffle=False).take(1, [range(1, 4), range(2)]) == [[1, 2, 3], [0, 1]]


def test_seeds_and_epochs_have_other_orders() -> None:
    orders = {tuple(take(30, seed, epoch)) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64


def test_all_permutations_are_equally_likely() -> None:
    seen = Counter(tuple(take(3, seed, 0)) for seed in range(600))
    deviation = sum((seen[each] - 100) ** 2 / 100 for each in itertools.permutations(range(3)))
    assert deviation < 20.5  # the 0.1 % quantile of chi squared with 5 degrees of freedom


def test_a_data_set_of_a_trillion_samples_needs_no_memory() -> None:
    tracemalloc.start()
    try:
        take(10**12, 1, 0, range(10**11, 10**11 + 64))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("samples", [0, -1, 1 << 62])
def test_impossible_numbers_of_samples_are_refused(samples: int) -> None:
    with pytest.raises(UsageError, match="number of samples must be from 1"):
        SampleOrder(samples)
