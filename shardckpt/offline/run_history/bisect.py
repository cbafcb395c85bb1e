"""Implement `bisect`: find a run's first step that meets a condition."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardckpt.errors import UsageError, require_bools
from shardckpt.offline.prune import StepInfo
from shardckpt.offline.results.tensor_stats import STATS, Bisection, StepStats, TensorStats
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
    """Find a run's first step with a tensor that meets a condition.

    A bisection assumes that the condition stays true once it is, as NaN in weights does. It examines the newest step,
    then the middle of the remaining steps. A condition that becomes false again needs `scan`.

    Statistics leave out NaN and Inf, so a step with such values may follow a step with a large norm. The bisection
    therefore finds the first step with such values or a true condition. From there it examines every step until the
    condition is true.

    Args:
        root: Path or URL of the run's folder; `RUN@1000..2000` searches some of its steps.
        when: `nan`, `inf`, or a statistic, a comparison and a number: `l2>100`, `max>=1e4`, `nans>3`. The statistics
            are `nans`, `infs`, `zeros`, `min`, `max`, `mean`, `l2`; the comparisons `<`, `<=`, `>`, `>=`.
        scan: Examine every step, from the oldest on, until the condition is true.
        part: `model` or `optim`; everything if empty or `all`. Without `all` or `include`, counters (steps, batches)
            are skipped, and integers and single numbers outside model and optimizer, such as random states.
        include: Globs for names; empty for all.
        exclude: Globs for names to skip.

    Raises:
        UsageError: The condition is invalid; the folder is not a run, or has no complete step; a glob matches nothing
            in a step.
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
        except StepRemovedError as error:  # search again in the remaining steps
            warnings.append(str(error))
    examined = tuple(step.number for step in found)
    left_out = tuple(dict.fromkeys(name for step in found.values() for name in step.left_out))
    if first is None:
        return Bisection(root, when, None, examined, scan, tuple(warnings), left_out)
    bad = tuple(tensor for tensor in found[first].tensors if condition.is_true(tensor))
    return Bisection(root, when, replace(found[first], tensors=bad), examined, scan, tuple(warnings), left_out)


def _drop_good(steps: Sequence[StepInfo], is_bad: Callable[[StepInfo], bool]) -> Sequence[StepInfo]:
    """Return the steps from the first bad one on, if all after it are bad; empty if the last is good."""
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


@dataclass(frozen=True, slots=True)
class Condition:
    """Comparison between a tensor's statistic and a number."""

    stat: str
    is_met: Callable[[float, float], bool]  # called with value and limit
    limit: float

    def is_true(self, tensor: TensorStats) -> bool:
        """Return whether the condition is true for a tensor; it is false without a value."""
        value = getattr(tensor, self.stat)
        return value is not None and self.is_met(value, self.limit)

    def is_undecided(self, tensor: TensorStats) -> bool:
        """Return whether values that the statistic skips may hide that the condition was true before."""
        # A growing weight becomes Inf, then NaN: NaN counts neither in its norm nor among the infinities.
        if self.stat == "nans":
            return False
        return tensor.nans > 0 or (self.stat != "infs" and tensor.infs > 0)


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
    """Parse a condition without evaluating it as code."""
    if isinstance(text, str) and text in _NAMED:
        return _NAMED[text]
    match = _CONDITION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(
            "a condition must be nan, inf, or a statistic, a comparison and a number",
            found=text,
            expected=f"nan, inf, or such as l2>100, with {', '.join(STATS)} and {' '.join(_COMPARISONS)}",
        )
    return Condition(match[1], _COMPARISONS[match[2]], float(match[3]))
