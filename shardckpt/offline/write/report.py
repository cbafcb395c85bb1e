"""A conversion's result for callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_SHAPES = (
    "this layout stores neither full shapes nor the number of ranks: if the last rank's files were lost, nothing here"
    " shows it; `consolidate --shapes-from` another checkpoint of the model does"
)


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


@dataclass(frozen=True, slots=True)
class Report:
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
