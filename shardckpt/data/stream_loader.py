"""Batches from iterable data, which continue exactly if the number of ranks divides the number of streams."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from shardckpt.checkpoint.stateful.stateful import PerRank, Stateful
from shardckpt.data.batch_sampler import derive_seed, find_replica
from shardckpt.errors import UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.plan.data_positions import (
    DataPosition,
    SavedStreams,
    StreamPlan,
    StreamPosition,
    require_count,
    require_integer,
)

OpenStream = Callable[[int, int], Iterable[Any]]  # opens a stream: its number and its epoch to an iterable of samples

ResumeBy = Literal["reading", "state"]


class ElasticStreamLoader(PerRank):
    """Load batches from iterable data, divided into a fixed number of logical streams.

    A step takes one batch from every stream. So it has the same samples on any number of ranks that divides `streams`.
    A rank has `batches_per_step` batches, and accumulates their gradients. With fewer ranks, each has more batches per
    step, with the same size. Choose a number with many divisors, such as 48. Put the loader into the state: each rank
    saves the positions in its streams.

    Streams never end: after its last sample, a stream starts its next epoch, even within a batch. In each epoch, a
    stream has every sample exactly once.

    Workers run ahead, and send the position with each batch; `advance` counts a trained batch.

    Args:
        open_stream: Returns an iterable over samples for a stream's number, below `streams`, and an epoch. Every call
            must give the same samples in the same order. It is called in workers.
        streams: Number of streams, which cannot change in a run.
        batch_size: Samples in a batch; a step has `streams` times as many.
        num_workers: Maximum worker processes; the largest number that divides this rank's streams is used.
        resume_by: How a stream gets to a position within an epoch. "reading" reads and drops the samples before it;
            "state" calls the iterable's `load_state_dict`, whose `state_dict` has to be exact.
        collate_fn: Makes a batch from a list of samples; None for torch's.
        num_replicas: Number of ranks that divide the streams; None for the default process group's size.
        rank: This rank among them; None for the rank in the default process group.
        **options: Further `DataLoader` options, such as `pin_memory`, `prefetch_factor`, `multiprocessing_context`.

    Raises:
        UsageError: A number is too small, or the streams cannot be divided evenly over the ranks.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        streams: int,
        batch_size: int,
        *,
        num_workers: int = 0,
        resume_by: ResumeBy = "reading",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(self)
        batch_size, num_workers = require_count("batch_size", batch_size), require_integer("num_workers", num_workers)
        if resume_by not in ("reading", "state"):
            raise UsageError(f'resume_by must be "reading" or "state", got {resume_by!r}')
        if num_workers < 0:
            raise UsageError(f"num_workers must be 0 or more, got {num_workers}")
        self._rank, num_replicas = find_replica(rank, num_replicas)
        self._plan = StreamPlan(require_integer("streams", streams), num_replicas)
        self._source = _StreamSource(open_stream, batch_size, collate_fn or default_collate, resume_by == "state")
        self._options = {"num_workers": self._plan.choose_workers(num_workers), **options}
        self._positions = dict.fromkeys(self._plan.find_streams(self._rank), StreamPosition())
        self._read: deque[tuple[int, StreamPosition]] = deque()
        self._trained: dict[int, StreamPosition] = {}
        self._moves = 0

    @property
    def batches_per_step(self) -> int:
        """This rank's batches in a step."""
        return self._plan.batches_per_step

    @property
    def batches_left(self) -> int:
        """Batches until the step is complete."""
        return self._plan.batches_per_step - len(self._trained)

    @property
    def loss_weight(self) -> float:
        """Factor for a batch's mean loss; a step's gradients then come from the mean over all its samples."""
        return 1 / self._plan.batches_per_step

    @property
    def positions(self) -> dict[int, tuple[int, int]]:
        """Epoch and trained samples for each stream on this rank, after the last completed step."""
        return {number: (at.epoch, at.samples) for number, at in self._positions.items()}

    def __iter__(self) -> Iterator[Any]:
        """Return an endless iterator over the batches after the last completed step."""
        self._restart()
        return self._iterate(self._moves)

    def _restart(self) -> None:
        """Forget batches that did not complete a step, and end iterators."""
        self._read.clear()
        self._trained.clear()
        self._moves += 1

    def _iterate(self, moves: int) -> Iterator[Any]:
        dataset = _StreamDataset(self._source, self._positions)
        # Workers' seeds are drawn from it: not from the training's generator, and different on each rank.
        generator = torch.Generator().manual_seed(derive_seed(self._rank, self.positions))
        loader = DataLoader(dataset, batch_size=None, collate_fn=_keep, generator=generator, **self._options)
        for batch in loader:
            if moves != self._moves:
                raise UsageError(
                    "the position was changed while the loader was iterating",
                    fix="Make a new iterator of the loader after a load, and use one at a time.",
                )
            self._read.append((batch.stream, batch.position))
            yield batch.data

    def advance(self) -> bool:
        """Count the oldest uncounted batch as trained.

        Returns:
            Whether the batch completed its step: update the optimizer then.

        Raises:
            UsageError: All batches that were read are counted.
        """
        if not self._read:
            raise UsageError("`advance` counts a batch that the loader gave, and all of them are counted")
        stream, position = self._read.popleft()
        self._trained[stream] = position
        if self.batches_left:
            return False
        self._positions.update(self._trained)
        self._trained.clear()
        return True

    def move_to(self, position: DataPosition) -> None:
        """Go to the start of an epoch in every stream.

        Args:
            position: Position with no consumed samples.

        Raises:
            UsageError: The position is within an epoch: streams have different numbers of samples.
        """
        position = position.to_plain()
        if position.consumed or position.epoch < 0:
            raise UsageError(f"streams can only go to an epoch's start, got {position}")
        self._positions = dict.fromkeys(self._positions, StreamPosition(position.epoch))
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the positions in this rank's streams after the last completed step: plain values."""
        return SavedStreams(self._plan.streams, len(self._trained), self._positions).to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the positions that this rank saved, with the same number of ranks.

        Args:
            state: Result of `state_dict`.

        Raises:
            FormatError: The state does not come from a loader with these streams.
            InexactPositionError: The number of streams differs.
        """
        self._load(SavedStreams.from_state(state))

    def load_other_world(self, states: list[Any], rank: int, world: int) -> bool:
        """Go to the positions that another number of ranks saved. For the arguments see `PerRank`."""
        del rank, world  # in the process group; fewer ranks may divide the streams
        self._load(SavedStreams.merge([SavedStreams.from_state(state) for state in states]))
        return True

    def _load(self, saved: SavedStreams) -> None:
        self._positions = saved.select(self._plan, self._rank)
        self._restart()
        if saved.unfinished:
            warn_user(
                f"the loader was saved within a step, after {saved.unfinished} of its batches; training continues at "
                "the step's start, the nearest exact place, and these batches come again",
            )


class _StreamSource(NamedTuple):
    """Function that opens streams, and settings for their batches."""

    open_stream: OpenStream
    batch_size: int
    collate: Callable[[list[Any]], Any]
    has_state: bool


class _StreamBatch(NamedTuple):
    """A batch, its stream, and the position after it."""

    stream: int
    position: StreamPosition
    data: Any


def _keep(batch: Any) -> Any:
    """Return a batch that a stream has already made."""
    return batch


class _StreamDataset(IterableDataset[_StreamBatch]):
    """Batches from a rank's streams in turn; each of n workers has every n-th stream."""

    def __init__(self, source: _StreamSource, positions: Mapping[int, StreamPosition]) -> None:
        self._source, self._positions = source, dict(positions)

    def __iter__(self) -> Iterator[_StreamBatch]:
        worker = get_worker_info()
        numbers: Sequence[int] = sorted(self._positions)
        own = numbers if worker is None else numbers[worker.id :: worker.num_workers]
        streams = [_StreamReader(self._source, number, self._positions[number]) for number in own]
        for stream in itertools.cycle(streams):
            yield stream.read_batch()


