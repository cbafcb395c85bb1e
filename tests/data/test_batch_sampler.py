"""After kills and resumes on any number of ranks, every epoch has each of its samples once."""

from __future__ import annotations

import itertools
import json
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from shardckpt.data import DataPosition, ElasticBatchSampler, InexactPositionError
from shardckpt.data.batch_sampler import SampleOrder
from shardckpt.errors import UsageError


def make_ranks(world: int, *args: Any, **options: Any) -> list[ElasticBatchSampler]:
    return [ElasticBatchSampler(*args, num_replicas=world, rank=rank, **options) for rank in range(world)]


def load_all(ranks: list[ElasticBatchSampler], state: dict[str, Any] | None) -> None:
    for sampler in ranks:
        if state is not None:
            sampler.load_state_dict(state)


def train_steps(ranks: list[ElasticBatchSampler]) -> Iterator[tuple[DataPosition, list[int]]]:
    """Yield the position behind each step and its samples, in the order of ranks."""
    while True:
        parts: list[list[int]] = [[] for _ in ranks]
        for batches in zip(*ranks, strict=True):
            for part, batch in zip(parts, batches, strict=True):
                part += batch
            ended = [sampler.advance() for sampler in ranks]
            if ended == [True] * len(ranks):
                yield ranks[0].position, list(itertools.chain(*parts))
                parts = [[] for _ in ranks]


def train_epochs(sampler: ElasticBatchSampler, steps: int) -> list[list[int]]:
    return [samples for _, samples in itertools.islice(train_steps([sampler]), steps)]


