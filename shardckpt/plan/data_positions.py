"""Data positions in a training run or in its streams, and what follows from them on any number of ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardckpt.errors import FormatError, UsageError, escape

COUNT_LIMIT = 1 << 62  # samples, epochs and batches are below it: positions are computed with 64 bits

_INTEGER_LIMIT = 1 << 128
_ORDER_CHARACTERS = 64

_MAX_STREAMS = 1 << 20  # each has a position in memory and in the checkpoint


@dataclass(frozen=True, order=True)
class DataPosition:
    """Position in a run's samples, valid for any number of ranks and any batch size.

    Attributes:
        epoch: Epoch number, from 0.
        consumed: Samples that were trained in this epoch.
    """

    epoch: int = 0
    consumed: int = 0

    def __str__(self) -> str:
        return f"sample {self.consumed} of epoch {self.epoch}"

    def to_plain(self) -> DataPosition:
        """Return the position with plain numbers, which a checkpoint can store.

        Raises:
            UsageError: A number is not an integer.
        """
        return DataPosition(require_integer("epoch", self.epoch), require_integer("consumed", self.consumed))


_COUNTS = ("epoch", "consumed", "unfinished", "samples")  # stored values that must be 0 or more


class InexactPositionError(UsageError):
    """A run cannot continue exactly from a position: samples would come twice, or be skipped.

    Args:
        what: Description of the error.
        nearest: The nearest position that can be continued exactly.
        fix: Action that resolves the error.
    """

    def __init__(self, what: str, *, nearest: DataPosition, fix: str) -> None:
        self.nearest = nearest
        super().__init__(what, fix=fix)


@dataclass(frozen=True)
class SavedPosition:
    """A sampler's position as stored, with the values that must be equal to continue exactly."""

    epoch: int
    consumed: int  # samples that completed steps trained in this epoch
    unfinished: int  # batches trained of a step that did not end: no checkpoint has their gradients
    samples: int  # samples in an epoch
    seed: int
    order: str

    @property
    def position(self) -> DataPosition:
        """The position after the last completed step."""
        return DataPosition(self.epoch, self.consumed)

    def to_state(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SavedPosition:
        """Check and convert plain values."""
        for each in fields(cls):
            value = state.get(each.name) if isinstance(state, Mapping) else None
            if not _is_stored_value(each.name, value):
                expected = "text" if each.name == "order" else "a number"
                raise FormatError(
                    f"{each.name} of a data position must be {expected}, got {escape(value)}",
                    fix="It is the state of another object.",
                )
        saved = cls(**{each.name: state[each.name] for each in fields(cls)})
        if saved.consumed > saved.samples:
            raise FormatError(f"a data position must be in its epoch of {saved.samples} samples, got {saved.position}")
        return saved

    def require_same_order(self, other: SavedPosition) -> None:
        """Require that a sampler has the same samples in the same order."""
        names = ("samples", "order") if self.order == other.order == "sequential" else ("samples", "order", "seed")
        differing = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != getattr(other, name)]
        # At the start of an epoch, every order continues exactly.
        if not self.consumed or not differing:
            return
        nearest = DataPosition(self.epoch + (2 * self.consumed >= self.samples))
        raise InexactPositionError(
            f"{self.position} was saved with {', '.join(differing)}, and the sampler orders samples differently",
            nearest=nearest,
            fix=f"Make the sampler with these values. The nearest exact place in the new order is {nearest}: restore "
            "without the sampler, and call its `move_to`.",
        )