class _StreamReader:
    """One stream, read from a position."""

    def __init__(self, source: _StreamSource, number: int, position: StreamPosition) -> None:
        self._source, self._number = source, number
        self._epoch, self._samples = position.epoch, position.samples
        self._open(position)

    def _open(self, position: StreamPosition) -> None:
        opened = self._source.open_stream(self._number, position.epoch)
        self._stateful = _require_stateful(opened) if self._source.has_state else None
        is_by_state = self._stateful is not None and position.state is not None
        if self._stateful is not None and is_by_state:
            self._stateful.load_state_dict(position.state)
        self._samples_left = iter(opened)
        to_skip = 0 if is_by_state else position.samples
        skipped = sum(1 for _ in itertools.islice(self._samples_left, to_skip))
        if skipped < to_skip:
            raise UsageError(
                f"stream {self._number} has {skipped} samples in epoch {position.epoch}, and {to_skip} were trained",
                fix="`open_stream` must return the same samples at each call.",
            )

    def read_batch(self) -> _StreamBatch:
        """Return the next batch, which may start the next epoch."""
        samples: list[Any] = []
        while len(samples) < self._source.batch_size:
            found = list(itertools.islice(self._samples_left, self._source.batch_size - len(samples)))
            samples += found
            self._samples += len(found)
            if not found:
                self._start_epoch()
        state = None if self._stateful is None else self._stateful.state_dict()
        position = StreamPosition(self._epoch, self._samples, state)
        return _StreamBatch(self._number, position, self._source.collate(samples))

    def _start_epoch(self) -> None:
        if not self._samples:
            raise UsageError(f"stream {self._number} has no samples in epoch {self._epoch}")
        self._epoch, self._samples = self._epoch + 1, 0
        self._open(StreamPosition(self._epoch))


