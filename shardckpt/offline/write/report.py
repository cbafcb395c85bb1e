"""Results for callers, as frozen values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardckpt.boxes import Shape
from shardckpt.deprecation import RenamedAttribute
from shardckpt.errors import escape
from shardckpt.manifest import TensorEntry, split_numbers
from shardckpt.offline.write.problems import Problem
from shardckpt.plan.resume.resumes import Resume, StepVerdict, find_last_compared

NO_SHAPES = (
    "this layout stores neither full shapes nor the number of ranks: if the last rank's files were lost, nothing here"
    " shows it; `consolidate --shapes-from` another checkpoint of the model does"
)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A payload file of the target.

    Attributes:
        name: File name in the target.
        nbytes: Bytes of the file.
        tensor_count: Number of tensors in the file.
    """

    name: str
    nbytes: int
    tensor_count: int

    tensors = RenamedAttribute[int]("tensor_count")


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a conversion; with `dry_run`, the planned result.

    Attributes:
        source: Path or URL of the source.
        target: Path or URL of the target.
        format: Format of the source.
        part: Requested part.
        files: Payload files, in order.
        carried: Names of the target's other files.
        tensor_count: Number of written tensors.
        nbytes: Written bytes of tensor data.
        ties: Name that is not written to the name that is written for it.
        cast: Number of cast tensors by stored and written dtype: `float32 -> bfloat16`.
        left_out: Subtrees of the source outside of the requested part.
        warnings: Oddities, one sentence each.
        seconds: Seconds by phase: open, plan, copy, publish.
        dry_run: Whether nothing was written.
    """

    source: str
    target: str
    format: str
    part: str
    files: tuple[WrittenFile, ...] = ()
    carried: tuple[str, ...] = ()
    tensor_count: int = 0
    nbytes: int = 0
    ties: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    dry_run: bool = False

    tensors = RenamedAttribute[int]("tensor_count")


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint; as text, its dtype and shape.

    Attributes:
        name: Dotted path; canonical name in a comparison.
        dtype: Dtype that readers deliver.
        shape: Global shape, in elements.
        nbytes: Bytes of the full tensor.
        pieces: Number of pieces.
    """

    name: str
    dtype: str
    shape: Shape
    nbytes: int
    pieces: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def describe_entry(name: str, entry: TensorEntry) -> TensorInfo:
    """Return a tensor of a manifest as results have it.

    Args:
        name: Its name in the result.
        entry: The tensor.
    """
    return TensorInfo(name, entry.dtype, entry.shape, entry.nbytes, len(entry.pieces))


