"""Read a condition on a tensor's statistic, such as `l2>100`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from shardckpt.errors import UsageError
from shardckpt.offline.results.tensor_stats import STATS, TensorStats


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