def _require_stateful(opened: object) -> Stateful:
    if not isinstance(opened, Stateful):
        raise UsageError(
            f'with resume_by="state", streams must have `state_dict` and `load_state_dict`, got {type(opened).__name__}'
        )
    return opened


class DatasetStreams:
    """Streams from a `datasets.IterableDataset`, for `ElasticStreamLoader(DatasetStreams(dataset, 48), 48, ...)`.

    Each stream has `num_shards / streams` shards. Every loader worker can read any of them, which the data set itself
    does not allow. `set_epoch` is called for each epoch, so that shuffles differ.

    With `resume_by="state"`, the data set's `state_dict` finds a place without reading. It lacks the shuffle buffer, so
    samples in the buffer would be lost. With `shuffle(buffer_size=...)` use `resume_by="reading"`, the default.

    Args:
        dataset: Data set with `num_shards` and `shard`.
        streams: Number of streams.

    Raises:
        UsageError: The data set has too few shards.
    """

    def __init__(self, dataset: Any, streams: int) -> None:
        if dataset.num_shards < streams:
            raise UsageError(
                f"{streams} streams need as many shards, and the data set has {dataset.num_shards}",
                fix="Use fewer streams, or `to_iterable_dataset(num_shards=...)`.",
            )
        self._dataset, self._streams = dataset, streams

    def __call__(self, stream: int, epoch: int) -> _DatasetExamples:
        """Open a stream.

        Args:
            stream: Number of the stream.
            epoch: Number of the epoch.
        """
        part = self._dataset.shard(num_shards=self._streams, index=stream)
        part.set_epoch(epoch)
        return _DatasetExamples(part)


class _DatasetExamples:
    """Examples from a data set, whose own iterator would divide them over the loader's workers again."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the examples."""
        for batch in self._dataset.iter(batch_size=1):
            yield {name: values[0] for name, values in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last example."""
        state: dict[str, Any] = self._dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration at a state."""
        self._dataset.load_state_dict(state)
