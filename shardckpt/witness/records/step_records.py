"""Records of training steps: digests that a resume has to reproduce.

Each rank's value is an unsigned number: a digest, or a float's bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal, NamedTuple

from shardckpt.divergence import Rank
from shardckpt.encodings.typed_json import JsonForm, must_be


def _from_hex(value: object) -> float:
    try:
        number = float.fromhex(value) if isinstance(value, str) else -1.0
    except (ValueError, OverflowError):
        number = -1.0
    if not number >= 0.0:
        raise must_be("a number from 0 in hexadecimal digits", value)
    return number


StepNumber = Annotated[int, range(10**18)]
HexFloat = Annotated[float, JsonForm(_from_hex, float.hex)]
RankValues = tuple[int, ...]  # one number per rank, in rank order

# Part of a state that a name belongs to: `unsaved` buffers are not saved, `state` is all else that the user saves.
Part = Literal["parameter", "buffer", "optimizer", "schedule", "state", "unsaved"]

NO_FLOAT = 0x7FF8_0000_0000_DEAD  # NaN bits for a value that a rank does not have

_MASK = (1 << 32) - 1


def float_bits(value: float) -> int:
    """Return a float's bits as an unsigned number."""
    return int.from_bytes(struct.pack("<d", value), "little")


def from_bits(bits: int) -> float:
    """Invert `float_bits`."""
    (value,) = struct.unpack("<d", bits.to_bytes(8, "little"))
    return float(value)


@dataclass(frozen=True, slots=True)
class BatchDigests:
    """Digests over one step's batch."""

    ordered: RankValues  # each rank's digest over its samples, in their order
    multisets: RankValues  # each rank's sum of sample digests, equal in any order
    counts: RankValues  # samples per rank
    samples: tuple[RankValues, ...] = ()  # each rank's sample digests, in order; empty for large batches

    @property
    def total(self) -> tuple[int, int]:
        """Sample count over all ranks, and their digest in any order."""
        return sum(self.counts), sum(self.multisets) & _MASK

    def join_ranks(self) -> BatchDigests:
        """Return the same samples as one rank's batch, without an order."""
        count, digest = self.total
        return BatchDigests((0,), (digest,), (count,), (self.all_samples,) if self.samples else ())

    @property
    def all_samples(self) -> tuple[int, ...]:
        """All ranks' sample digests."""
        return tuple(chain.from_iterable(self.samples))


class TensorDigest(NamedTuple):
    """Digest over a tensor's shards on all ranks."""

    part: Part
    dtype: str
    digest: int


class Setting(NamedTuple):
    """A plain value in the state, such as a learning rate."""

    part: Part
    text: str


@dataclass(frozen=True, slots=True)
class StateDigests:
    """Digests over a state at one moment."""

    tensors: Mapping[str, TensorDigest]  # by dotted name
    settings: Mapping[str, Setting]  # by dotted name
    # Further names of shared parameters, each with the first name.
    ties: Mapping[str, str] = field(default_factory=dict)
    uneven: frozenset[str] = frozenset()  # buffers whose values differ between ranks


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step's digests and results on all ranks."""

    step: int
    batch: BatchDigests | None = None  # None if the caller gave no batch
    loss: RankValues = ()  # bits by rank
    grad_norm: RankValues = ()  # bits by rank
    # Digests over generators' states before the step, by generator.
    random_before: Mapping[str, RankValues] | None = None
    random_after: Mapping[str, RankValues] | None = None  # the same after the step
    before: StateDigests | None = None  # as it was saved, or loaded
    after: StateDigests | None = None  # None if the step is not deep
    # The state when a resumed run's optimizer took its first step; None in other runs.
    used: StateDigests | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, ranks and settings that a step ran with."""

    world: Annotated[Rank, range(1, 1 << 20)]
    layout: int  # digest over the boxes that each rank holds
    style: str  # how the model is sharded, for messages
    is_deterministic: bool  # whether the run says that a step gives the same bits each time
    rtol: HexFloat  # relative loss difference that reordered sums explain
    versions: Mapping[str, str]  # libraries and devices, by name
    flags: Mapping[str, str]  # flags that change a step's result, by name

    def has_equal_layout(self, other: Environment) -> bool:
        """Return True if each rank holds the same elements."""
        return (self.world, self.layout) == (other.world, other.layout)


@dataclass(frozen=True, slots=True)
class Observation:
    """One step of a resumed run."""

    environment: Environment
    step: StepRecord


@dataclass(frozen=True, slots=True)
class WitnessRecord:
    """Record of the steps after a save."""

    save: str  # the save's id
    number: int  # saved step
    environment: Environment  # in the run that saved
    steps: tuple[StepRecord, ...] = ()  # in order
    # All ranks' samples in the run's first step, as one rank's batch; None if unknown.
    first_batch: BatchDigests | None = None
    last_batch: BatchDigests | None = None  # the same for the saved step
    # Largest relative difference in loss or gradient norm between two runs of one step; None if no step ran twice.
    noise: float | None = None

    def find(self, step: int) -> StepRecord | None:
        """Return a step's record; None if it was not recorded."""
        return next((each for each in self.steps if each.step == step), None)