@dataclass(frozen=True)
class BatchPlan:
    """Splits an epoch into steps, a step over ranks, and a rank's samples into batches."""

    # A step takes the next samples in order, at any number of ranks. Without `drop_last`, an epoch's last two steps
    # share the rest, so that neither has less than half of `batch_size`.

    samples: int
    batch_size: int
    accumulate: int = 1
    num_replicas: int = 1
    drop_last: bool = True

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "accumulate", "num_replicas"):
            require_count(name, getattr(self, name))
        parts = self.accumulate * self.num_replicas
        if not self.count_steps(0):
            fix = "Use a smaller batch, or drop_last=False."
            raise UsageError(f"batch_size {self.batch_size} leaves out all {self.samples} samples", fix=fix)
        if self.smallest_step(0) < parts:
            raise UsageError(
                f"a step of {self.smallest_step(0)} samples is too small for {self.num_replicas} ranks x "
                f"{self.accumulate} batches",
                fix="Use a larger batch_size, fewer ranks" + ("." if self.drop_last else ", or drop_last=True."),
            )

    def step_size(self, consumed: int) -> int:
        """Return how many samples the step after `consumed` samples has; 0 at the epoch's end."""
        left = self.samples - consumed
        if left >= 2 * self.batch_size or (self.drop_last and left >= self.batch_size):
            return self.batch_size
        if self.drop_last:
            return 0
        return left if left <= self.batch_size else (left + 1) // 2

    def count_steps(self, consumed: int) -> int:
        """Return how many steps follow `consumed` samples in an epoch."""
        left = max(self.samples - consumed, 0)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def smallest_step(self, consumed: int) -> int:
        """Return how many samples the smallest step after `consumed` samples has."""
        left = self.samples - consumed
        if left < self.batch_size:
            return self.step_size(consumed)
        rest = 0 if self.drop_last else left % self.batch_size
        return (self.batch_size + rest) // 2 if rest else self.batch_size

    def find_batch(self, consumed: int, batch: int, rank: int) -> range:
        """Return a rank's batch as places in the epoch's order."""
        start, stop = _divide(consumed, consumed + self.step_size(consumed), self.num_replicas, rank)
        return range(*_divide(start, stop, self.accumulate, batch))

    def go_to_next_step(self, position: DataPosition) -> DataPosition:
        """Return the position after the next step."""
        return self.skip_end(replace(position, consumed=position.consumed + self.step_size(position.consumed)))

    def skip_end(self, position: DataPosition) -> DataPosition:
        """Return the position, or the next epoch's start if this epoch has no step left."""
        return position if self.step_size(position.consumed) > 0 else DataPosition(position.epoch + 1)

    def require_parts(self, position: DataPosition) -> None:
        """Require samples for each rank in every batch after a position; `batch_size` may have changed."""
        left, smallest = self.samples - position.consumed, self.smallest_step(position.consumed)
        if left <= 0 or not self.step_size(position.consumed) or smallest >= self.accumulate * self.num_replicas:
            return
        nearest = DataPosition(position.epoch + 1)
        raise InexactPositionError(
            f"after {position}, {left} samples remain, with a step of {smallest}: too few for "
            f"{self.num_replicas} ranks x {self.accumulate} batches",
            nearest=nearest,
            fix=f"Resume with at most {max(smallest // self.accumulate, 1)} ranks, with accumulate=1, or with "
            f"drop_last=True. The nearest exact place for this topology is {nearest}: restore without the sampler, and "
            "call its `move_to`.",
        )


def require_count(name: str, value: object, limit: int = COUNT_LIMIT) -> int:
    """Return an integer from 1 to below `limit` as an `int`."""
    number = require_integer(name, value)
    if number < 1:
        raise UsageError(f"{name} must be 1 or more, got {number}")
    if number >= limit:
        raise UsageError(f"{name} must be below {limit}, got {number}")
    return number


def require_integer(name: str, value: object) -> int:
    """Return an integer as an `int`: a checkpoint cannot store NumPy's integers as positions."""
    try:
        number = int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name} must be an integer, got {escape(value)}") from None
    if abs(number) >= _INTEGER_LIMIT:
        raise UsageError(f"{name} must have at most 128 bits, got {escape(number)}")
    return number


def _is_stored_value(name: str, value: object) -> bool:
    """Return True if a stored value has the right type and size."""
    if name == "order":
        return type(value) is str and len(value) <= _ORDER_CHARACTERS
    if type(value) is not int:
        return False
    return 0 <= value < COUNT_LIMIT if name in _COUNTS else abs(value) < _INTEGER_LIMIT


def _divide(start: int, stop: int, parts: int, number: int) -> tuple[int, int]:
    """Return the start and end of part `number` if a range is split nearly equally."""
    size = stop - start
    return start + size * number // parts, start + size * (number + 1) // parts


@dataclass(frozen=True)
class StreamPosition:
    """Position in one stream."""

    epoch: int = 0  # each stream counts its own
    samples: int = 0  # trained in this epoch
    state: Any = None  # the iterable's state here; None if reading finds the place


