"""Statistics by tensor, layer and step, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from shardckpt.boxes import Shape


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


@dataclass(frozen=True, slots=True)
class Statistics:
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


@dataclass(frozen=True, slots=True)
class StepStats:
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
class Bisection:
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
