"""Progress and results that a verb reports to its caller: frozen values, no printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardckpt.boxes import Shape

NO_SHAPES = (
    "this layout stores neither full shapes nor the number of ranks: if the last rank's files were lost, nothing here"
    " shows it; `consolidate --shapes-from` another checkpoint of the model does"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the copying of tensor data is.

    Attributes:
        done_bytes: Bytes of tensor data written so far.
        total_bytes: Bytes that will be written.
        seconds: Since the first byte.
    """

    done_bytes: int
    total_bytes: int
    seconds: float


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One payload file of the target.

    Attributes:
        name: In the target.
        nbytes: Bytes of the full file.
        tensors: How many tensors it holds.
    """

    name: str
    nbytes: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did, or with `dry_run` would do.

    Attributes:
        source: Where it read.
        target: Where it wrote.
        format: Format of the source.
        part: What was asked for.
        files: Payload files, in order.
        carried: Other files of the target.
        tensors: Tensors written.
        nbytes: Bytes of tensor data written.
        ties: Name that is not written to the name that stands for it.
        cast: Tensors that changed type, by stored and written type: `float32 -> bfloat16`.
        left_out: Subtrees of the source that no part asked for holds.
        warnings: What is odd, one sentence each.
        seconds: Phase to seconds: open, plan, copy, publish.
        dry_run: Whether nothing was written.
    """

    source: str
    target: str
    format: str
    part: str
    files: tuple[WrittenFile, ...] = ()
    carried: tuple[str, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    ties: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    dry_run: bool = False


class TensorInfo(NamedTuple):
    """One tensor, as `inspect` shows it.

    Attributes:
        name: Dotted path.
        dtype: As readers return it.
        shape: Global shape, in elements.
        nbytes: Bytes of the full tensor.
        pieces: Number of pieces.
    """

    name: str
    dtype: str
    shape: Shape
    nbytes: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        source: Path or URL.
        format: What it was read as.
        files: File to size in bytes, -1 for a missing one.
        tensors: In saved order.
        objects: Dotted path of every value that is not a tensor, to a short rendering if it is known.
        ties: Dotted path to the dotted path of the array it shares.
        metadata: Free text stored with the tensors.
        parts: Part (`model`, `optimizer`, `other`) to where it is.
        warnings: What is odd: gaps, overlaps, missing or short files.
    """

    source: str
    format: str
    files: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]
    objects: Mapping[str, str]
    ties: Mapping[str, str]
    metadata: Mapping[str, str]
    parts: Mapping[str, tuple[str, ...]]
    warnings: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; a tied one counts once."""
        return sum(t.nbytes for t in self.tensors if t.name not in self.ties)


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether a checkpoint is complete.

    Attributes:
        source: Path or URL.
        format: What it was read as.
        tensors: Tensors whose coverage was checked.
        checked_bytes: Bytes that match a stored checksum.
        problems: Every fault found, one sentence each.
        warnings: What is odd but no fault.
    """

    source: str
    format: str
    tensors: int
    checked_bytes: int
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that differs.

    Attributes:
        name: Canonical name.
        kind: `only in a`, `only in b`, `dtype`, `shape` or `values`.
        a: What the first holds, in words.
        b: What the second holds, in words.
        max_abs: Largest absolute difference; None where values were not compared.
        max_rel: Largest difference relative to the larger magnitude; None where values were not compared.
        nans: NaNs in the first and in the second.
    """

    name: str
    kind: str
    a: str
    b: str
    max_abs: float | None = None
    max_rel: float | None = None
    nans: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """One value, no tensor in both, that differs.

    Attributes:
        name: Canonical name: `param_groups.0.lr`, or a dotted path.
        kind: `only in a`, `only in b`, `type` or `value`.
        a: What the first holds, in words.
        b: What the second holds, in words.
    """

    name: str
    kind: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two checkpoints differ.

    Attributes:
        a: Path or URL of the first.
        b: Path or URL of the second.
        compared: Tensors in both.
        equal: Those of them with the same dtype, shape and bits, or within the tolerances.
        differences: The tensors that differ, or are in one alone, in order of name.
        warnings: What is odd.
        compared_values: Values in both that are not tensors; a sequence of plain values counts as one.
        equal_values: Those of them that are equal.
        value_differences: The values that differ, or are in one alone, in order of name.
        not_compared: Name of what was asked for and could not be compared, to the reason.
        left_out: Dotted names of what was not asked for.
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
    not_compared: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether all that was asked for was compared, and nothing differs."""
        return not self.differences and not self.value_differences and not self.not_compared