@dataclass(frozen=True)
class StreamPlan:
    """Divides a fixed number of streams over ranks; a step takes one batch from every stream."""

    # Each rank has a range of streams, and reads one batch per step from each. So a step has the same samples at any
    # number of ranks that divides the number of streams.

    streams: int
    num_replicas: int = 1

    def __post_init__(self) -> None:
        require_count("streams", self.streams, _MAX_STREAMS + 1)
        require_count("num_replicas", self.num_replicas)
        if self.streams % self.num_replicas:
            fitting = [number for number in range(1, self.streams + 1) if not self.streams % number]
            below = max(number for number in fitting if number <= self.num_replicas)
            above = [number for number in fitting if number > self.num_replicas][:1]
            raise UsageError(
                f"{self.streams} streams cannot be divided evenly over {self.num_replicas} ranks",
                fix=f"Use {' or '.join(map(str, [below, *above]))} ranks; the number of streams is fixed in a run.",
            )

    @property
    def batches_per_step(self) -> int:
        """Batches that each rank trains per step."""
        return self.streams // self.num_replicas

    def find_streams(self, rank: int) -> range:
        """Return a rank's streams."""
        return range(rank * self.batches_per_step, (rank + 1) * self.batches_per_step)

    def choose_workers(self, most: int) -> int:
        """Return the largest number of workers that divides a rank's streams, at most `most`; 0 for no worker."""
        # A loader takes a batch from each worker in turn, so each needs the same number of streams.
        most = min(most, self.batches_per_step)
        return max((number for number in range(1, most + 1) if not self.batches_per_step % number), default=0)


@dataclass(frozen=True)
class SavedStreams:
    """Stored positions in streams, for one rank or all."""

    streams: int
    unfinished: int  # batches trained of a step that did not end
    positions: Mapping[int, StreamPosition]  # by stream number

    def to_state(self) -> dict[str, Any]:
        """Return the positions as plain values."""
        positions = {str(number): [at.epoch, at.samples, at.state] for number, at in self.positions.items()}
        return {"streams": self.streams, "unfinished": self.unfinished, "positions": positions}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SavedStreams:
        """Check and convert plain values."""
        try:
            streams, unfinished = _read_count(state["streams"]), _read_count(state["unfinished"])
            rows = {_read_stream(name, streams): row for name, row in state["positions"].items()}
            positions = {
                number: StreamPosition(_read_count(epoch), _read_count(samples), inner)
                for number, (epoch, samples, inner) in rows.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                "this is not the state of a stream loader", fix="It is the state of another object."
            ) from error
        return cls(streams, unfinished, positions)

    @classmethod
    def merge(cls, saved: Sequence[SavedStreams]) -> SavedStreams:
        """Merge the positions that all ranks saved."""
        counts = sorted({each.streams for each in saved})
        if len(counts) != 1:
            raise FormatError(f"ranks of one save have different numbers of streams: {counts}")
        positions: dict[int, StreamPosition] = {}
        for number, at in (pair for each in saved for pair in each.positions.items()):
            known = positions.setdefault(number, at)
            if (known.epoch, known.samples) != (at.epoch, at.samples):
                raise FormatError(f"ranks of one save have different positions in stream {number}")
        return cls(counts[0], max(each.unfinished for each in saved), positions)

    def select(self, plan: StreamPlan, rank: int) -> dict[int, StreamPosition]:
        """Return a rank's positions by stream."""
        if self.streams != plan.streams:
            nearest = DataPosition(min((at.epoch for at in self.positions.values()), default=0))
            raise InexactPositionError(
                f"positions in {self.streams} streams were saved, and the loader divides the data into {plan.streams}",
                nearest=nearest,
                fix=f"Make the loader with streams={self.streams}. The nearest exact place for other streams is "
                f"{nearest}: restore without the loader, and call its `move_to`.",
            )
        missing = [number for number in plan.find_streams(rank) if number not in self.positions]
        if missing:
            raise FormatError(
                f"rank {rank} misses its positions in streams {missing}",
                fix="If the data-parallel size changed on the same ranks, resume once with the saved size.",
            )
        return {number: self.positions[number] for number in plan.find_streams(rank)}


def _read_count(value: object) -> int:
    if type(value) is not int or not 0 <= value < COUNT_LIMIT:
        raise TypeError(f"{escape(value)} must be a number from 0")
    return value


def _read_stream(name: object, streams: int) -> int:
    """Parse a stream's number; only one spelling is valid, so that no position replaces another."""
    number = int(name) if isinstance(name, str) and len(name) <= len(str(streams)) else -1
    if not 0 <= number < streams or str(number) != name:
        raise ValueError(f"{escape(name)} must be a stream number below {streams}")
    return number
