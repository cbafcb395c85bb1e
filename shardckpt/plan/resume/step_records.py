"""Records of training steps: digests of all that a resume has to reproduce.

A value of each rank is an unsigned number: a digest, or the bits of a float.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

RankValues = tuple[int, ...]
"""One number of each rank, in rank order."""

Part = Literal["parameter", "buffer", "optimizer", "schedule", "state", "unsaved"]
"""Part of a state that a name belongs to: `unsaved` buffers are not saved, `state` is all else that the user saves."""

NO_FLOAT = 0x7FF8_0000_0000_DEAD
"""Bits of the NaN that stands for a value that a rank does not have."""

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
    """Digests of the batch of one step.

    Attributes:
        ordered: Digest of each rank's batch, in the order of its samples.
        multisets: Digest of each rank's samples in any order: the sum of their digests.
        counts: Number of samples of each rank.
        samples: Digest of each sample of each rank, in order; empty for large batches.
    """

    ordered: RankValues
    multisets: RankValues
    counts: RankValues
    samples: tuple[RankValues, ...] = ()

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
    """Digest of a tensor's shards on all ranks.

    Attributes:
        part: Part of the state.
        dtype: Dtype of the elements.
        digest: Digest of the elements.
    """

    part: Part
    dtype: str
    digest: int


class Setting(NamedTuple):
    """A plain value of the state, such as a learning rate.

    Attributes:
        part: Part of the state.
        text: The value as text.
    """

    part: Part
    text: str


@dataclass(frozen=True, slots=True)
class StateDigests:
    """Digests of a state at one moment.

    Attributes:
        tensors: Digests by dotted name.
        settings: Plain values by dotted name.
        ties: Further names of shared parameters, each with the first name.
        uneven: Names of buffers whose values differ between ranks.
    """

    tensors: Mapping[str, TensorDigest]
    settings: Mapping[str, Setting]
    ties: Mapping[str, str] = field(default_factory=dict)
    uneven: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Digests and results of one training step, of all ranks.

    Attributes:
        step: Number of the step.
        batch: Digests of the batch; None if the caller gave none.
        loss: Bits of each rank's loss.
        grad_norm: Bits of each rank's gradient norm.
        random_before: Digests of the states of generators before the step, by name of the generator.
        random_after: The same after the step.
        before: Digests of the state before the step: as it was saved, or loaded.
        used: Digests of the state when the optimizer of a resumed run took its first step; None in other runs.
        after: Digests of the state after the step; None if the step is not deep.
    """

    step: int
    batch: BatchDigests | None = None
    loss: RankValues = ()
    grad_norm: RankValues = ()
    random_before: Mapping[str, RankValues] | None = None
    random_after: Mapping[str, RankValues] | None = None
    before: StateDigests | None = None
    after: StateDigests | None = None
    used: StateDigests | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, ranks and settings that a step ran with.

    Attributes:
        world: Number of ranks.
        layout: Digest of the boxes that each rank holds.
        style: How the model is sharded, for messages.
        is_deterministic: Whether the run says that a step gives the same bits each time.
        rtol: Relative difference of the loss that another order of sums explains.
        versions: Versions of libraries and devices, by name.
        flags: Flags that change the result of a step, by name.
    """

    world: int
    layout: int
    style: str
    is_deterministic: bool
    rtol: float
    versions: Mapping[str, str]
    flags: Mapping[str, str]

    def has_equal_layout(self, other: Environment) -> bool:
        """Return True if each rank holds the same elements."""
        return (self.world, self.layout) == (other.world, other.layout)


@dataclass(frozen=True, slots=True)
class Observation:
    """One step of a resumed run.

    Attributes:
        environment: Environment of the run.
        step: Record of the step.
    """

    environment: Environment
    step: StepRecord


@dataclass(frozen=True, slots=True)
class WitnessRecord:
    """Record of the steps behind a save.

    Attributes:
        save: Id of the save.
        number: Number of the saved step.
        environment: Environment of the run that saved.
        steps: The steps, in order.
        first_batch: Samples of all ranks in the first step of the run, as those of one; None if unknown.
        last_batch: The same of the saved step.
        noise: Largest relative difference of the loss, or the gradient norm, between two runs of one step; None if
            no step ran twice.
    """

    save: str
    number: int
    environment: Environment
    steps: tuple[StepRecord, ...] = ()
    first_batch: BatchDigests | None = None
    last_batch: BatchDigests | None = None
    noise: float | None = None

    def find(self, step: int) -> StepRecord | None:
        """Return the record of a step; None if it was not recorded."""
        return next((each for each in self.steps if each.step == step), None)
