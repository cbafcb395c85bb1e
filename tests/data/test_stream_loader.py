"""After kills and resumes on any number of ranks, every epoch of every stream has each of its samples once."""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardckpt
from shardckpt.data import DataPosition, ElasticStreamLoader, InexactPositionError
from shardckpt.errors import FormatError, UsageError
from tests.kit.ranks.harness import run

Sample = tuple[int, int, int]


def open_stream(stream: int, epoch: int, shortest: int = 5) -> Iterator[Sample]:
    """Yield samples that say which they are: (stream, epoch, number); streams have different lengths."""
    return ((stream, epoch, number) for number in range(shortest + stream % 3))


class CountingStream:
    """An iterable with a state, which must not be read again."""

    def __init__(self, stream: int, epoch: int) -> None:
        self.samples, self.at = list(open_stream(stream, epoch)), 0

    def __iter__(self) -> Iterator[Sample]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make_ranks(world: int, streams: int, batch: int, **options: Any) -> list[ElasticStreamLoader]:
    options = {"collate_fn": list, **options}
    source = options.pop("source", open_stream)
    return [
        ElasticStreamLoader(source, streams, batch, num_replicas=world, rank=rank, **options) for rank in range(world)
    ]


def train_steps(ranks: list[ElasticStreamLoader], steps: int) -> list[list[Sample]]:
    """Return the samples of each step, of all ranks in their order."""
    trained = []
    readers = [iter(loader) for loader in ranks]
    for _ in range(steps):
        trained.append([])
        for loader, reader in zip(ranks, readers, strict=True):
            for left in range(loader.batches_per_step, 0, -1):
                assert loader.batches_left == left
                trained[-1] += next(reader)
                assert loader.advance() == (left == 1)
    return trained


def restart(ranks: list[ElasticStreamLoader], states: list[Any]) -> None:
    """Load saved states, as `shardckpt.load` does it."""
    for rank, loader in enumerate(ranks):
        if len(states) == len(ranks):
            loader.load_state_dict(states[rank])
        elif states:
            assert loader.load_other_world(states, rank, len(ranks))


def save(ranks: list[ElasticStreamLoader]) -> list[Any]:
    return json.loads(json.dumps([loader.state_dict() for loader in ranks]))


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@pytest.mark.parametrize("source", [open_stream, CountingStream])
def test_a_kill_at_every_step_and_a_resume_on_every_number_of_ranks_changes_no_step(source: Any) -> None:
    options = {"source": source, "resume_by": "state" if source is CountingStream else "reading"}
    expected = iter(train_steps(make_ranks(1, 24, 2, **options), 16))
    states: list[Any] = []
    for world in [*divisors(24), *reversed(divisors(24))]:
        ranks = make_ranks(world, 24, 2, **options)
        restart(ranks, states)
        assert train_steps(ranks, 1) == [next(expected)]
        states = save(ranks)


