"""Problems of a checkpoint: kind, place, expected and found value, and a sentence."""

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
    """Bytes of a file.

    Attributes:
        offset: Offset of the first byte.
        nbytes: Number of bytes.
    """

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a checkpoint; as text, it is its message.

    Attributes:
        kind: `gap` and `overlap` of elements; `missing_file`; `truncated`, a file ends before a tensor does;
            `wrong_size` of a file; `checksum`; `invalid`, a box or layout that no tensor has; `unreadable`,
            `unsupported` and `unsafe` files.
        message: All of it as one sentence.
        tensors: Dotted names of the tensors, the first 1,000; empty if no tensor is known.
        box: Elements of the tensor; None if unknown, or if several tensors have the problem.
        file: Name of the file in the checkpoint; empty without one.
        byte_range: Bytes of the file; None if unknown.
        expected: Expected value as text; empty if there is none.
        found: Actual value as text; empty if there is none.
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
        """Rank that the name of the file states; None if it states none."""
        return find_rank(self.file)

    def __str__(self) -> str:
        return self.message


def find_rank(file: str) -> int | None:
    """Return the rank that a file's name states; None if it states none."""
    match = _RANK.search(file)
    return int(match[match.lastindex or 0]) if match else None


def from_fault(fault: Fault) -> Problem:
    """Return a fault of a tensor's pieces as a problem."""
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
    """Return an error of reading as a problem."""
    kind: ProblemKind = next((kind for cls, kind in _KINDS_OF_ERRORS if isinstance(error, cls)), "unreadable")
    where = str(error.where)
    file = where.removeprefix(f"{url.rstrip('/')}/") if url and where.startswith(f"{url.rstrip('/')}/") else ""
    return Problem(kind, str(error), file=file, expected=escape(error.expected), found=escape(error.found))


def missing_file(name: str) -> Problem:
    """Return the problem that a file is missing."""
    return Problem("missing_file", escape(f"{name} is missing"), file=name)
