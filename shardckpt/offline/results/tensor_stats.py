"""Statistics by tensor, layer and step, as frozen values, and from what a save stored."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardckpt.boxes import Box, Shape
from shardckpt.encodings.value_stats import ValueStats, merge_stats
from shardckpt.manifest import TensorEntry
from shardckpt.notebook import Result
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.reader import Reader


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics for one tensor; complex numbers count by their magnitude.

    Attributes:
        name: Canonical name.
        dtype: Dtype to deliver.
        shape: Global shape.
        nans: NaN count.
        infs: Infinity count.
        zeros: Zero count.
        min: Smallest finite value; None without finite values.
        max: Largest finite value; None without finite values.
        mean: Mean finite value; None without finite values.
        l2: L2 norm over finite values.
        is_stored: Whether the save stored the statistics; then the values were not read.
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


# Attributes of `TensorStats` that are statistics.
STATS = ("nans", "infs", "zeros", "min", "max", "mean", "l2")


def find_layer(name: str) -> str:
    """Return a tensor's layer: its name up to the first number, else up to its last dot."""
    segments = name.partition("/")[0].split(".")  # the slot of an optimizer counts with its parameter
    numbers = (at for at, segment in enumerate(segments) if segment.isdecimal())
    return ".".join(segments[: next(numbers, len(segments) - 2) + 1]) or name


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Statistics for the tensors in one layer.

    Attributes:
        name: Layer name, as `find_layer` returns it.
        tensor_count: Tensor count.
        nans: NaN count.
        infs: Infinity count.
        zeros: Zero count.
        min: Smallest finite value; None without finite values.
        max: Largest finite value; None without finite values.
        l2: L2 norm over finite values.
    """

    name: str
    tensor_count: int
    nans: int
    infs: int
    zeros: int
    min: float | None
    max: float | None
    l2: float


@dataclass(frozen=True, slots=True, repr=False)
class Statistics(Result):
    """Result of `stats`.

    Attributes:
        source: Path or URL.
        format: Checkpoint format.
        tensors: Statistics by tensor, in saved order.
        layers: Statistics by layer, in natural name order.
        left_out: Names of counters and random states that were not requested.
    """

    source: str
    format: str
    tensors: tuple[TensorStats, ...]
    layers: tuple[LayerStats, ...]
    left_out: tuple[str, ...] = ()

    @property
    def nans(self) -> int:
        """NaN count in all tensors."""
        return sum(tensor.nans for tensor in self.tensors)

    @property
    def infs(self) -> int:
        """Infinity count in all tensors."""
        return sum(tensor.infs for tensor in self.tensors)

    @property
    def stored(self) -> int:
        """Count of tensors with stored statistics."""
        return sum(tensor.is_stored for tensor in self.tensors)


@dataclass(frozen=True, slots=True, repr=False)
class StepStats(Result):
    """Statistics for chosen tensors in one step.

    Attributes:
        number: Step number.
        path: Path or URL of the step.
        tensors: Statistics by tensor.
        left_out: Names of counters and random states that were not requested.
    """

    number: int
    path: str
    tensors: tuple[TensorStats, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class History(Result):
    """Result of `history`.

    Attributes:
        root: Path or URL of the run.
        steps: Complete steps, oldest first.
        warnings: Steps that were removed while they were read, one sentence each.
    """

    root: str
    steps: tuple[StepStats, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Bisection(Result):
    """Result of `bisect`.

    Attributes:
        root: Path or URL of the run.
        when: The condition.
        first: First step that meets the condition, with the tensors that meet it; None without such a step.
        examined: Numbers of the examined steps, in this order.
        is_scan: Whether every step was examined, from the oldest to the first.
        warnings: Steps that were removed while they were read, one sentence each.
        left_out: Names of counters and random states in these steps that were not requested.
    """

    root: str
    when: str
    first: StepStats | None
    examined: tuple[int, ...]
    is_scan: bool
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def describe_values(name: str, entry: TensorEntry, found: ValueStats, *, is_stored: bool) -> TensorStats:
    """Return a tensor's statistics for callers."""
    has_values = found.finite > 0
    return TensorStats(
        name=name,
        dtype=entry.dtype,
        shape=entry.shape,
        nans=found.nans,
        infs=found.infs,
        zeros=found.zeros,
        min=found.min if has_values else None,
        max=found.max if has_values else None,
        mean=found.total / found.finite if has_values else None,
        l2=math.sqrt(found.squares),
        is_stored=is_stored,
    )


def find_piece_stats(reader: Reader, tensor: OutputTensor) -> Mapping[Box, ValueStats]:
    """Return the stored statistics by piece; empty without them, or if the tensor is changed."""
    entry = tensor.entry
    if tensor.is_computed or tensor.members or not _is_as_saved(reader, entry):
        return {}
    return reader.piece_stats(entry.path)


def merge_piece_stats(boxes: Sequence[Box], stored: Mapping[Box, ValueStats]) -> list[ValueStats]:
    """Return statistics for boxes that stored pieces make up; empty if there is another box."""
    if not boxes:
        return []
    order = sorted(boxes)
    inside: dict[Box, list[Box]] = {box: [] for box in boxes}
    for piece in stored:
        box = order[bisect_right(order, (piece.offset, piece.size)) - 1]
        if piece not in inside and not _contains(box, piece):
            return []
        inside[piece if piece in inside else box].append(piece)
    found = [merge_stats(stored[piece] for piece in pieces) for pieces in inside.values()]
    sizes = (sum(piece.volume for piece in pieces) for pieces in inside.values())
    is_made_up = all(
        size == box.volume and stats.may_describe(size) for box, size, stats in zip(boxes, sizes, found, strict=True)
    )
    return found if is_made_up else []


def _contains(box: Box, piece: Box) -> bool:
    return all(start >= first for start, first in zip(piece.offset, box.offset, strict=True)) and all(
        stop <= last for stop, last in zip(piece.stop, box.stop, strict=True)
    )


def find_stored_stats(reader: Reader, entry: TensorEntry) -> ValueStats | None:
    """Return a tensor's stored statistics; None without them, or if a reader changed the tensor."""
    return reader.value_stats(entry.path) if _is_as_saved(reader, entry) else None


def _is_as_saved(reader: Reader, entry: TensorEntry) -> bool:
    saved = reader.manifest.tensors.get(entry.path)
    return saved is not None and (saved.pieces, saved.dtype) == (entry.pieces, entry.dtype)
