"""Which steps of a run are kept. Pure: facts in, numbers of steps out."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from types import MappingProxyType
from typing import Literal, NamedTuple

from shardckpt.errors import UsageError

ORPHAN_TTL_S = 24 * 3600.0
"""Seconds without a change after which what a save left unfinished belongs to nobody any more."""


PAUSE_S = 30 * 24 * 3600.0
"""Seconds between two steps beyond which nobody knows how much time has passed."""

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(rf"(\d+(?:\.\d+)?) ?([{''.join(_SECONDS)}]?)")


class SavedStep(NamedTuple):
    """What the decision depends on.

    Attributes:
        number: The step.
        is_complete: Whether it can be loaded. What cannot counts for nothing, and is not removed by these rules.
        saved_at: When its save began, in seconds since the epoch; None where not known.
        metrics: Numbers that were saved with it, by name.
        branch: How often the run had gone back to an older step before. A step of a later branch is newer than one of
            an earlier branch, whatever their numbers.
    """

    number: int
    is_complete: bool = True
    saved_at: float | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    branch: int = 0


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules, each of which keeps steps; a step that none keeps goes. Without any rule all are kept.

    Attributes:
        keep_last: So many of the newest.
        keep_every: Those whose number this divides.
        keep_best: So many of the best by their metric; of equal ones the later. A NaN is worse than any number. Steps
            without the metric cannot be ranked: alone, this rule keeps them; beside others, those decide.
        mode: Whether the best has the smallest metric or the largest.
        keep_for_s: Those saved less than so many seconds ago.
        metric: Name of what `keep_best` goes by.

    Raises:
        UsageError: A rule that would mean nothing.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    mode: Literal["min", "max"] = "min"
    keep_for_s: float | None = None
    metric: str = "loss"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"`{name}` must be a number of steps", found=repr(value), expected="an integer from 1")
        if self.keep_for_s is not None and not _is_duration(self.keep_for_s):
            raise UsageError("`keep_for` must be a time", found=repr(self.keep_for_s), expected="more than 0 seconds")
        if self.keep_best is not None and not isinstance(self.metric, str):
            raise UsageError("`metric` must be the name of a metric", found=repr(self.metric))
        if self.mode not in ("min", "max"):
            raise UsageError("the mode is unknown", found=self.mode, expected="min or max")

    @property
    def is_needed(self) -> bool:
        """Whether there is any rule."""
        return self.keep_best is not None or self.has_others

    @property
    def has_others(self) -> bool:
        """Whether there is a rule that needs no metric."""
        return any(rule is not None for rule in (self.keep_last, self.keep_every, self.keep_for_s))


def _is_duration(seconds: object) -> bool:
    """Return True for a number of seconds that a clock can count, infinity included."""
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        return False
    try:
        return float(seconds) >= 0
    except OverflowError:
        return False


def parse_seconds(time: timedelta | float | str | None) -> float | None:
    """Return a time in seconds; None stays None.

    Args:
        time: A timedelta, seconds, or text: a number and `s`, `m`, `h`, `d` or `w`.

    Raises:
        UsageError: It is not a time.
    """
    seconds = _seconds(time)
    if seconds == 0:
        raise UsageError("`keep_for` must be longer than nothing", found=repr(time), expected="a time such as 7d")
    return seconds


def _seconds(time: timedelta | float | str | None) -> float | None:
    if isinstance(time, timedelta):
        return time.total_seconds()
    if not isinstance(time, str):
        return time
    match = _TIME.fullmatch(time.strip())
    if not match:
        raise UsageError("this is not a time", found=repr(time), expected="a number and s, m, h, d or w, such as 7d")
    return float(match[1]) * _SECONDS[match[2]]


def with_trusted_times(steps: Iterable[SavedStep], now: float, *, may_be_over: bool = False) -> list[SavedStep]:
    """Return steps none of which is old because of one clock that is wrong.

    The age of a step is taken from the times between the steps behind it, as well as from its own time, whichever makes
    it younger. A time that runs backwards, or that is longer than `PAUSE_S`, counts for nothing: a run that was paused
    and a clock that is wrong look the same. No step is older than one that was saved before it.

    Args:
        steps: All of a run.
        now: In seconds since the epoch.
        may_be_over: The run may have ended, so that the time since its newest step counts however long it is.
    """
    trusted, age, later = [], 0.0, now
    longest = math.inf if may_be_over else PAUSE_S
    for step in sorted(steps, key=_age_order, reverse=True):
        if step.saved_at is not None:
            passed = later - step.saved_at
            age += passed if 0 < passed <= longest else 0.0
            later, longest = step.saved_at, PAUSE_S
            step = step._replace(saved_at=max(step.saved_at, now - age))
        trusted.append(step)
    return _without_times_behind(trusted[::-1], now)


def _without_times_behind(steps: Iterable[SavedStep], now: float) -> list[SavedStep]:
    """Return steps in the order of a run, each no older than those before it whose time is not to come."""
    ordered, latest = [], -math.inf
    for step in steps:
        if step.saved_at is not None:
            saved_at = max(step.saved_at, latest)
            step = step._replace(saved_at=saved_at)
            latest = saved_at if saved_at <= now else latest
        ordered.append(step)
    return ordered


def steps_to_delete(
    steps: Iterable[SavedStep], rules: Retention, *, now: float, protected: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the steps to delete, oldest first; never the newest complete one.

    Args:
        steps: All of a run; those that are not complete count for nothing.
        rules: What is kept.
        now: In seconds since the epoch.
        protected: Steps that stay whatever the rules say.

    Raises:
        UsageError: `keep_best` goes by a metric that no complete step has.
    """
    complete = sorted({step.number: step for step in steps if step.is_complete}.values(), key=_age_order)
    if not rules.is_needed or not complete:
        return ()
    kept = {complete[-1].number, *protected}
    if rules.keep_last is not None:
        kept.update(step.number for step in complete[-rules.keep_last :])
    if rules.keep_every is not None:
        kept.update(step.number for step in complete if step.number % rules.keep_every == 0)
    if rules.keep_best is not None:
        require_metric(complete, rules.metric)
        kept.update(_best(complete, rules.keep_best, rules))
    if rules.keep_for_s is not None:
        kept.update(step.number for step in complete if _is_recent(step, now - rules.keep_for_s))
    return tuple(step.number for step in complete if step.number not in kept)


