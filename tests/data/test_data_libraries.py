"""The sampler and the loader of streams resume exactly with torchdata's and Hugging Face's own classes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.data import DatasetStreams, ElasticBatchSampler, ElasticStreamLoader
from shardckpt.errors import UsageError
from tests.kit.ranks.harness import run


def read_steps(loader: ElasticStreamLoader, steps: int) -> list[list[int]]:
    """Return the samples of steps, each sorted."""
    reader, trained = iter(loader), []
    for _ in range(steps):
        trained.append([])
        for _ in range(loader.batches_per_step):
            trained[-1] += next(reader)["a"].tolist()
            loader.advance()
    return trained


def resume(loader: ElasticStreamLoader, make: Any, world: int, steps: int) -> list[list[int]]:
    """Go on on a number of ranks; return the samples of steps of all ranks."""
    state, parts = json.loads(json.dumps(loader.state_dict())), []
    for rank in range(world):
        other = make(num_replicas=world, rank=rank)
        assert other.load_other_world([state], rank, world)
        parts.append(read_steps(other, steps))
    return [list(itertools.chain(*step)) for step in zip(*parts, strict=True)]


def load_on_other_ranks(rank: int, world: int, path: str) -> str:
    try:
        shardckpt.load({"data": shardckpt.PerRank({"at": 0})}, path)
    except shardckpt.errors.MismatchError as error:
        return str(error)
    return ""


class TestDatasets:
    @property
    def datasets(self) -> Any:
        return pytest.importorskip("datasets")

    def make(self, shuffled: bool, resume_by: str, workers: int = 0, **options: Any) -> ElasticStreamLoader:
        dataset = self.datasets.Dataset.from_dict({"a": list(range(90))}).to_iterable_dataset(num_shards=6)
        if shuffled:
            dataset = dataset.shuffle(seed=3, buffer_size=8)
        streams = DatasetStreams(dataset.with_format("torch"), 6)
        return ElasticStreamLoader(streams, 6, 4, resume_by=resume_by, num_workers=workers, **options)

    @pytest.mark.parametrize(("shuffled", "resume_by"), [(False, "state"), (False, "reading"), (True, "reading")])
    def test_streams_of_a_data_set_resume_on_1_2_and_3_ranks(self, shuffled: bool, resume_by: str) -> None:
        expected = read_steps(self.make(shuffled, resume_by), 8)
        seen = Counter(itertools.chain(*expected))  # 15 samples a stream: two epochs and two samples
        assert (set(seen), sorted(seen.values())) == (set(range(90)), [2] * 78 + [3] * 12)
        for world in (1, 2, 3):
            first = self.make(shuffled, resume_by)
            assert read_steps(first, 2) == expected[:2]
            make = lambda **options: self.make(shuffled, resume_by, **options)  # noqa: E731
            assert resume(first, make, world, 6) == expected[2:]

    def test_every_worker_reads_every_one_of_its_streams(self) -> None:
        expected = read_steps(self.make(False, "state"), 4)
        loader = self.make(False, "state", workers=2)
        assert read_steps(loader, 4) == expected

    def test_epochs_are_shuffled_differently(self) -> None:
        examples = [list(DatasetStreams(self.make_shuffled(), 1)(0, epoch)) for epoch in (0, 0, 1)]
        assert examples[0] == examples[1] != examples[2]

    def make_shuffled(self) -> Any:
        dataset = self.datasets.Dataset.from_dict({"a": list(range(30))}).to_iterable_dataset()
        return dataset.shuffle(seed=3, buffer_size=8)

    def test_more_streams_than_shards_are_refused(self) -> None:
        with pytest.raises(UsageError, match="4 streams need as many shards, and the data set has 1"):
            DatasetStreams(self.make_shuffled(), 4)


class TestTorchdata:
    @property
    def stateful(self) -> Any:
        return pytest.importorskip("torchdata.stateful_dataloader")

    @property
    def nodes(self) -> Any:
        return pytest.importorskip("torchdata.nodes")

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_stateful_loader_resumes_by_the_state_of_the_sampler(self, workers: int) -> None:
        dataset = torch.utils.data.TensorDataset(torch.arange(60))
        sampler = ElasticBatchSampler(60, 8, seed=1)
        loader = self.stateful.StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=workers)
        seen: list[int] = []
        for (batch,) in itertools.islice(loader, 3):
            seen += batch.tolist()
            sampler.advance()
        for rank in range(2):
            other = ElasticBatchSampler(60, 8, seed=1, num_replicas=2, rank=rank)
            other.load_state_dict(sampler.state_dict())
            for (batch,) in self.stateful.StatefulDataLoader(dataset, batch_sampler=other):
                seen += batch.tolist()
        assert sorted(seen) == list(range(60))

    def test_a_stateful_loader_of_each_rank_goes_on_exactly_on_as_many_ranks(self, tmp_path: Path) -> None:
        dataset = torch.utils.data.TensorDataset(torch.arange(40))
        first, other = (self.stateful.StatefulDataLoader(dataset, batch_size=4, shuffle=True) for _ in range(2))
        batches = iter(first)
        for _ in range(3):
            next(batches)
        shardckpt.save({"data": shardckpt.PerRank(first)}, str(tmp_path / "step"))
        shardckpt.load({"data": shardckpt.PerRank(other)}, str(tmp_path / "step"))
        assert [batch.tolist() for (batch,) in other] == [batch.tolist() for (batch,) in batches]
        for refused in run(2, load_on_other_ranks, str(tmp_path / "step")):
            assert "saved per rank, by another number of ranks" in refused

    def make(self, **options: Any) -> ElasticStreamLoader:
        def open_stream(stream: int, epoch: int) -> Any:
            source = self.nodes.IterableWrapper([{"a": 100 * stream + number} for number in range(7)])
            return self.nodes.Loader(source)

        return ElasticStreamLoader(open_stream, 6, 2, resume_by="state", **options)

    def test_nodes_are_streams_with_a_state(self) -> None:
        expected = read_steps(self.make(), 9)
        first = self.make()
        assert read_steps(first, 2) == expected[:2]
        assert resume(first, self.make, 3, 7) == expected[2:]
