"""Content of a checkpoint, and the result of its verification, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardckpt.boxes import Shape
from shardckpt.manifest import TensorEntry
from shardckpt.offline.results.problems import Problem
from shardckpt.offline.results.tensor_stats import TensorStats


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
    """Return a tensor of a manifest as results have it."""
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