class Squares(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> tuple[int, int]:
        return number, number * number


JOBS = st.lists(
    st.tuples(st.integers(1, 64), st.integers(1, 3), st.integers(0, 6), st.booleans()), min_size=1, max_size=6
)


class TestAnyNumberOfRanks:
    def test_a_kill_at_every_step_and_a_resume_on_1_to_64_ranks_changes_no_step(self) -> None:
        expected = itertools.cycle(train_epochs(ElasticBatchSampler(500, 128, seed=3, shuffle=False), 4))
        state: dict[str, Any] | None = None
        for world in (*range(1, 65), *range(63, 0, -1)):  # each job trains one step and is killed
            ranks = make_ranks(world, 500, 128, seed=3, shuffle=False)
            load_all(ranks, state)
            assert next(train_steps(ranks))[1] == next(expected)
            state = ranks[-1].state_dict()

    @settings(max_examples=20)
    @given(samples=st.integers(400, 900), batch=st.integers(384, 400), jobs=JOBS, seed=st.integers())
    def test_epochs_are_complete_whatever_jobs_are_killed(
        self, samples: int, batch: int, jobs: list[tuple[int, int, int, bool]], seed: int
    ) -> None:
        trained: Counter[tuple[int, int]] = Counter()
        state, end = None, DataPosition()
        for world, accumulate, steps, dies_in_accumulation in jobs:
            ranks = make_ranks(world, samples, batch, accumulate=accumulate, seed=seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_all(ranks, state)
            epoch = end.epoch
            for position, numbers in itertools.islice(train_steps(ranks), steps):
                trained.update((epoch, number) for number in numbers)
                epoch, end = position.epoch, position
            if dies_in_accumulation and accumulate > 1:
                assert [sampler.advance() for sampler in ranks] == [False] * world
            assert all(sampler.state_dict() == ranks[0].state_dict() for sampler in ranks)
            state = json.loads(json.dumps(ranks[0].state_dict()))
        assert set(trained.values()) <= {1}
        for epoch in range(end.epoch):
            assert {number for at, number in trained if at == epoch} == set(range(samples))
        assert sum(at == end.epoch for at, _ in trained) == end.consumed

    @given(
        samples=st.integers(1, 300),
        batches=st.lists(st.integers(1, 80), min_size=2, max_size=5),
        world=st.integers(1, 9),
    )
    def test_another_batch_size_continues_at_the_same_sample_or_is_refused(
        self, samples: int, batches: list[int], world: int
    ) -> None:
        trained: list[int] = []
        state = None
        for batch in batches:
            try:
                ranks = make_ranks(world, samples, batch)
            except UsageError:
                assume(False)
            try:
                load_all(ranks, state)
            except InexactPositionError as error:
                assert error.nearest == DataPosition(1)
                return
            position, numbers = next(train_steps(ranks))
            trained += numbers
            if position.epoch:
                assert sorted(trained) == list(range(samples))
                return
            state = ranks[0].state_dict()
        assert len(set(trained)) == len(trained) == position.consumed

    def test_the_mean_gradient_of_uneven_batches_is_that_of_the_step(self) -> None:
        ranks = make_ranks(3, 100, 20, accumulate=2)
        total = 0.0
        for _ in range(2):
            for sampler in ranks:
                batch = next(iter(sampler))
                total += sampler.loss_weight * sum(batch) / len(batch) / len(ranks)
            ended = [sampler.advance() for sampler in ranks]
        assert ended == [True] * 3
        expected = next(iter(ElasticBatchSampler(100, 20)))
        assert total == pytest.approx(sum(expected) / len(expected))


class TestWithLoaders:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_workers_run_ahead_and_the_position_stays_with_the_training(self, workers: int) -> None:
        sampler = ElasticBatchSampler(60, 8, seed=1)
        loader = DataLoader(
            Squares(), batch_sampler=sampler, num_workers=workers, prefetch_factor=3 if workers else None
        )
        seen: list[int] = []
        for numbers, _ in itertools.islice(loader, 3):
            seen += numbers.tolist()
            sampler.advance()
        state = sampler.state_dict()
        assert sampler.position == DataPosition(0, 24)
        for rank in range(2):
            other = ElasticBatchSampler(60, 8, seed=1, num_replicas=2, rank=rank)
            other.load_state_dict(state)
            for numbers, squares in DataLoader(Squares(), batch_sampler=other, num_workers=workers):
                assert (numbers**2).equal(squares)
                seen += numbers.tolist()
        assert sorted(seen) == list(range(60))

    def test_persistent_workers_go_on_from_epoch_to_epoch(self) -> None:
        sampler = ElasticBatchSampler(60, 25)
        loader = DataLoader(Squares(), batch_sampler=sampler, num_workers=1, persistent_workers=True)
        epochs = []
        for _ in range(3):
            epochs.append([])
            for numbers, _ in loader:
                epochs[-1].append(numbers.tolist())
                sampler.advance()
        assert len(loader) == 3
        assert [list(map(len, epoch)) for epoch in epochs] == [[25, 18, 17]] * 3
        assert all(sorted(itertools.chain(*epoch)) == list(range(60)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]
        assert sampler.position == DataPosition(3)

    def test_seeds_of_workers_differ_by_rank_and_position_and_not_by_the_training(self) -> None:
        before, seeds = torch.get_rng_state(), []
        for sampler in make_ranks(2, 60, 8, seed=1):
            for position in (DataPosition(), DataPosition(0, 8), DataPosition()):
                sampler.move_to(position)
                next(iter(DataLoader(Squares(), batch_sampler=sampler, generator=sampler.generator)))
                seeds.append(int(torch.randint(1 << 62, (), generator=sampler.generator)))
        assert seeds[0::3] == seeds[2::3]
        assert len(set(seeds)) == 4
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_loader_that_iterates_from_before_a_restore_is_an_error(self) -> None:
        sampler = ElasticBatchSampler(60, 8)
        batches = iter(DataLoader(Squares(), batch_sampler=sampler))
        next(batches)
        sampler.load_state_dict({**sampler.state_dict(), "consumed": 16})
        with pytest.raises(
            UsageError, match=r"changed to sample 16 of epoch 0 while a loader was iterating from sample 0"
        ):
            next(batches)

    def test_an_epoch_of_which_no_batch_was_counted_is_a_warning(self) -> None:
        sampler = ElasticBatchSampler(60, 8)
        first = list(sampler)
        with pytest.warns(UserWarning, match="call `advance` after each batch"):
            assert list(sampler) == first


class TestPositions:
    def test_a_save_inside_an_accumulation_goes_on_at_its_step_with_a_warning(self) -> None:
        sampler = ElasticBatchSampler(60, 12, accumulate=3)
        batches = list(itertools.islice(sampler, 6))
        assert [sampler.advance() for _ in range(5)] == [False, False, True, False, False]
        assert sampler.batches_left == 1
        other = ElasticBatchSampler(60, 12, accumulate=3)
        with pytest.warns(UserWarning, match="2 batches after sample 12 of epoch 0; training continues there"):
            other.load_state_dict(sampler.state_dict())
        assert list(itertools.islice(other, 3)) == batches[3:]

    def test_a_restore_in_place_begins_the_step_and_the_epoch_again(self) -> None:
        sampler = ElasticBatchSampler(60, 30, accumulate=3)
        saved, first = sampler.state_dict(), []
        for batch in sampler:
            first.append(batch)
            sampler.advance()
        sampler.advance()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sampler.load_state_dict(saved)
            assert sampler.batches_left == 3
            assert list(sampler) == first

    def test_a_refused_position_leaves_the_sampler_as_it_was(self) -> None:
        saved = ElasticBatchSampler(60, 12)
        saved.move_to(DataPosition(2, 36))
        sampler = ElasticBatchSampler(70, 10)
        with pytest.raises(InexactPositionError, match="sample 36 of epoch 2 was saved with samples=60") as caught:
            sampler.load_state_dict(saved.state_dict())
        assert sampler.position == DataPosition()
        sampler.move_to(caught.value.nearest)
        assert sampler.position == DataPosition(3)

    def test_a_rest_of_an_epoch_that_has_no_sample_for_some_rank_is_refused(self) -> None:
        saved = ElasticBatchSampler(100, 8)
        saved.move_to(DataPosition(1, 88))
        for sampler in make_ranks(25, 100, 50):
            with pytest.raises(InexactPositionError, match=r"step of 12: too few for 25 ranks") as caught:
                sampler.load_state_dict(saved.state_dict())
            sampler.move_to(caught.value.nearest)
            assert sampler.position == DataPosition(2)

    def test_the_rest_that_a_larger_batch_does_not_fill_is_left_out_with_drop_last(self) -> None:
        sampler = ElasticBatchSampler(60, 40, drop_last=True)
        sampler.load_state_dict({**sampler.state_dict(), "consumed": 24})
        assert sampler.position == DataPosition(1)

    def test_frameworks_may_set_the_epoch_that_it_is(self) -> None:
        sampler = ElasticBatchSampler(60, 12)
        sampler.move_to(DataPosition(1, 24))
        sampler.set_epoch(1)
        assert sampler.position == DataPosition(1, 24)
        with pytest.raises(UsageError, match=r"epoch 0 is over, .* Start the loop over epochs at 1"):
            sampler.set_epoch(0)
        sampler.set_epoch(4)
        assert sampler.position == DataPosition(4)

    @pytest.mark.parametrize("position", [DataPosition(-1), DataPosition(0, -1), DataPosition(0, 61)])
    def test_positions_outside_of_an_epoch_are_refused(self, position: DataPosition) -> None:
        with pytest.raises(UsageError, match="must be in an epoch of 60 samples"):
            ElasticBatchSampler(60, 12).move_to(position)

    def test_numbers_of_numpy_are_saved_as_plain_ones(self) -> None:
        sampler = ElasticBatchSampler(np.int64(60), 12, seed=np.int32(4))
        state = sampler.state_dict()
        assert json.loads(json.dumps(state)) == state

    @pytest.mark.parametrize("number", [np.int64(3), torch.tensor(3), True])
    def test_a_position_that_was_given_by_numbers_of_numpy_can_be_loaded(self, number: Any) -> None:
        sampler, other = ElasticBatchSampler(60, 12), ElasticBatchSampler(60, 12)
        sampler.set_epoch(number)
        other.load_state_dict(sampler.state_dict())
        assert other.position == DataPosition(int(number))
        sampler.move_to(DataPosition(number, number))
        other.load_state_dict(sampler.state_dict())
        assert other.position == DataPosition(int(number), int(number))

    @pytest.mark.parametrize("kind", [np.int64, torch.tensor])
    def test_sizes_may_be_numbers_of_numpy(self, kind: Any) -> None:
        sampler = ElasticBatchSampler(60, kind(12), accumulate=kind(2), num_replicas=kind(2), rank=kind(1))
        plain = ElasticBatchSampler(60, 12, accumulate=2, num_replicas=2, rank=1)
        assert list(sampler) == list(plain)
        assert [sampler.advance() for _ in range(3)] == [False, True, False]
        assert json.loads(json.dumps(sampler.state_dict())) == {**plain.state_dict(), "consumed": 12, "unfinished": 1}

    @pytest.mark.parametrize(
        "number", [float("nan"), 1.0, "1", None, 1 << 20_000], ids=lambda value: type(value).__name__
    )
    def test_epochs_and_seeds_that_are_no_integers_are_refused(self, number: Any) -> None:
        for make in (ElasticBatchSampler(60, 12).set_epoch, lambda seed: ElasticBatchSampler(60, 12, seed=seed)):
            with pytest.raises(UsageError, match=r"must be an integer|must have at most 128 bits"):
                make(number)

    def test_a_rank_outside_of_the_replicas_is_refused(self) -> None:
        with pytest.raises(UsageError, match="rank must be from 0 to 1, got 2"):
            ElasticBatchSampler(60, 12, num_replicas=2, rank=2)


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
