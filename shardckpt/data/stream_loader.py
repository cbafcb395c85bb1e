"""Batches of iterable data, which go on exactly on any number of ranks that divides the number of streams."""

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
from shardckpt.plan.data.positions import DataPosition, require_count, require_integer
from shardckpt.plan.data.stream_positions import SavedStreams, StreamPlan, StreamPosition

OpenStream = Callable[[int, int], Iterable[Any]]  # opens a stream: its number and its epoch to an iterable of samples

ResumeBy = Literal["reading", "state"]


class ElasticStreamLoader(PerRank):
    """Load batches of iterable data, divided into a fixed number of logical streams.

    A step takes one batch of every stream, so it has the same samples at any number of ranks that divides `streams`. A
    rank has `batches_per_step` of them, whose gradients it accumulates. On fewer ranks each has more batches a step, of
    the same size. Choose a number with many divisors, such as 48. Put the loader into the state: each rank saves
    the positions in its streams.

    Streams never end: behind its last sample, a stream begins its next epoch, also within a batch. In each epoch of a
    stream no sample comes twice and none is missing.

    Workers run ahead, and send the position with each batch; `advance` counts a batch that was trained.

    Args:
        open_stream: Called with the number of a stream, below `streams`, and the epoch; returns an iterable of samples,
            the same ones in the same order at each call. It is called in workers.
        streams: Number of streams, which cannot change in a run.
        batch_size: Number of samples of a batch; a step has `streams` times as many.
        num_workers: Most worker processes; the largest number that divides the streams of this rank is used.
        resume_by: How a stream gets to a position within an epoch: "reading" reads and drops the samples before it,
            "state" calls `load_state_dict` of the iterable, whose `state_dict` has to be exact.
        collate_fn: Makes a batch of a list of samples; None for torch's.
        num_replicas: Number of ranks that divide the streams; None for that of the default process group.
        rank: This rank among them; None for that of the default process group.
        **options: Further options of `DataLoader`, such as `pin_memory`, `prefetch_factor`, `multiprocessing_context`.

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
        """Number of batches of this rank in a step."""
        return self._plan.batches_per_step

    @property
    def batches_left(self) -> int:
        """Number of batches until the step is complete."""
        return self._plan.batches_per_step - len(self._trained)

    @property
    def loss_weight(self) -> float:
        """Factor for the mean loss of a batch; the gradients of a step are then those of the mean over its samples."""
        return 1 / self._plan.batches_per_step

    @property
    def positions(self) -> dict[int, tuple[int, int]]:
        """Epoch and number of trained samples of each stream of this rank, at the last completed step."""
        return {number: (at.epoch, at.samples) for number, at in self._positions.items()}

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the batches behind the last completed step, without an end."""
        self._restart()
        return self._iterate(self._moves)

    def _restart(self) -> None:
        """Forget batches that did not complete a step, and end iterators."""
        self._read.clear()
        self._trained.clear()
        self._moves += 1

    def _iterate(self, moves: int) -> Iterator[Any]:
        dataset = _StreamDataset(self._source, self._positions)
        # The seed of the workers is drawn from it: not from the training's, and another one on each rank.
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
        """Count the oldest batch that was not counted yet as trained.

        Returns:
            Whether the batch completed its step, so that the optimizer is due.

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
        """Go to the beginning of an epoch of every stream.

        Args:
            position: Position with no consumed samples.

        Raises:
            UsageError: The position is within an epoch: streams have different numbers of samples.
        """
        position = position.to_plain()
        if position.consumed or position.epoch < 0:
            raise UsageError(f"streams can go to the beginning of an epoch, got {position}")
        self._positions = dict.fromkeys(self._positions, StreamPosition(position.epoch))
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the positions in this rank's streams at the last completed step: plain values."""
        return SavedStreams(self._plan.streams, len(self._trained), self._positions).to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the positions that this rank saved, of as many ranks.

        Args:
            state: Result of `state_dict`.

        Raises:
            FormatError: The state is not that of a loader of these streams.
            InexactPositionError: The number of streams differs.
        """
        self._load(SavedStreams.from_state(state))

    def load_other_world(self, states: list[Any], rank: int, world: int) -> bool:
        """Go to the positions that another number of ranks saved. For the arguments see `PerRank`."""
        del rank, world  # those of the process group; the streams may be divided over fewer
        self._load(SavedStreams.merge([SavedStreams.from_state(state) for state in states]))
        return True

    def _load(self, saved: SavedStreams) -> None:
        self._positions = saved.select(self._plan, self._rank)
        self._restart()
        if saved.unfinished:
            warn_user(
                f"the loader was saved in the middle of a step, behind {saved.unfinished} of its batches; training "
                "goes on at the beginning of the step, the nearest exact place, with these batches again",
            )


class _StreamSource(NamedTuple):
    """Function that opens streams, and settings of their batches."""

    open_stream: OpenStream
    batch_size: int
    collate: Callable[[list[Any]], Any]
    has_state: bool


class _StreamBatch(NamedTuple):
    """A batch, the stream that it is of, and the position behind it."""

    stream: int
    position: StreamPosition
    data: Any


def _keep(batch: Any) -> Any:
    """Return what a stream made a batch of already, as it is."""
    return batch


class _StreamDataset(IterableDataset[_StreamBatch]):
    """Batches of a rank's streams in turn; a worker has every n-th of them, where n is the number of workers."""

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
    """One stream, read from a position on."""

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
        """Return the next batch, which may begin the next epoch."""
        samples: list[Any] = []
        while len(samples) < self._source.batch_size:
            found = list(itertools.islice(self._samples_left, self._source.batch_size - len(samples)))
            samples += found
            self._samples += len(found)
            if not found:
                self._begin_epoch()
        state = None if self._stateful is None else self._stateful.state_dict()
        position = StreamPosition(self._epoch, self._samples, state)
        return _StreamBatch(self._number, position, self._source.collate(samples))

    def _begin_epoch(self) -> None:
        if not self._samples:
            raise UsageError(f"stream {self._number} has no samples in epoch {self._epoch}")
        self._epoch, self._samples = self._epoch + 1, 0
        self._open(StreamPosition(self._epoch))


def _require_stateful(opened: object) -> Stateful:
    if not isinstance(opened, Stateful):
        raise UsageError(
            'with resume_by="state", streams must have `state_dict` and `load_state_dict`, got an object of the class '
            f"{type(opened).__name__}"
        )
    return opened
