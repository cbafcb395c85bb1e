"""Implement `bisect`: the first step of a run that a condition is true for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardckpt.errors import require_bools
from shardckpt.offline.prune import StepInfo
from shardckpt.offline.results.tensor_stats import Bisection, StepStats
from shardckpt.offline.run_history.condition import parse_condition
from shardckpt.offline.run_history.history import ChosenTensors, StepRemovedError, list_complete
from shardckpt.storage.resolve_url import as_url


def bisect(
    root: str | os.PathLike[str],
    *,
    when: str,
    scan: bool = False,
    part: str = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Bisection:
    """Find the first step of a run with a tensor that a condition is true for.

    A bisection assumes that the condition stays true once it is, as NaN in weights does: it looks at the newest step,
    and then at one in the middle of those that may be the first. A condition that becomes false again needs `scan`.
    Statistics leave NaN and Inf out, so a step in which a tensor has them may follow one with a large norm: the
    bisection finds the first step with a tensor that the condition is true for or that has such values, and then looks
    at each step from there on until the condition is true.

    Args:
        root: Path or URL of the run's folder.
        when: `nan`, `inf`, or a comparison of a statistic and a number: `l2>100`, `max>=1e4`, `nans>3`. The statistics
            are `nans`, `infs`, `zeros`, `min`, `max`, `mean`, `l2`; the comparisons `<`, `<=`, `>`, `>=`.
        scan: Look at every step, from the oldest on, until the condition is true.
        part: `model` or `optim`; everything if empty or `all`. Counters (of steps, of batches), and integers and
            single numbers outside of model and optimizer such as states of random generators, are left out unless it is
            `all` or `include` is given.
        include: Globs of names; empty for all.
        exclude: Globs of names to skip.

    Raises:
        UsageError: The condition is not one of these; the folder is not a run, or has no complete step; in a step a
            glob matches nothing.
        CheckpointError: A step is damaged.
        StorageError: Reading failed.

    Examples:
        >>> shardckpt.bisect("run", when="nan").first  # doctest: +SKIP
    """
    condition = parse_condition(when)
    require_bools(scan=scan)
    root, chosen = as_url(root), ChosenTensors.parse(part, include, exclude)
    found: dict[StepInfo, StepStats] = {}
    warnings: list[str] = []

    def measure(step: StepInfo) -> StepStats:
        if step not in found:
            found[step] = chosen.measure(step)
        return found[step]

    def is_bad(step: StepInfo) -> bool:
        return any(condition.is_true(tensor) for tensor in measure(step).tensors)

    def may_follow_bad(step: StepInfo) -> bool:
        return is_bad(step) or any(condition.is_undecided(tensor) for tensor in measure(step).tensors)

    while True:
        steps = list_complete(root)
        try:
            candidates = steps if scan else _drop_good(steps, may_follow_bad)
            first = next(filter(is_bad, candidates), None)
            break
        except StepRemovedError as error:  # the search begins again with the steps that are left
            warnings.append(str(error))
    examined = tuple(step.number for step in found)
    left_out = tuple(dict.fromkeys(name for step in found.values() for name in step.left_out))
    if first is None:
        return Bisection(root, when, None, examined, scan, tuple(warnings), left_out)
    bad = tuple(tensor for tensor in found[first].tensors if condition.is_true(tensor))
    return Bisection(root, when, replace(found[first], tensors=bad), examined, scan, tuple(warnings), left_out)


def _drop_good(steps: Sequence[StepInfo], is_bad: Callable[[StepInfo], bool]) -> Sequence[StepInfo]:
    """Return the steps from the first bad one on, if all after it are bad; none if the last one is good."""
    if not is_bad(steps[-1]):
        return ()
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        if is_bad(steps[middle]):
            high = middle
        else:
            low = middle + 1
    return steps[high:]
