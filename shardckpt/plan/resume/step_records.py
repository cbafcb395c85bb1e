"""Records of training steps: digests of all that a resume has to reproduce.

A value of each rank is an unsigned number: a digest, or the bits of a float.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

RankValues = tuple[int, ...]  # one number of each rank, in rank order

# Part of a state that a name belongs to: `unsaved` buffers are not saved, `state` is all else that the user saves.
Part = Literal["parameter", "buffer", "optimizer", "schedule", "state", "unsaved"]

NO_FLOAT = 0x7FF8_0000_0000_DEAD  # bits of the NaN that stands for a value that a rank does not have

_MASK = (1 << 32) - 1


def float_bits(value: float) -> int:
    """Return the bits of a float as an unsigned number."""
    return int.from_bytes(struct.pack("<d", value), "little")


def from_bits(bits: int) -> float:
    """Return the float of `float_bits`."""
    (value,) = struct.unpack("<d", bits.to_bytes(8, "little"))
    return float(value)


@dataclass(frozen=True, slots=True)
class BatchDigests:
    """Digests of the batch of one step."""

    ordered: RankValues  # digest of each rank's batch, in the order of its samples
    multisets: RankValues  # digest of each rank's samples in any order: the sum of their digests
    counts: RankValues  # number of samples of each rank
    samples: tuple[RankValues, ...] = ()  # digest of each sample of each rank, in order; empty for large batches

    @property
    def total(self) -> tuple[int, int]:
        """Number of samples of all ranks, and their digest in any order."""
        return sum(self.counts), sum(self.multisets) & _MASK

    def join_ranks(self) -> BatchDigests:
        """Return the same samples as the batch of one rank, which has no order."""
        count, digest = self.total
        return BatchDigests((0,), (digest,), (count,), (self.all_samples,) if self.samples else ())

    @property
    def all_samples(self) -> tuple[int, ...]:
        """Digests of the samples of all ranks."""
        return tuple(chain.from_iterable(self.samples))


class TensorDigest(NamedTuple):
    """Digest of a tensor's shards on all ranks."""

    part: Part  # part of the state
    dtype: str  # dtype of the elements
    digest: int  # digest of the elements


class Setting(NamedTuple):
    """A plain value of the state, such as a learning rate."""

    part: Part
    text: str  # the value as text


@dataclass(frozen=True, slots=True)
class StateDigests:
    """Digests of a state at one moment."""

    tensors: Mapping[str, TensorDigest]  # digests by dotted name
    settings: Mapping[str, Setting]  # plain values by dotted name
    # Further names of shared parameters, each with the first name.
    ties: Mapping[str, str] = field(default_factory=dict)
    uneven: frozenset[str] = frozenset()  # names of buffers whose values differ between ranks


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Digests and results of one training step, of all ranks."""

    step: int
    batch: BatchDigests | None = None  # digests of the batch; None if the caller gave none
    loss: RankValues = ()  # bits of each rank's loss
    grad_norm: RankValues = ()  # bits of each rank's gradient norm
    # Digests of the states of generators before the step, by name of the generator.
    random_before: Mapping[str, RankValues] | None = None
    random_after: Mapping[str, RankValues] | None = None  # the same after the step
    before: StateDigests | None = None  # digests of the state before the step: as it was saved, or loaded
    after: StateDigests | None = None  # digests of the state after the step; None if the step is not deep
    # Digests of the state when the optimizer of a resumed run took its first step; None in other runs.
    used: StateDigests | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, ranks and settings that a step ran with."""

    world: int
    layout: int  # digest of the boxes that each rank holds
    style: str  # how the model is sharded, for messages
    is_deterministic: bool  # whether the run says that a step gives the same bits each time
    rtol: float  # relative difference of the loss that another order of sums explains
    versions: Mapping[str, str]  # versions of libraries and devices, by name
    flags: Mapping[str, str]  # flags that change the result of a step, by name

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
    """Record of the steps behind a save."""

    save: str  # id of the save
    number: int  # number of the saved step
    environment: Environment  # environment of the run that saved
    steps: tuple[StepRecord, ...] = ()  # the steps, in order
    # Samples of all ranks in the first step of the run, as those of one; None if unknown.
    first_batch: BatchDigests | None = None
    last_batch: BatchDigests | None = None  # the same of the saved step
    # Largest relative difference of the loss, or the gradient norm, between two runs of one step; None if no step ran
    # twice.
    noise: float | None = None

    def find(self, step: int) -> StepRecord | None:
        """Return the record of a step; None if it was not recorded."""
        return next((each for each in self.steps if each.step == step), None)
