"""The result of a conversion for callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
