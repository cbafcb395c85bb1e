"""Batches from a map-style data set, which continue exactly on any number of ranks, in an order that a seed gives."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from shardckpt.errors import UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.plan.data_positions import BatchPlan, DataPosition, SavedPosition, require_count, require_integer

_BATCHES_AT_A_TIME = 16  # batches whose samples are looked up together

_Indices = np.ndarray[Any, np.dtype[np.int64]]

# Names in stored positions; another algorithm needs another name.
_SHUFFLED, _SEQUENTIAL = "swap-or-not-32", "sequential"

_ROUNDS = 32
_MAX_SAMPLES = 1 << 62
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(63))


class _WorkerSeeds:
    """Generator that each iteration seeds again."""

    # Not an attribute of the sampler, since a witness compares the sampler's generators. A resumed job iterates from
    # another position, and so seeds it differently.

    def __init__(self) -> None:
        self.generator = torch.Generator()


class ElasticBatchSampler(Sampler[list[int]]):
    """Yield this rank's batches from a map-style data set, for `DataLoader(dataset, batch_sampler=...)`.

    The order of samples depends on the seed and the epoch only, and a step takes the next `batch_size` samples on any
    number of ranks. So a checkpoint needs only the number of consumed samples, which is equal on every rank: put the
    sampler into the state. Training continues at the same sample after a change of ranks, `batch_size` or `accumulate`.

    Iterating does not change the position, because loader workers run ahead: `advance` counts a trained batch. An
    iterator starts at the position, and ends with its epoch. Memory does not depend on the number of samples.

    Args:
        dataset: Data set, or its number of samples.
        batch_size: Samples in an optimizer step, over all ranks and accumulated batches.
        accumulate: Batches in an optimizer step on each rank, whose gradients are accumulated.
        num_replicas: Number of ranks that split the samples; None for the default process group's size. With tensor or
            pipeline parallelism, the size of the data-parallel dimension.
        rank: This rank among them; None for the rank in the default process group.
        shuffle: Whether to shuffle the samples in each epoch.
        seed: Seed for the shuffle.
        drop_last: Whether to leave out samples that do not fill a last step. Otherwise the last two steps in an epoch
            share its rest, and every rank has samples.

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
        """The next step's position."""
        return self._position

    @property
    def generator(self) -> torch.Generator:
        """Generator for the `DataLoader`, which draws its workers' seed from it.

        Each iteration seeds it by rank and position: workers on different ranks differ, and the training's own
        generators are not used.
        """
        return self._worker_seeds.generator

    @property
    def batches_left(self) -> int:
        """Batches until the step is complete."""
        return self._plan.accumulate - self._done

    @property
    def loss_weight(self) -> float:
        """Factor for the mean loss over this rank's next batch.

        With it, a step's gradients, accumulated and averaged over ranks, come from the mean over all its samples.
        """
        step = self._plan.step_size(self._position.consumed)
        return len(self._find_batch(self._position.consumed, self._done)) * self._plan.num_replicas / step

    def __len__(self) -> int:
        """Return the number of batches in a full epoch."""
        return self._plan.count_steps(0) * self._plan.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the batches from the position to the end of the epoch."""
        if self._exhausted == (self._position, self._done):
            warn_user(
                f"all batches after {self._position} were read, and none was counted: call `advance` after each batch",
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
        """Yield where this rank's batches are, from a step to the end of the epoch."""
        while size := self._plan.step_size(consumed):
            yield from (self._find_batch(consumed, number) for number in range(self._plan.accumulate))
            consumed += size

    def _find_batch(self, consumed: int, batch: int) -> range:
        return self._plan.find_batch(consumed, batch, self._rank)

    def advance(self) -> bool:
        """Count one batch on this rank as trained.

        Returns:
            Whether the batch completed its step: update the optimizer then.
        """
        self._done = (self._done + 1) % self._plan.accumulate
        if self._done:
            return False
        self._position = self._plan.go_to_next_step(self._position)
        return True

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the position is in that epoch.

        Frameworks call this; without it, epochs follow each other.

        Args:
            epoch: Number of the epoch.

        Raises:
            UsageError: The epoch is over, or not an integer.
        """
        epoch = require_integer("epoch", epoch)
        if epoch < self._position.epoch:
            raise UsageError(
                f"epoch {epoch} is over, the position is {self._position}",
                fix=f"Start the loop over epochs at {self._position.epoch}; `move_to` goes back.",
            )
        if epoch > self._position.epoch:
            self.move_to(DataPosition(epoch))

    def move_to(self, position: DataPosition) -> None:
        """Go to a position.

        Args:
            position: The next step's position.

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
        """Return the position after the last completed step: plain values, equal on every rank."""
        return self._describe().to_state()

    def _describe(self) -> SavedPosition:
        at, order = self._position, self._order
        return SavedPosition(at.epoch, at.consumed, self._done, order.samples, order.seed, order.name)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, on any number of ranks.

        If it was saved during an accumulation, the unfinished step's batches come again, with a warning: no checkpoint
        has their gradients.

        Args:
            state: Result of `state_dict`.

        Raises:
            FormatError: The state does not come from a sampler.
            InexactPositionError: The data set, the seed or the order differs within an epoch, or a rank would have a
                batch without samples. The error contains the nearest position from which training can continue.
        """
        saved = SavedPosition.from_state(state)
        saved.require_same_order(self._describe())
        self.move_to(saved.position)
        if saved.unfinished:
            warn_user(
                f"the position was saved during an accumulation, {saved.unfinished} batches after {saved.position}; "
                "training continues there, the nearest exact place, and these batches come again",
            )


def derive_seed(*values: object) -> int:
    """Return a seed for torch's generators that depends on values, the same in every process."""
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


