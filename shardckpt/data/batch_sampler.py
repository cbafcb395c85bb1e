"""Batches of a map-style data set, which go on exactly on any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from shardckpt.errors import UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.plan.data.positions import BatchPlan, DataPosition, SavedPosition, require_count, require_integer
from shardckpt.plan.data.sample_order import SampleOrder

_BATCHES_AT_A_TIME = 16  # batches whose samples are looked up together


class _WorkerSeeds:
    """Generator that each iteration seeds again."""

    # Not an attribute of the sampler, since a witness compares the sampler's generators. A resumed job iterates from
    # another position, and so seeds it differently.

    def __init__(self) -> None:
        self.generator = torch.Generator()


class ElasticBatchSampler(Sampler[list[int]]):
    """Yield this rank's batches of a map-style data set, for `DataLoader(dataset, batch_sampler=...)`.

    The order of samples depends on the seed and the epoch only, and a step takes the next `batch_size` samples at any
    number of ranks. So a checkpoint needs the number of consumed samples, which is equal on every rank: put the
    sampler into the state. Another number of ranks, `batch_size` or `accumulate` continues at the same sample.

    Iterating does not change the position, because the workers of a loader run ahead: `advance` counts a batch that
    was trained. An iterator starts at the position, and ends with its epoch. Memory does not depend on the number of
    samples.

    Args:
        dataset: Data set, or its number of samples.
        batch_size: Samples of an optimizer step, of all ranks and accumulated batches together.
        accumulate: Batches of an optimizer step on each rank, whose gradients are accumulated.
        num_replicas: Number of ranks that split the samples; None for that of the default process group. With tensor
            or pipeline parallelism, the size of the data-parallel dimension.
        rank: This rank among them; None for that of the default process group.
        shuffle: Whether to shuffle the samples of each epoch.
        seed: Seed of the shuffle.
        drop_last: Whether samples that do not fill a last step are left out of the epoch. If not, the last two steps
            of an epoch share its rest, so that every rank has samples.

    Raises:
        UsageError: A number is too small, or a rank would have a batch without samples.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        accumulate: int = 1,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        samples = len(dataset) if isinstance(dataset, Sized) else require_integer("dataset", dataset)
        rank, num_replicas = find_replica(rank, num_replicas)
        self._rank = rank
        self._order = SampleOrder(samples, require_integer("seed", seed), shuffle)
        batch_size, accumulate = require_count("batch_size", batch_size), require_count("accumulate", accumulate)
        self._plan = BatchPlan(samples, batch_size, accumulate, num_replicas, drop_last)
        self._position, self._done = DataPosition(), 0
        self._worker_seeds = _WorkerSeeds()
        self._moves = 0
        self._exhausted: tuple[DataPosition, int] | None = None

    @property
    def position(self) -> DataPosition:
        """Position of the next step."""
        return self._position

    @property
    def generator(self) -> torch.Generator:
        """Generator for the `DataLoader`, which draws the seed of its workers from it.

        Each iteration seeds it by the rank and the position, so that workers of ranks differ and the training draws
        nothing.
        """
        return self._worker_seeds.generator

    @property
    def batches_left(self) -> int:
        """Number of batches until the step is complete."""
        return self._plan.accumulate - self._done

    @property
    def loss_weight(self) -> float:
        """Factor for the mean loss of the next batch of this rank.

        The gradients of a step, accumulated and averaged over ranks, are then those of the mean over its samples.
        """
        step = self._plan.step_size(self._position.consumed)
        return len(self._find_batch(self._position.consumed, self._done)) * self._plan.num_replicas / step

    def __len__(self) -> int:
        """Return the number of batches of a full epoch."""
        return self._plan.count_steps(0) * self._plan.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the batches from the position to the end of its epoch."""
        if self._exhausted == (self._position, self._done):
            warn_user(
                f"all batches behind {self._position} were read, and none was counted: call `advance` after each batch",
            )
        self.generator.manual_seed(derive_seed(self._order.seed, self._rank, self._position))
        return self._iterate(self._position, self._done, self._moves)

    def _iterate(self, position: DataPosition, done: int, moves: int) -> Iterator[list[int]]:
        places = itertools.islice(self._find_places(position.consumed), done, None)
        while parts := list(itertools.islice(places, _BATCHES_AT_A_TIME)):
            for batch in self._order.take(position.epoch, parts):
                if moves != self._moves:
                    raise UsageError(
                        f"the position was changed to {self._position} while a loader was iterating from {position}",
                        fix="Make a new iterator of the loader after a load.",
                    )
                yield batch
        self._exhausted = (position, done)

    def _find_places(self, consumed: int) -> Iterator[range]:
        """Yield the places of this rank's batches, from a step to the end of the epoch."""
        while size := self._plan.step_size(consumed):
            yield from (self._find_batch(consumed, number) for number in range(self._plan.accumulate))
            consumed += size

    def _find_batch(self, consumed: int, batch: int) -> range:
        return self._plan.find_batch(consumed, batch, self._rank)

    def advance(self) -> bool:
        """Count a batch of this rank as trained.

        Returns:
            Whether the batch completed its step, so that the optimizer is due.
        """
        self._done = (self._done + 1) % self._plan.accumulate
        if self._done:
            return False
        self._position = self._plan.go_to_next_step(self._position)
        return True

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the position is in that epoch.

        Epochs follow each other without this call, which frameworks make.

        Args:
            epoch: Number of the epoch.

        Raises:
            UsageError: The epoch is over, or not an integer.
        """
        epoch = require_integer("epoch", epoch)
        if epoch < self._position.epoch:
            raise UsageError(
                f"epoch {epoch} is over, the position is {self._position}",
                fix=f"Begin the loop over epochs with {self._position.epoch}; `move_to` goes back.",
            )
        if epoch > self._position.epoch:
            self.move_to(DataPosition(epoch))

    def move_to(self, position: DataPosition) -> None:
        """Go to a position.

        Args:
            position: Position of the next step.

        Raises:
            UsageError: The data set has no such position.
            InexactPositionError: A rank would have a batch without samples.
        """
        position = position.to_plain()
        if position.epoch < 0 or not 0 <= position.consumed <= self._plan.samples:
            raise UsageError(f"a position must be in an epoch of {self._plan.samples} samples, got {position}")
        self._plan.require_parts(position)
        self._position, self._done = self._plan.skip_end(position), 0
        self._exhausted = None
        self._moves += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the last completed step: plain values, equal on every rank."""
        return self._describe().to_state()

    def _describe(self) -> SavedPosition:
        at, order = self._position, self._order
        return SavedPosition(at.epoch, at.consumed, self._done, order.samples, order.seed, order.name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, on any number of ranks.

        If it was saved in the middle of an accumulation, the batches of the unfinished step come again, with a warning:
        their gradients are in no checkpoint.

        Args:
            state: Result of `state_dict`.

        Raises:
            FormatError: The state is not that of a sampler.
            InexactPositionError: The data set, the seed or the order differs in the middle of an epoch, or a rank would
                have a batch without samples. The error contains the nearest position that can be continued.
        """
        saved = SavedPosition.from_state(state)
        saved.require_same_order(self._describe())
        self.move_to(saved.position)
        if saved.unfinished:
            warn_user(
                f"the position was saved in the middle of an accumulation, {saved.unfinished} batches behind "
                f"{saved.position}; training goes on there, the nearest exact place, with these batches again",
            )


def derive_seed(*values: object) -> int:
    """Return a seed for generators of torch that depends on values, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little") >> 1


def find_replica(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Return this rank and the number of ranks that split the samples."""
    has_group = dist.is_available() and dist.is_initialized()
    if num_replicas is None:
        num_replicas = dist.get_world_size() if has_group else 1
    if rank is None:
        rank = dist.get_rank() if has_group else 0
    rank, num_replicas = require_integer("rank", rank), require_count("num_replicas", num_replicas)
    if not 0 <= rank < num_replicas:
        raise UsageError(f"rank must be from 0 to {num_replicas - 1}, got {rank}")
    return rank, num_replicas
