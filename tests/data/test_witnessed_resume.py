"""With the elastic sampler a witness finds no difference on 1, 2 and 3 ranks; it names what a plain sampler repeats."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shardckpt
from shardckpt.data import ElasticBatchSampler, ElasticStreamLoader
from tests.kit.ranks.harness import run

SAMPLES, BATCH, ACCUMULATE = 50, 12, 2
SAVED_AT = 3  # an epoch has five steps, and a resumed job trains four: it begins the second epoch


class Points(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.points = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.points[number]


class Training:
    """A job on one rank, whose data comes from a sampler."""

    def __init__(self, root: Path, seed: int, saved_at: int = SAVED_AT) -> None:
        self.saved_at = saved_at
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(nn.Linear(5, 1))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.checkpointer = shardckpt.Checkpointer(root, witness=shardckpt.Witness(steps=2))
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}

    def train(self, steps: Iterator[list[tuple[torch.Tensor, float]]], last: int, first: int = 0) -> None:
        """Train steps, each a list of batches with the weights of their losses; save one of them."""
        for step, batches in enumerate(itertools.islice(steps, last - first), first + 1):
            means = []
            for points, weight in batches:
                mean = self.model(points).square().mean()
                (mean * weight).backward()
                means.append(mean.detach() * len(points))
            self.optim.step()
            self.optim.zero_grad()
            loss = sum(means) / sum(len(points) for points, _ in batches)
            self.checkpointer.witness(step, loss=loss, batch=[points for points, _ in batches])
            if step == self.saved_at:
                self.checkpointer.save(step, self.state)


def read_steps(
    loader: DataLoader[torch.Tensor] | ElasticStreamLoader, position: ElasticBatchSampler | ElasticStreamLoader
) -> Iterator[list[tuple[torch.Tensor, float]]]:
    batches = []
    while True:
        for points in loader:
            batches.append((points, position.loss_weight))
            if position.advance():
                yield batches
                batches = []


def train_elastically(
    rank: int, world: int, root: Path, accumulate: int, saved_at: int = SAVED_AT
) -> shardckpt.results.Divergence | None:
    sampler = ElasticBatchSampler(SAMPLES, BATCH, accumulate=accumulate)
    training = Training(root, seed=world, saved_at=saved_at)
    training.state["data"] = sampler
    loader = DataLoader(Points(), batch_sampler=sampler, generator=sampler.generator)
    return resume(training, read_steps(loader, sampler))


def train_on_streams(rank: int, world: int, root: Path) -> shardckpt.results.Divergence | None:
    loader = ElasticStreamLoader(lambda stream, epoch: Points().points[stream::6], 6, 2)
    training = Training(root, seed=world)
    training.state["data"] = loader
    return resume(training, read_steps(loader, loader))


def train_with_a_plain_sampler(
    rank: int, world: int, root: Path, batch: int = 6, skipped: int = 0
) -> shardckpt.results.Divergence | None:
    """Train with torch's sampler; a resumed job skips batches."""
    loader = DataLoader(Points(), batch_size=batch, sampler=DistributedSampler(Points(), seed=3))
    training = Training(root, seed=world)
    is_resumed = training.checkpointer.latest() is not None
    steps = ([(points, 1.0)] for points in itertools.islice(itertools.cycle(loader), skipped * is_resumed, None))
    return resume(training, steps)


def resume(
    training: Training, steps: Iterator[list[tuple[torch.Tensor, float]]]
) -> shardckpt.results.Divergence | None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = training.checkpointer.restore(training.state) or 0
        try:
            training.train(steps, training.saved_at + (4 if start else 2), start)
        except shardckpt.errors.ResumeDivergence as error:
            return error.divergence
    return None


@pytest.mark.parametrize("saved_by", [1, 2])
def test_on_1_2_and_3_ranks_the_witness_finds_no_difference(saved_by: int, tmp_path: Path) -> None:
    assert run(saved_by, train_elastically, tmp_path, ACCUMULATE) == [None] * saved_by
    for world, accumulate in ((1, 2), (2, 2), (3, 1), (3, 2)):
        assert run(world, train_elastically, tmp_path, accumulate) == [None] * world


def test_a_resume_at_the_end_of_an_epoch_draws_the_seeds_of_workers_as_the_saved_run(tmp_path: Path) -> None:
    for _ in range(2):
        assert run(1, train_elastically, tmp_path, 1, 4) == [None]


def test_with_streams_the_witness_finds_no_difference_on_1_2_and_3_ranks(tmp_path: Path) -> None:
    assert run(2, train_on_streams, tmp_path) == [None] * 2
    for world in (1, 2, 3):
        assert run(world, train_on_streams, tmp_path) == [None] * world


@pytest.mark.parametrize(
    ("batch", "skipped", "found"), [(12, 0, "repeated"), (12, 4, "skipped"), (6, 3, "other samples")]
)
def test_the_witness_names_what_a_distributed_sampler_does_on_other_ranks(
    batch: int, skipped: int, found: str, tmp_path: Path
) -> None:
    assert run(2, train_with_a_plain_sampler, tmp_path) == [None] * 2
    (divergence,) = run(1, train_with_a_plain_sampler, tmp_path, batch, skipped)
    assert divergence is not None
    assert (divergence.cause, divergence.name, divergence.step) == ("batch", found, SAVED_AT + 1)
