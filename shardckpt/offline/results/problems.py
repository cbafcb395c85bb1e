"""Problems in a checkpoint: kind, place, expected and found value, and a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardckpt.boxes import Box
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
