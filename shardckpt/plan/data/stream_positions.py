"""Division of logical streams over ranks and workers, and positions in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.errors import FormatError, UsageError, escape
from shardckpt.plan.data.positions import COUNT_LIMIT, DataPosition, InexactPositionError, require_count

_MOST_STREAMS = 1 << 20  # each has a position in memory and in the checkpoint


@dataclass(frozen=True)
class StreamPosition:
    """Position in one stream."""

    epoch: int = 0  # number of the stream's epoch
    samples: int = 0  # number of samples of the epoch that were trained
    state: Any = None  # state of the iterable at this place; None if it is found by reading


@dataclass(frozen=True)
class StreamPlan:
    """Division of a fixed number of streams over ranks: a step takes one batch of every stream."""

    # Each rank has a range of streams, and one batch a step for each of them. So a step has the same samples at any
    # number of ranks that divides the number of streams.

    streams: int
    num_replicas: int = 1

    def __post_init__(self) -> None:
        require_count("streams", self.streams, _MOST_STREAMS + 1)
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
        """Number of batches of a rank in a step."""
        return self.streams // self.num_replicas

    def find_streams(self, rank: int) -> range:
        """Return the streams of a rank."""
        return range(rank * self.batches_per_step, (rank + 1) * self.batches_per_step)

    def choose_workers(self, most: int) -> int:
        """Return the largest number of workers that divides a rank's streams, at most `most`; 0 for no worker."""
        # A loader takes a batch of each worker in turn, so each needs the same number of streams.
        most = min(most, self.batches_per_step)
        return max((number for number in range(1, most + 1) if not self.batches_per_step % number), default=0)


@dataclass(frozen=True)
class SavedStreams:
    """Positions in streams as a checkpoint stores them, of one rank or of all."""

    streams: int
    unfinished: int  # batches of the next step that were trained without its end
    positions: Mapping[int, StreamPosition]  # position in each stream, by its number

    def to_state(self) -> dict[str, Any]:
        """Return the positions as plain values."""
        positions = {str(number): [at.epoch, at.samples, at.state] for number, at in self.positions.items()}
        return {"streams": self.streams, "unfinished": self.unfinished, "positions": positions}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SavedStreams:
        """Return the positions of plain values."""
        try:
            streams, unfinished = _read_count(state["streams"]), _read_count(state["unfinished"])
            rows = {_read_stream(name, streams): row for name, row in state["positions"].items()}
            positions = {
                number: StreamPosition(_read_count(epoch), _read_count(samples), inner)
                for number, (epoch, samples, inner) in rows.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(
                "this is not the state of a stream loader", fix="It is that of another object."
            ) from error
        return cls(streams, unfinished, positions)

    @classmethod
    def merge(cls, saved: Sequence[SavedStreams]) -> SavedStreams:
        """Return the positions of all ranks."""
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
        """Return the positions of a rank's streams."""
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
                f"the positions in streams {missing} of rank {rank} are missing",
                fix="If the data-parallel size changed on as many ranks, resume once with the size of the save.",
            )
        return {number: self.positions[number] for number in plan.find_streams(rank)}


def _read_count(value: object) -> int:
    if type(value) is not int or not 0 <= value < COUNT_LIMIT:
        raise TypeError(f"{escape(value)} must be a number from 0")
    return value


def _read_stream(name: object, streams: int) -> int:
    """Return the number of a stream; each has one name, so that no other position replaces its own."""
    number = int(name) if isinstance(name, str) and len(name) <= len(str(streams)) else -1
    if not 0 <= number < streams or str(number) != name:
        raise ValueError(f"{escape(name)} must be the number of one of {streams} streams")
    return number
