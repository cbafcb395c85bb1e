"""A checkpoint's content and problems, and the results of verifying and converting it, as frozen values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.errors import (
    CheckpointError,
    ChecksumError,
    IncompleteError,
    MissingFileError,
    OverlapError,
    ShardckptError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
    escape,
)
from shardckpt.manifest import TensorEntry
from shardckpt.notebook import Result
from shardckpt.offline.results.tensor_stats import TensorStats
from shardckpt.plan.layout.coverage import Fault

ProblemKind = Literal[
    "gap",
    "overlap",
    "missing_file",
    "truncated",
    "wrong_size",
    "checksum",
    "invalid",
    "unreadable",
    "unsupported",
    "unsafe",
]

_KINDS_OF_ERRORS: tuple[tuple[type[ShardckptError], ProblemKind], ...] = (
    (TruncatedError, "truncated"),
    (ChecksumError, "checksum"),
    (IncompleteError, "gap"),
    (MissingFileError, "missing_file"),
    (OverlapError, "overlap"),
    (UnsupportedError, "unsupported"),
    (UnsafeError, "unsafe"),
)
_RANK = re.compile(
    r"(?:^|/)__(\d+)_\d+\.distcp$"
    r"|(?<![a-z])(?<!mp_)rank[-_]?(\d+)"
    r"|(?:^|/)[0-9a-z]{15}-(\d{5,})-\d{2,}\.safetensors$"  # the native format
)

NO_SHAPES = (
    "this layout stores neither full shapes nor the number of ranks: if the last rank's files were lost, nothing here"
    " shows it; `consolidate --shapes-from` another checkpoint of the model does"
)


class TensorInfo(NamedTuple):
    """A tensor in a checkpoint; as text, its dtype and shape.

    Attributes:
        name: Dotted path; canonical name in a comparison.
        dtype: Dtype that readers deliver.
        shape: Global shape, in elements.
        nbytes: Bytes of the full tensor.
        pieces: How many pieces store it.
    """

    name: str
    dtype: str
    shape: Shape
    nbytes: int
    pieces: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def describe_entry(name: str, entry: TensorEntry) -> TensorInfo:
    """Return a manifest's tensor as results have it."""
    return TensorInfo(name, entry.dtype, entry.shape, entry.nbytes, len(entry.pieces))


class FileInfo(NamedTuple):
    """A file in a checkpoint, as `inspect` shows it.

    Attributes:
        name: File name in the checkpoint.
        nbytes: Size in bytes; None if the file is missing.
        rank: Rank in the name; None without a rank.
    """

    name: str
    nbytes: int | None
    rank: int | None


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Result):
    """A checkpoint's content.

    Attributes:
        source: Path or URL.
        format: Checkpoint format.
        files: Files with tensors, in the format's order.
        tensors: Tensors in saved order.
        objects: Dotted path to a short text if known, for every value that is not a tensor.
        ties: Dotted path to the dotted path with the shared array.
        metadata: Text stored with the tensors.
        parts: Part (`model`, `optimizer`, `other`) to its paths.
        warnings: Warnings, one sentence each.
        problems: Gaps, overlaps, missing and short files, as far as they show without reading tensors; at most 1,000.
        stats: Stored statistics, by the names in `tensors`.
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
        """Bytes in all tensors; tied tensors count once."""
        return sum(t.nbytes for t in self.tensors if t.name not in self.ties)


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Result):
    """Result of `verify`.

    Attributes:
        source: Path or URL.
        format: Checkpoint format.
        tensor_count: How many tensors were checked for gaps and overlaps.
        checked_bytes: Bytes that match a stored checksum.
        problems: All faults.
        warnings: Oddities that are not faults.
        checks: Checks that were made: `structure`, `coverage`, `sizes`, and `checksums` if any was compared.
        files_without_checksums: Files whose bytes no stored checksum covers, if nothing else is wrong.
    """

    source: str
    format: str
    tensor_count: int
    checked_bytes: int
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    checks: tuple[str, ...] = ()
    files_without_checksums: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the checkpoint has no problems."""
        return not self.problems


class FileRange(NamedTuple):
    """A byte range in a file.

    Attributes:
        offset: Offset of the first byte.
        nbytes: Length in bytes.
    """

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a checkpoint; as text, it is its message.

    Attributes:
        kind: For elements: `gap`, `overlap`, or `invalid` if no tensor has such a box or layout. For files:
            `missing_file`; `truncated` if it ends before a tensor does; `wrong_size`; `checksum`; `unreadable`;
            `unsupported`; `unsafe`.
        message: The problem as one sentence.
        tensors: Dotted tensor names, at most 1,000; empty if unknown.
        box: Affected elements; None if unknown, or if several tensors have the problem.
        file: File name in the checkpoint; empty without a file.
        byte_range: Affected bytes in the file; None if unknown.
        expected: Expected value as text; empty without a value.
        found: Actual value as text; empty without a value.
    """

    kind: ProblemKind
    message: str
    tensors: tuple[str, ...] = ()
    box: Box | None = None
    file: str = ""
    byte_range: FileRange | None = None
    expected: str = ""
    found: str = ""

    @property
    def rank(self) -> int | None:
        """Rank in the file's name; None without a rank."""
        return find_rank(self.file)

    def __str__(self) -> str:
        return self.message


def find_rank(file: str) -> int | None:
    """Return the rank in a file name; None without a rank."""
    match = _RANK.search(file)
    return int(match[match.lastindex or 0]) if match else None


def from_fault(fault: Fault) -> Problem:
    """Return a fault in a tensor's pieces as a problem."""
    return Problem(
        fault.kind,
        escape(fault),
        (fault.tensor,),
        fault.box,
        fault.file,
        None if fault.byte_range is None else FileRange(*fault.byte_range),
        fault.expected,
        fault.found,
    )


def from_error(error: CheckpointError | MissingFileError, url: str = "") -> Problem:
    """Return a reading error as a problem."""
    kind: ProblemKind = next((kind for cls, kind in _KINDS_OF_ERRORS if isinstance(error, cls)), "unreadable")
    where = str(error.where)
    file = where.removeprefix(f"{url.rstrip('/')}/") if url and where.startswith(f"{url.rstrip('/')}/") else ""
    return Problem(kind, str(error), file=file, expected=escape(error.expected), found=escape(error.found))


def missing_file(name: str) -> Problem:
    """Return the problem that a file is missing."""
    return Problem("missing_file", escape(f"{name} is missing"), file=name)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A payload file in the target.

    Attributes:
        name: File name in the target.
        nbytes: Size in bytes.
        tensor_count: Tensors in the file.
    """

    name: str
    nbytes: int
    tensor_count: int


@dataclass(frozen=True, slots=True, repr=False)
class Report(Result):
    """Result of a conversion; with `dry_run`, the planned result.

    Attributes:
        source: The source's path or URL.
        target: The target's path or URL.
        format: The source's format.
        part: Requested part.
        files: Payload files, in order.
        carried: Names of the target's other files.
        tensor_count: Written tensors.
        nbytes: Written tensor data, in bytes.
        ties: Name that is not written to the name that is written for it.
        cast: Count of cast tensors by stored and written dtype: `float32 -> bfloat16`.
        left_out: The source's subtrees outside the requested part.
        warnings: Warnings, one sentence each.
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