@dataclass(frozen=True)
class SampleOrder:
    """Each epoch's order; it depends only on these values and the epoch."""

    # The shuffle is swap-or-not (Hoang, Morris, Rogaway 2012) with 32 rounds. Each place is computed by itself, so no
    # permutation is in memory. It is specified here, so every torch version gives the same order.

    samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.samples < _MAX_SAMPLES:
            raise UsageError(f"the number of samples must be from 1 to 2**62, got {self.samples}")

    @property
    def name(self) -> str:
        """Name in stored positions."""
        return _SHUFFLED if self.shuffle else _SEQUENTIAL

    def take(self, epoch: int, parts: Sequence[range]) -> list[list[int]]:
        """Return sample indices for ranges of places in an epoch's order."""
        places = np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in parts])
        found = _shuffle(places, self.samples, self.seed, epoch) if self.shuffle else places
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return [batch.tolist() for batch in np.split(found, ends)]


def _shuffle(places: _Indices, samples: int, seed: int, epoch: int) -> _Indices:
    """Apply an epoch's permutation to places."""
    for pivot, key in _derive_keys(samples, seed, epoch):
        partners = pivot - places
        partners[partners < 0] += samples
        places = np.where(_toss(np.maximum(places, partners), key), partners, places)
    return places


@lru_cache(maxsize=8)
def _derive_keys(samples: int, seed: int, epoch: int) -> list[tuple[int, np.uint64]]:
    """Return each round's pivot and key."""
    stream = hashlib.shake_128(f"shardckpt {samples} {seed} {epoch}".encode()).digest(16 * _ROUNDS)
    keys = np.frombuffer(stream, "<u8").reshape(_ROUNDS, 2)
    return list(zip((keys[:, 0] % np.uint64(samples)).tolist(), keys[:, 1], strict=True))


def _toss(places: _Indices, key: np.uint64) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return one random bit for each place: the top bit of splitmix64's output."""
    mixed = places.astype(np.uint64) ^ key
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX[1]
    tossed: np.ndarray[Any, np.dtype[np.bool_]] = (mixed >> _SHIFTS[2]).astype(np.bool_)
    return tossed
