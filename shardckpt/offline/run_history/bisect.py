"""Implement `bisect`: the first step of a run that a condition is true for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardckpt.errors import require_bools
from shardckpt.offline.prune import StepInfo, ls
from shardckpt.offline.run_history.condition import parse_condition
from shardckpt.offline.run_history.history import ChosenTensors, StepRemovedError
from shardckpt.offline.write.report import Bisection, StepStats
from shardckpt.storage.resolve_url import as_url


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
    require_bools(scan=scan)
    root, chosen = as_url(root), ChosenTensors.parse(part, include, exclude)
    found: dict[StepInfo, StepStats | None] = {}
    warnings: list[str] = []

    def is_bad(step: StepInfo) -> bool:
        if step not in found:
            measured = chosen.measure(step)
            bad = tuple(tensor for tensor in measured.tensors if condition.is_true(tensor))
            found[step] = replace(measured, tensors=bad) if bad else None
        return found[step] is not None

    while True:
        steps = ls(root).complete
        try:
            first = next(filter(is_bad, steps), None) if scan else _find_first(steps, is_bad)
            break
        except StepRemovedError as error:  # the search begins again with the steps that are left
            warnings.append(str(error))
    examined = tuple(step.number for step in found)
    return Bisection(root, when, None if first is None else found[first], examined, scan, tuple(warnings))


def _find_first(steps: Sequence[StepInfo], is_bad: Callable[[StepInfo], bool]) -> StepInfo | None:
    """Return the first bad step, if all after it are bad; None if the last one is good."""
    if not steps or not is_bad(steps[-1]):
        return None
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        if is_bad(steps[middle]):
            high = middle
        else:
            low = middle + 1
    return steps[high]