def _age_order(step: SavedStep) -> tuple[int, int]:
    return step.branch, step.number


def require_metric(steps: Iterable[SavedStep], metric: str) -> None:
    """Refuse to rank steps none of which has the metric.

    Raises:
        UsageError: None has it; the message names the metrics that they have.
    """
    found = {name for step in steps for name in step.metrics}
    if metric not in found:
        raise UsageError(
            f"`keep_best` goes by the metric {metric!r}, which no step has",
            found=", ".join(sorted(found)) or "no metrics",
            fix="Name a metric that was saved, or save this one with the steps: NaN where it is not known yet.",
        )


def _best(steps: Sequence[SavedStep], count: int, rules: Retention) -> list[int]:
    ranked = [step for step in reversed(steps) if rules.metric in step.metrics]  # of equal ones the later comes first
    best = sorted(ranked, key=lambda step: _badness(step.metrics[rules.metric], rules.mode))[:count]
    unranked = [] if rules.has_others else [step for step in steps if rules.metric not in step.metrics]
    return [step.number for step in (*best, *unranked)]


def _badness(value: float, mode: str) -> tuple[bool, float]:
    if math.isnan(value):
        return True, 0.0
    return False, value if mode == "min" else -value


def _is_recent(step: SavedStep, since: float) -> bool:
    return step.saved_at is None or step.saved_at > since  # of unknown age is not old


def is_expired(changed_at: float | None, now: float) -> bool:
    """Return True if an orphan is old enough to delete.

    Args:
        changed_at: When anything in it last changed, in seconds since the epoch; None where not known.
        now: In seconds since the epoch.
    """
    return changed_at is not None and now - changed_at > ORPHAN_TTL_S
