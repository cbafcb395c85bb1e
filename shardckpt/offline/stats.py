"""Implement `stats`: counts, extremes and norms of the values of each tensor."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shardckpt.dtypes import bits
from shardckpt.errors import UsageError
from shardckpt.format.budget import gc_paused
from shardckpt.format.encodings.element_values import measure_values
from shardckpt.format.reader import NamedBases, Reader
from shardckpt.format.registry import open_checkpoint
from shardckpt.format.value_stats import merge_stats
from shardckpt.manifest import TensorEntry
from shardckpt.offline.compare.canonical import read_canonical
from shardckpt.offline.compare.stored_values import BLOCK_BYTES, read_values
from shardckpt.offline.prune import StepInfo, ls
from shardckpt.offline.select.options import parse_part
from shardckpt.offline.write.report import (
    Bisection,
    History,
    LayerStats,
    Statistics,
    StepStats,
    TensorStats,
    find_layer,
    split_numbers,
)
from shardckpt.offline.write.stored_stats import describe_values, find_stored_stats
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming.fqn import select_names


def stats(
    src: str | os.PathLike[str],
    *,
    part: str = "all",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    base: NamedBases = "",
    recompute: bool = False,
) -> Statistics:
    """Return statistics of the values of a checkpoint, in bounded memory and without torch.

    Those that a save stored (`save(..., stats=True)`) are read; others are computed from all values.

    Names are those of `diff`: parameters by the names of the unwrapped model, optimizer state by `<fqn>/<slot>`. A
    tensor that is tied to another one counts under its first name alone.

    Args:
        src: Checkpoint in any readable format: path or URL of a folder or file.
        part: `model`, `optim` or `all`.
        include: Globs of names; empty for all.
        exclude: Globs of names to skip.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        recompute: Compute all statistics from the values.

    Returns:
        Statistics by tensor and by layer.

    Raises:
        UsageError: The source does not exist or is not recognized; a glob matches nothing, or nothing remains.
        CheckpointError: The checkpoint is damaged or incomplete.
        StorageError: Reading failed.

    Examples:
        >>> shardckpt.stats("run/step-100").nans  # doctest: +SKIP
        0
    """
    source = os.fspath(src)
    with gc_paused():
        reader = open_checkpoint(source, base)
        entries = read_canonical(reader, parse_part(part)).tensors
    chosen = select_names(entries, include, exclude)
    tensors = tuple(_measure(name, reader, entries[name], recompute=recompute) for name in chosen)
    return Statistics(source, reader.manifest.format, tensors, _sum_layers(tensors))


def history(
    root: str | os.PathLike[str],
    *,
    part: str = "all",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> History:
    """Return statistics of tensors over the complete steps of a run.

    Those that a save stored are read; others are computed from all values, as `stats` does.

    Args:
        root: Path or URL of the run's folder.
        part: `model`, `optim` or `all`.
        include: Globs of names; empty for all.
        exclude: Globs of names to skip.

    Raises:
        UsageError: The folder is not a run; in a step a glob matches nothing, or nothing remains.
        CheckpointError: A step is damaged.
        StorageError: Reading failed.

    Examples:
        >>> [step.tensors[0].l2 for step in shardckpt.history("run", include=["*.weight"]).steps]  # doctest: +SKIP
    """
    root, chosen = os.fspath(root), _Chosen(part, tuple(include), tuple(exclude))
    return History(root, tuple(map(chosen.measure, ls(root).complete)))


def bisect(
    root: str | os.PathLike[str],
    *,
    when: str,
    scan: bool = False,
    part: str = "all",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Bisection:
    """Find the first step of a run with a tensor that a condition is true for.

    A bisection assumes that the condition stays true once it is, as NaN in weights does: it looks at the newest step,
    and then at one in the middle of those that may be the first. A condition that becomes false again needs `scan`.

    Args:
        root: Path or URL of the run's folder.
        when: `nan`, `inf`, or a comparison of a statistic and a number: `l2>100`, `max>=1e4`, `nans>3`. The statistics
            are `nans`, `infs`, `zeros`, `min`, `max`, `mean`, `l2`; the comparisons `<`, `<=`, `>`, `>=`.
        scan: Look at every step, from the oldest on, until the condition is true.
        part: `model`, `optim` or `all`.
        include: Globs of names; empty for all.
        exclude: Globs of names to skip.

    Raises:
        UsageError: The condition is not one of these; the folder is not a run; in a step a glob matches nothing.
        CheckpointError: A step is damaged.
        StorageError: Reading failed.

    Examples:
        >>> shardckpt.bisect("run", when="nan").first  # doctest: +SKIP
    """
    condition = parse_condition(when)
    root, chosen = os.fspath(root), _Chosen(part, tuple(include), tuple(exclude))
    steps = ls(root).complete
    found: dict[int, StepStats | None] = {}

    def is_bad(at: int) -> bool:
        measured = chosen.measure(steps[at])
        bad = tuple(tensor for tensor in measured.tensors if condition.is_true(tensor))
        found[at] = replace(measured, tensors=bad) if bad else None
        return bool(bad)

    first = next(filter(is_bad, range(len(steps))), None) if scan else _find_first(len(steps), is_bad)
    examined = tuple(steps[at].number for at in found)
    return Bisection(root, when, None if first is None else found[first], examined, scan)


def _find_first(count: int, is_bad: Callable[[int], bool]) -> int | None:
    """Return the first bad position, if all after it are bad; None if the last one is good."""
    if not count or not is_bad(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if is_bad(middle):
            high = middle
        else:
            low = middle + 1
    return high


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Tensors of each step whose statistics are wanted."""

    part: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def measure(self, step: StepInfo) -> StepStats:
        found = stats(step.path, part=self.part, include=self.include, exclude=self.exclude)
        return StepStats(step.number, step.path, found.tensors)


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison of a statistic of a tensor and a number.

    Attributes:
        stat: Name of the statistic.
        is_met: Comparison of its value and the limit.
        limit: Number to compare with.
    """

    stat: str
    is_met: Callable[[float, float], bool]
    limit: float

    def is_true(self, tensor: TensorStats) -> bool:
        """Return whether the condition is true for a tensor; it is false without a value."""
        value = getattr(tensor, self.stat)
        return value is not None and self.is_met(value, self.limit)


STATS = ("nans", "infs", "zeros", "min", "max", "mean", "l2")
"""Statistics that conditions and histories have."""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(
    rf"\s*({'|'.join(STATS)})\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.ASCII
)
_NAMED = {"nan": Condition("nans", operator.gt, 0), "inf": Condition("infs", operator.gt, 0)}


def parse_condition(text: str) -> Condition:
    """Return the condition that a text states; nothing of the text is evaluated.

    Raises:
        UsageError: The text is not a condition.
    """
    if text in _NAMED:
        return _NAMED[text]
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(
            "a condition must be nan, inf, or a statistic, a comparison and a number",
            found=text,
            expected=f"nan, inf, or such as l2>100 with one of {', '.join(STATS)} and of {' '.join(_COMPARISONS)}",
        )
    return Condition(match[1], _COMPARISONS[match[2]], float(match[3]))


def _measure(name: str, reader: Reader, entry: TensorEntry, *, recompute: bool) -> TensorStats:
    found = None if recompute else find_stored_stats(reader, entry)
    if found is not None:
        return describe_values(name, entry, found, is_stored=True)
    [entry] = locate(reader, reader.manifest, [entry])
    blocks = read_values((reader, entry), max(BLOCK_BYTES * 8 // bits(entry.stored), 1))
    computed = merge_stats(measure_values(block, entry.dtype) for block in blocks)
    return describe_values(name, entry, computed, is_stored=False)


def _sum_layers(tensors: Iterable[TensorStats]) -> tuple[LayerStats, ...]:
    """Return the layers in natural order of their names."""
    members: dict[str, list[TensorStats]] = {}
    for tensor in tensors:
        members.setdefault(find_layer(tensor.name), []).append(tensor)
    return tuple(_sum_layer(name, members[name]) for name in sorted(members, key=split_numbers))


def _sum_layer(name: str, tensors: Sequence[TensorStats]) -> LayerStats:
    least = [tensor.min for tensor in tensors if tensor.min is not None]
    largest = [tensor.max for tensor in tensors if tensor.max is not None]
    return LayerStats(
        name=name,
        tensors=len(tensors),
        nans=sum(tensor.nans for tensor in tensors),
        infs=sum(tensor.infs for tensor in tensors),
        zeros=sum(tensor.zeros for tensor in tensors),
        min=min(least, default=None),
        max=max(largest, default=None),
        l2=math.hypot(*(tensor.l2 for tensor in tensors)),
    )
