"""A checkpoint's content, and the result of verifying it, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardckpt.boxes import Shape
from shardckpt.manifest import TensorEntry
from shardckpt.offline.results.problems import Problem
from shardckpt.offline.results.tensor_stats import TensorStats


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


@dataclass(frozen=True, slots=True)
class Inspection:
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


@dataclass(frozen=True, slots=True)
class Verification:
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
