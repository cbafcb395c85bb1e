"""Divide logical streams over ranks and workers, and store positions in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.errors import FormatError, UsageError, escape
from shardckpt.plan.data.positions import COUNT_LIMIT, DataPosition, InexactPositionError, require_count

_MAX_STREAMS = 1 << 20  # each has a position in memory and in the checkpoint


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