class FileInfo(NamedTuple):
    """A file of a checkpoint, as shown by `inspect`.

    Attributes:
        name: File name in the checkpoint.
        nbytes: Bytes of the file; None if it is missing.
        rank: Rank that the name states; None if it states none.
    """

    name: str
    nbytes: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """Content of a checkpoint.

    Attributes:
        source: Path or URL.
        format: Format of the checkpoint.
        files: Files with tensors, in order of the format.
        tensors: Tensors in saved order.
        objects: Dotted path of every value that is not a tensor to a short text of the value, if it is known.
        ties: Dotted path to the dotted path of the array that it shares.
        metadata: Text stored with the tensors.
        parts: Part (`model`, `optimizer`, `other`) to its paths.
        warnings: Oddities, one sentence each.
        problems: Gaps, overlaps, missing and short files: what is seen without reading tensors, at most 1,000.
        stats: Statistics of the tensors whose save stored them, by the names of `tensors`.
    """

    source: str
    format: str
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...]
    objects: Mapping[str, str]
    ties: Mapping[str, str]
    metadata: Mapping[str, str]
    parts: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    stats: tuple[TensorStats, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; tied tensors count once."""
        return sum(t.nbytes for t in self.tensors if t.name not in self.ties)


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`.

    Attributes:
        source: Path or URL.
        format: Format of the checkpoint.
        tensor_count: Number of tensors whose coverage was checked.
        checked_bytes: Bytes that match a stored checksum.
        problems: All faults.
        warnings: Oddities that are not faults.
    """

    source: str
    format: str
    tensor_count: int
    checked_bytes: int
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the checkpoint has no problems."""
        return not self.problems

    tensors = RenamedAttribute[int]("tensor_count")


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of one tensor; complex numbers count by their magnitude.

    Attributes:
        name: Canonical name.
        dtype: Dtype to deliver.
        shape: Global shape.
        nans: Number of NaNs.
        infs: Number of infinities.
        zeros: Number of zeros.
        min: Smallest finite value; None if there is none.
        max: Largest finite value; None if there is none.
        mean: Mean of the finite values; None if there is none.
        l2: L2 norm of the finite values.
        is_stored: Whether the save stored the statistics, so that the values were not read.
    """

    name: str
    dtype: str
    shape: Shape
    nans: int
    infs: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    l2: float
    is_stored: bool = False


STATS = ("nans", "infs", "zeros", "min", "max", "mean", "l2")
"""Statistics of `TensorStats`, by the names of their attributes."""


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Statistics of the tensors of one layer.

    Attributes:
        name: Name of the layer, as `find_layer` returns it.
        tensor_count: Number of tensors.
        nans: Number of NaNs.
        infs: Number of infinities.
        zeros: Number of zeros.
        min: Smallest finite value; None if there is none.
        max: Largest finite value; None if there is none.
        l2: L2 norm of the finite values.
    """

    name: str
    tensor_count: int
    nans: int
    infs: int
    zeros: int
    min: float | None
    max: float | None
    l2: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Result of `stats`.

    Attributes:
        source: Path or URL.
        format: Format of the checkpoint.
        tensors: Statistics of each tensor, in saved order.
        layers: Statistics of each layer, in natural order of names.
        left_out: Names of integer tensors outside of model and optimizer, if these were not asked for.
    """

    source: str
    format: str
    tensors: tuple[TensorStats, ...]
    layers: tuple[LayerStats, ...]
    left_out: tuple[str, ...] = ()

    @property
    def nans(self) -> int:
        """Number of NaNs in all tensors."""
        return sum(tensor.nans for tensor in self.tensors)

    @property
    def infs(self) -> int:
        """Number of infinities in all tensors."""
        return sum(tensor.infs for tensor in self.tensors)

    @property
    def stored(self) -> int:
        """Number of tensors whose statistics the save stored."""
        return sum(tensor.is_stored for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of chosen tensors of one step of a run.

    Attributes:
        number: Number of the step.
        path: Path or URL of the step.
        tensors: Statistics of each tensor.
        left_out: Names of integer tensors outside of model and optimizer, if these were not asked for.
    """

    number: int
    path: str
    tensors: tuple[TensorStats, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """Result of `history`.

    Attributes:
        root: Path or URL of the run.
        steps: Complete steps, oldest first.
        warnings: Steps that were removed while they were read, one sentence each.
    """

    root: str
    steps: tuple[StepStats, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepProof:
    """Resumes of one step of a run, compared with its record of training steps.

    Attributes:
        number: Number of the step.
        path: Path or URL of the step.
        verdict: `proven` or `diverged`, as the last resume that was compared to the end; `unproven` if none was;
            `no record` if no training step behind it was recorded.
        recorded: Numbers of the training steps that are recorded.
        rank_count: Number of ranks of the run that saved; 0 without a record.
        style: How the model was sharded; empty without a record.
        resumes: Resumes that were compared, or began to be, oldest first; the newest 64 are kept.
        faults: Reasons why the record or the verdicts cannot be read.
        tier: Name of the tier of a capture; empty for a step of the run's folder.
    """

    number: int
    path: str
    verdict: StepVerdict
    recorded: tuple[int, ...] = ()
    rank_count: int = 0
    style: str = ""
    resumes: tuple[Resume, ...] = ()
    faults: tuple[str, ...] = ()
    tier: str = ""

    @property
    def equal_steps(self) -> tuple[int, int]:
        """Numbers of steps that were equal in the resume that decides the verdict, and of all recorded steps."""
        last = find_last_compared(self.resumes)
        return (0, len(self.recorded)) if last is None else (last.compared, len(last.steps))


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of `prove`: the complete steps of a run, with the verdicts on their resumes.

    Attributes:
        root: Path or URL of the run.
        steps: Complete steps, oldest first.
        captures: Captures in tiers that the run was resumed from, in the order of their first resumes; they may be
            gone.
        faults: Reasons why the resumes from captures cannot be read.
    """

    root: str
    steps: tuple[StepProof, ...]
    captures: tuple[StepProof, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no step and no capture is `diverged`."""
        return all(step.verdict != "diverged" for step in (*self.steps, *self.captures))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Files of verdicts and records that cannot be read, one sentence each."""
        return (*(fault for step in self.steps for fault in step.faults), *self.faults)


@dataclass(frozen=True, slots=True)
class Bisection:
    """Result of `bisect`.

    Attributes:
        root: Path or URL of the run.
        when: The condition.
        first: First step that the condition is true for, with the tensors that it is true for; None without one.
        examined: Numbers of the steps whose statistics were looked at, in this order.
        is_scan: Whether all steps were looked at, from the oldest until the first.
        warnings: Steps that were removed while they were read, one sentence each.
        left_out: Names of integer tensors of these steps that are outside of model and optimizer, if these were not
            asked for.
    """

    root: str
    when: str
    first: StepStats | None
    examined: tuple[int, ...]
    is_scan: bool
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        name: Canonical name.
        kind: Kind of the difference.
        a: The tensor in the first checkpoint; None if it has none.
        b: The tensor in the second checkpoint; None if it has none.
        max_abs: Largest absolute difference; None if values were not compared.
        max_rel: Largest difference relative to the larger magnitude; None if values were not compared.
        nans: Number of NaNs in the first and in the second.
        l2: L2 norm of the difference, infinite if it is not finite; None if values were not compared.
        norm: L2 norm of the finite elements of the second; None if values were not compared.
    """

    name: str
    kind: Literal["only_in_a", "only_in_b", "dtype", "shape", "values"]
    a: TensorInfo | None
    b: TensorInfo | None
    max_abs: float | None = None
    max_rel: float | None = None
    nans: tuple[int, int] = (0, 0)
    l2: float | None = None
    norm: float | None = None

    @property
    def relative_l2(self) -> float | None:
        """L2 norm of the difference relative to that of the second; infinite if only the latter is 0."""
        return None if self.l2 is None or self.norm is None else divide_norms(self.l2, self.norm)

    @property
    def layer(self) -> str:
        """Name of the layer, as `find_layer` returns it."""
        return find_layer(self.name)

    @property
    def message(self) -> str:
        """The difference as one sentence."""
        numbers = "" if self.l2 is None else f"; max abs {self.max_abs:.3g}, L2 {self.l2:.3g}"
        return _describe_difference(self.name, self.kind, f"{self.a or ''}", f"{self.b or ''}") + numbers


def _describe_difference(name: str, kind: str, a: str, b: str) -> str:
    both = a if a == b else " / ".join(filter(None, (a, b)))
    return f"{escape(name)}: {kind.replace('_', ' ')}: {escape(both)}"


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """Differences of the tensors of one layer.

    Attributes:
        name: Name of the layer, as `find_layer` returns it.
        tensor_count: Number of tensors that differ.
        l2: L2 norm of the differences of values; None if no values were compared.
        norm: L2 norm of these tensors in the second checkpoint; None if no values were compared.
        max_abs: Largest absolute difference; None if no values were compared.
    """

    name: str
    tensor_count: int
    l2: float | None
    norm: float | None
    max_abs: float | None

    @property
    def relative_l2(self) -> float | None:
        """L2 norm of the differences relative to that of the second; infinite if only the latter is 0."""
        return None if self.l2 is None or self.norm is None else divide_norms(self.l2, self.norm)


def divide_norms(distance: float, norm: float) -> float:
    """Return a distance relative to a norm: 0 without a distance, infinite if only the norm is 0."""
    return 0.0 if distance == 0 else distance / norm if norm else math.inf


def find_layer(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, else up to its last dot.

    Optimizer state (`<fqn>/<slot>`) belongs to the layer of its parameter.
    """
    segments = name.partition("/")[0].split(".")
    numbers = (at for at, segment in enumerate(segments) if segment.isdecimal())
    return ".".join(segments[: next(numbers, len(segments) - 2) + 1]) or name


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value, not a tensor in both checkpoints, that differs.

    Attributes:
        name: Canonical name: `param_groups.0.lr`, or a dotted path.
        kind: Kind of the difference.
        a: Text for the value in the first checkpoint; empty if it has none.
        b: Text for the value in the second checkpoint; empty if it has none.
    """

    name: str
    kind: Literal["only_in_a", "only_in_b", "type", "value"]
    a: str
    b: str

    @property
    def message(self) -> str:
        """The difference as one sentence."""
        return _describe_difference(self.name, self.kind, self.a, self.b)


class NotCompared(NamedTuple):
    """An entry that could not be compared.

    Attributes:
        name: Dotted name.
        reason: Why it could not be compared.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of two checkpoints.

    Attributes:
        a: Path or URL of the first.
        b: Path or URL of the second.
        compared: Number of tensors in both.
        equal: Number of these with the same dtype, shape and bits, or within the tolerances.
        differences: Tensors that differ or are in only one, in order of name.
        warnings: Oddities, one sentence each.
        compared_values: Number of values in both that are not tensors; a sequence of plain values counts as one.
        equal_values: Number of these that are equal.
        value_differences: Values that differ or are in only one, in order of name.
        not_compared: Requested entries that could not be compared, by name.
        left_out: Dotted names of content outside of the requested part.
    """

    a: str
    b: str
    compared: int
    equal: int
    differences: tuple[TensorDifference, ...]
    warnings: tuple[str, ...] = ()
    compared_values: int = 0
    equal_values: int = 0
    value_differences: tuple[ValueDifference, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[LayerDifference, ...]:
        """Layers with tensors that differ, in natural order: numbers in names count as numbers."""
        members: dict[str, list[TensorDifference]] = {}
        for difference in self.differences:
            members.setdefault(difference.layer, []).append(difference)
        return tuple(_sum_layer(name, members[name]) for name in sorted(members, key=split_numbers))

    @property
    def same(self) -> bool:
        """Whether everything requested was compared, and nothing differs."""
        return not self.differences and not self.value_differences and not self.not_compared


def _sum_layer(name: str, differences: Sequence[TensorDifference]) -> LayerDifference:
    compared = [difference for difference in differences if difference.l2 is not None]
    if not compared:
        return LayerDifference(name, len(differences), None, None, None)
    l2, norm = (math.hypot(*(getattr(each, field) for each in compared)) for field in ("l2", "norm"))
    return LayerDifference(name, len(differences), l2, norm, max(each.max_abs or 0.0 for each in compared))