@settings(max_examples=15)
@given(
    streams=st.sampled_from([1, 6, 12, 64]),
    jobs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=6),
    data=st.data(),
)
def test_epochs_of_streams_are_complete_whatever_jobs_are_killed(
    streams: int, jobs: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    trained: Counter[Sample] = Counter()
    states: list[Any] = []
    for number, steps, batch in jobs:
        ranks = make_ranks(divisors(streams)[number % len(divisors(streams))], streams, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            restart(ranks, states)
        trained.update(itertools.chain(*train_steps(ranks, steps)))
        for loader in ranks:  # killed in the middle of a step
            reader = iter(loader)
            for _ in range(data.draw(st.integers(0, loader.batches_per_step - 1))):
                next(reader)
                loader.advance()
        states = save(ranks)
    positions = {number: at for loader in ranks for number, at in loader.positions.items()}
    expected = Counter(
        sample
        for stream, (epoch, samples) in positions.items()
        for at in range(epoch + 1)
        for sample in itertools.islice(open_stream(stream, at), samples if at == epoch else None)
    )
    assert trained == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_run_ahead_and_the_position_stays_with_the_training(workers: int) -> None:
    expected = train_steps(make_ranks(1, 4, 3), 5)
    (loader,) = make_ranks(1, 4, 3, num_workers=workers, prefetch_factor=2 if workers else None)
    assert train_steps([loader], 2) == expected[:2]
    ranks = make_ranks(2, 4, 3)
    restart(ranks, save([loader]))
    assert train_steps(ranks, 3) == expected[2:]


def test_batches_are_collated_as_by_torch() -> None:
    batch = next(iter(ElasticStreamLoader(lambda stream, epoch: [{"x": 1.0}, {"x": 2.0}], 1, 2)))
    assert batch["x"].tolist() == [1.0, 2.0]


def test_a_loader_draws_no_number_of_the_training() -> None:
    before = torch.get_rng_state()
    next(iter(ElasticStreamLoader(open_stream, 2, 2)))
    assert torch.equal(torch.get_rng_state(), before)


def draw_numbers(stream: int, epoch: int) -> Iterator[float]:
    return iter(torch.rand(3).tolist())


def test_workers_of_different_ranks_draw_different_numbers() -> None:
    ranks = make_ranks(2, 2, 3, source=draw_numbers, num_workers=1)
    assert next(iter(ranks[0])) != next(iter(ranks[1]))


def test_the_streams_that_a_state_reads_are_read_once() -> None:
    (loader,) = make_ranks(1, 1, 4, source=CountingStream, resume_by="state")
    train_steps([loader], 3)
    assert loader.state_dict()["positions"] == {"0": [2, 2, {"at": 2}]}


class TestRefusals:
    @pytest.mark.parametrize(
        ("streams", "ranks", "fix"), [(64, 3, "2 or 4"), (64, 48, "32 or 64"), (4, 8, "4"), (7, 2, "1 or 7")]
    )
    def test_ranks_that_do_not_divide_the_streams_are_refused_with_the_nearest_numbers(
        self, streams: int, ranks: int, fix: str
    ) -> None:
        with pytest.raises(UsageError, match=rf"{streams} streams cannot be .* {ranks} ranks\. Use {fix} ranks"):
            ElasticStreamLoader(open_stream, streams, 2, num_replicas=ranks, rank=0)

    def test_another_number_of_streams_is_refused_with_the_beginning_of_the_epoch(self) -> None:
        (loader,) = make_ranks(1, 6, 4)
        train_steps([loader], 3)
        (other,) = make_ranks(1, 12, 4)
        with pytest.raises(InexactPositionError, match=r"6 streams were saved.* streams=6\.") as caught:
            other.load_state_dict(loader.state_dict())
        assert caught.value.nearest == DataPosition(1)
        other.move_to(caught.value.nearest)
        assert other.positions == dict.fromkeys(range(12), (1, 0))

    def test_a_place_within_an_epoch_of_streams_cannot_be_given(self) -> None:
        with pytest.raises(UsageError, match="an epoch's start, got sample 3 of epoch 1"):
            make_ranks(1, 6, 4)[0].move_to(DataPosition(1, 3))

    @pytest.mark.parametrize(
        "state",
        [
            None,
            {},
            {"streams": 6, "unfinished": 0},
            {"streams": 6, "unfinished": -1, "positions": {}},
            {"streams": 6, "unfinished": 0, "positions": {"a": [0, 0, None]}},
            {"streams": 6, "unfinished": 0, "positions": {"0": [0, True, None]}},
            {"streams": 6, "unfinished": 0, "positions": {"0": [0]}},
            {"streams": 6, "unfinished": 0, "positions": {"0": [0, 1 << 64, None]}},
            {"streams": 6, "unfinished": 0, "positions": {"0": [0, 10**5000, None]}},
            {"streams": 6, "unfinished": 10**5000, "positions": {}},
            {"streams": 6, "unfinished": 0, "positions": {float("inf"): [0, 0, None]}},
            {"streams": 6, "unfinished": 0, "positions": {"0": [0, 0, None], "00": [0, 4, None]}},
            {"streams": 6, "unfinished": 0, "positions": {"6": [0, 0, None]}},
        ],
    )
    def test_values_of_another_kind_are_refused(self, state: Any) -> None:
        with pytest.raises(FormatError, match="not the state of a stream loader"):
            make_ranks(1, 6, 4)[0].load_state_dict(state)

    def test_missing_streams_are_named(self) -> None:
        halves = save(make_ranks(2, 6, 4))
        with pytest.raises(FormatError, match=r"rank 0 misses its positions in streams \[3, 4, 5\]"):
            make_ranks(1, 6, 4)[0].load_state_dict(halves[0])
        with pytest.raises(FormatError, match=r"different numbers of streams: \[6, 8\]"):
            make_ranks(1, 6, 4)[0].load_other_world([halves[0], make_ranks(1, 8, 4)[0].state_dict()], 0, 1)

    def test_two_positions_of_ranks_in_one_stream_are_refused(self) -> None:
        first, later = make_ranks(1, 6, 4)[0], make_ranks(1, 6, 4)[0]
        train_steps([later], 1)
        with pytest.raises(FormatError, match="different positions in stream 0"):
            make_ranks(1, 6, 4)[0].load_other_world([first.state_dict(), later.state_dict()], 0, 1)

    def test_a_stream_without_samples_is_an_error_in_place_of_an_endless_loop(self) -> None:
        with pytest.raises(UsageError, match="stream 0 has no samples in epoch 0"):
            next(iter(ElasticStreamLoader(lambda stream, epoch: [], 1, 2)))

    def test_a_stream_that_became_shorter_is_an_error(self) -> None:
        (loader,) = make_ranks(1, 1, 4)
        train_steps([loader], 1)
        (other,) = make_ranks(1, 1, 4, source=functools.partial(open_stream, shortest=3))
        other.load_state_dict(loader.state_dict())
        with pytest.raises(UsageError, match="stream 0 has 3 samples in epoch 0, and 4 were trained"):
            next(iter(other))

    def test_streams_without_a_state_cannot_resume_by_it(self) -> None:
        with pytest.raises(UsageError, match="streams must have `state_dict` and `load_state_dict`, got generator"):
            next(iter(ElasticStreamLoader(open_stream, 1, 2, resume_by="state")))

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"batch_size": 0}, "batch_size"),
            ({"resume_by": "x"}, "resume_by"),
            ({"num_workers": -1}, "num_workers"),
            ({"streams": 1 << 40}, "streams"),
        ],
    )
    def test_wrong_options_are_refused(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(UsageError, match=f"{text} must be"):
            ElasticStreamLoader(open_stream, **{"streams": 2, "batch_size": 2, **options})

    def test_sizes_may_be_numbers_of_torch(self) -> None:
        loader = ElasticStreamLoader(open_stream, torch.tensor(2), torch.tensor(2), num_workers=torch.tensor(0))
        next(iter(loader))
        loader.advance()
        assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()

    def test_more_is_not_counted_than_was_read(self) -> None:
        (loader,) = make_ranks(1, 2, 2)
        next(iter(loader))
        loader.advance()
        with pytest.raises(UsageError, match="all of them are counted"):
            loader.advance()

    def test_an_iterator_from_before_a_load_is_an_error(self) -> None:
        (loader,) = make_ranks(1, 2, 2)
        reader = iter(loader)
        next(reader)
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(UsageError, match="position was changed while the loader was iterating"):
            next(reader)

    def test_a_save_inside_a_step_goes_on_at_its_beginning_with_a_warning(self) -> None:
        (loader,) = make_ranks(1, 3, 2)
        first = list(itertools.islice(loader, 3))
        loader.advance()
        (other,) = make_ranks(1, 3, 2)
        with pytest.warns(UserWarning, match="within a step, after 1 of its batches"):
            other.load_state_dict(loader.state_dict())
        assert list(itertools.islice(other, 3)) == first

    def test_a_new_iterator_and_a_restore_in_place_begin_the_step_again(self) -> None:
        (loader,) = make_ranks(1, 3, 2)
        first = list(itertools.islice(loader, 3))
        for begin_again in (lambda: iter(loader), lambda: loader.move_to(DataPosition())):
            loader.advance()
            assert loader.batches_left == 2
            begin_again()
            assert loader.batches_left == 3
            assert list(itertools.islice(loader, 3)) == first


def train_job(rank: int, world: int, root: Path, steps: int) -> list[list[Sample]]:
    loader = ElasticStreamLoader(open_stream, 6, 2, collate_fn=list)
    checkpointer = shardckpt.Checkpointer(root)
    start = checkpointer.restore({"data": loader}) or 0
    trained = train_steps([loader], steps)
    checkpointer.save(start + steps, {"data": loader})
    return trained


def test_the_positions_go_through_checkpoints_of_1_2_and_3_ranks(tmp_path: Path) -> None:
    expected = [sorted(step) for step in train_steps(make_ranks(1, 6, 2), 8)]
    found = []
    for world in (2, 3, 1, 2):
        ranks = run(world, train_job, tmp_path, 2)
        found += [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
    assert found == expected
