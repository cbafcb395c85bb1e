"""Differences between two checkpoints, as frozen values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardckpt.errors import escape
from shardckpt.manifest import split_numbers
from shardckpt.notebook import Result
from shardckpt.offline.results.contents import TensorInfo
from shardckpt.offline.results.tensor_stats import find_layer


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        name: Canonical name.
        kind: How they differ.
        a: Tensor in the first checkpoint; None if it is missing there.
        b: Tensor in the second checkpoint; None if it is missing there.
        max_abs: Largest absolute difference; None if values were not compared.
        max_rel: Largest difference relative to the larger magnitude; None if values were not compared.
        nans: NaN counts in the first and the second.
        l2: L2 norm of the difference, or infinity if it is not finite. None if values were not compared, and for
            counters (steps, batches) and random states, which do not count in layer norms.
        norm: L2 norm over the second tensor's finite elements; None where `l2` is.
    """

    name: str
    kind: Literal["only_in_a", "only_in_b", "dtype", "shape", "values"]
    a: TensorInfo | None
    b: TensorInfo | None
    max_abs: float | None = None
    max_rel: float | None = None
    nans: tuple[int, int] = (0, 0)
    l2: float | None = None
    norm: float | None = None

    @property
    def relative_l2(self) -> float | None:
        """L2 norm of the difference relative to the second tensor's norm; infinite if only the latter is 0."""
        return None if self.l2 is None or self.norm is None else divide_norms(self.l2, self.norm)

    @property
    def layer(self) -> str:
        """Layer name, as `find_layer` returns it."""
        return find_layer(self.name)

    @property
    def is_counter(self) -> bool:
        """Whether the values differ and count in no layer, as a step count."""
        return self.max_abs is not None and self.l2 is None

    @property
    def message(self) -> str:
        """The difference as one sentence."""
        numbers = "" if self.max_abs is None else f"; max abs {self.max_abs:.3g}"
        numbers += "" if self.l2 is None else f", L2 {self.l2:.3g}"
        return _describe_difference(self.name, self.kind, f"{self.a or ''}", f"{self.b or ''}") + numbers


def _describe_difference(name: str, kind: str, a: str, b: str) -> str:
    both = a if a == b else " / ".join(filter(None, (a, b)))
    return f"{escape(name)}: {kind.replace('_', ' ')}: {escape(both)}"


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """Differences between the tensors in one layer.

    Attributes:
        name: Layer name, as `find_layer` returns it.
        tensor_count: How many tensors differ.
        l2: L2 norm of the differences; None if no values were compared.
        norm: L2 norm of these tensors in the second checkpoint; None if no values were compared.
        max_abs: Largest absolute difference; None if no values were compared.
    """

    name: str
    tensor_count: int
    l2: float | None
    norm: float | None
    max_abs: float | None

    @property
    def relative_l2(self) -> float | None:
        """L2 norm of the differences relative to `norm`; infinite if only the latter is 0."""
        return None if self.l2 is None or self.norm is None else divide_norms(self.l2, self.norm)


def divide_norms(distance: float, norm: float) -> float:
    """Return a distance relative to a norm: 0 without a distance, infinite if only the norm is 0."""
    return 0.0 if distance == 0 else distance / norm if norm else math.inf


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A different value that is not a tensor in both checkpoints.

    Attributes:
        name: Canonical name: `param_groups.0.lr`, or a dotted path.
        kind: How they differ.
        a: Text for the value in the first checkpoint; empty if it is missing there.
        b: Text for the value in the second checkpoint; empty if it is missing there.
    """

    name: str
    kind: Literal["only_in_a", "only_in_b", "type", "value"]
    a: str
    b: str

    @property
    def message(self) -> str:
        """The difference as one sentence."""
        return _describe_difference(self.name, self.kind, self.a, self.b)


class NotCompared(NamedTuple):
    """An entry that could not be compared.

    Attributes:
        name: Dotted name.
        reason: Why it could not be compared.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Result):
    """Differences between two checkpoints.

    Attributes:
        a: The first path or URL.
        b: The second path or URL.
        compared: How many tensors are in both.
        equal: How many tensors have the same dtype, shape and bits, or are within the tolerances.
        differences: Tensors that differ or are in only one, by name.
        warnings: Warnings, one sentence each.
        compared_values: How many values in both are not tensors; a sequence of plain values counts as one.
        equal_values: How many values are equal.
        value_differences: Values that differ or are in only one, by name.
        not_compared: Requested entries that could not be compared, by name.
        left_out: Dotted names outside the requested part.
    """

    a: str
    b: str
    compared: int
    equal: int
    differences: tuple[TensorDifference, ...]
    warnings: tuple[str, ...] = ()
    compared_values: int = 0
    equal_values: int = 0
    value_differences: tuple[ValueDifference, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[LayerDifference, ...]:
        """Layers with tensors that differ, without counters, in natural order: numbers in names count as numbers."""
        members: dict[str, list[TensorDifference]] = {}
        for difference in (each for each in self.differences if not each.is_counter):
            members.setdefault(difference.layer, []).append(difference)
        return tuple(_sum_layer(name, members[name]) for name in sorted(members, key=split_numbers))

    @property
    def same(self) -> bool:
        """Whether everything requested was compared, and nothing differs."""
        return not self.differences and not self.value_differences and not self.not_compared


def _sum_layer(name: str, differences: Sequence[TensorDifference]) -> LayerDifference:
    compared = [difference for difference in differences if difference.l2 is not None]
    if not compared:
        return LayerDifference(name, len(differences), None, None, None)
    l2, norm = (math.hypot(*(getattr(each, field) for each in compared)) for field in ("l2", "norm"))
    return LayerDifference(name, len(differences), l2, norm, max(each.max_abs or 0.0 for each in compared))
