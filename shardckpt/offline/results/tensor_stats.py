"""Statistics of tensors, of layers and of the steps of a run, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from shardckpt.boxes import Shape


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of one tensor; complex numbers count by their magnitude.

    Attributes:
        name: Canonical name.
        dtype: Dtype to deliver.
        shape: Global shape.
        nans: Number of NaNs.
        infs: Number of infinities.
        zeros: Number of zeros.
        min: Smallest finite value; None if there is none.
        max: Largest finite value; None if there is none.
        mean: Mean of the finite values; None if there is none.
        l2: L2 norm of the finite values.
        is_stored: Whether the save stored the statistics, so that the values were not read.
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
    """Return the layer of a tensor: its name up to the first number, else up to its last dot."""
    segments = name.partition("/")[0].split(".")  # the slot of an optimizer counts with its parameter
    numbers = (at for at, segment in enumerate(segments) if segment.isdecimal())
    return ".".join(segments[: next(numbers, len(segments) - 2) + 1]) or name


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Statistics of the tensors of one layer.

    Attributes:
        name: Name of the layer, as `find_layer` returns it.
        tensor_count: Number of tensors.
        nans: Number of NaNs.
        infs: Number of infinities.
        zeros: Number of zeros.
        min: Smallest finite value; None if there is none.
        max: Largest finite value; None if there is none.
        l2: L2 norm of the finite values.
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
        format: Format of the checkpoint.
        tensors: Statistics of each tensor, in saved order.
        layers: Statistics of each layer, in natural order of names.
        left_out: Names of counters and states of random generators, if these were not asked for.
    """

    source: str
    format: str
    tensors: tuple[TensorStats, ...]
    layers: tuple[LayerStats, ...]
    left_out: tuple[str, ...] = ()

    @property
    def nans(self) -> int:
        """Number of NaNs in all tensors."""
        return sum(tensor.nans for tensor in self.tensors)

    @property
    def infs(self) -> int:
        """Number of infinities in all tensors."""
        return sum(tensor.infs for tensor in self.tensors)

    @property
    def stored(self) -> int:
        """Number of tensors whose statistics the save stored."""
        return sum(tensor.is_stored for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of chosen tensors of one step of a run.

    Attributes:
        number: Number of the step.
        path: Path or URL of the step.
        tensors: Statistics of each tensor.
        left_out: Names of counters and states of random generators, if these were not asked for.
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
        first: First step that the condition is true for, with the tensors that it is true for; None without one.
        examined: Numbers of the steps whose statistics were looked at, in this order.
        is_scan: Whether all steps were looked at, from the oldest until the first.
        warnings: Steps that were removed while they were read, one sentence each.
        left_out: Names of counters and states of random generators in these steps, if these were not asked for.
    """

    root: str
    when: str
    first: StepStats | None
    examined: tuple[int, ...]
    is_scan: bool
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
