"""Decide which steps of a run to keep, without I/O."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from numbers import Real
from types import MappingProxyType
from typing import Literal, NamedTuple, TypedDict

from typing_extensions import Unpack

from shardckpt.errors import AmbiguousError, UsageError, require_keywords

ORPHAN_TTL_S = 24 * 3600.0  # an unfinished save without changes for so long counts as an orphan


PAUSE_S = 30 * 24 * 3600.0  # longer intervals between two steps are not trusted

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(rf"(\d+(?:\.\d+)?) ?([{''.join(_SECONDS)}])")
_NO_UNIT = re.compile(r"-?\d+(\.\d+)?")


class SavedStep(NamedTuple):
    """A step's properties for the retention rules."""

    number: int
    is_complete: bool = True  # whether it can be loaded; the rules ignore other steps, and do not remove them
    saved_at: float | None = None  # when its save started, in seconds since the epoch; None if unknown
    metrics: Mapping[str, float] = MappingProxyType({})  # saved with it, by name
    # How often the run had returned to an older step before it. A step in a later branch is newer than one in an
    # earlier branch, whatever their numbers.
    branch: int = 0


class RetentionParams(TypedDict, total=False):
    """Keyword parameters for every function that removes steps; `prune` describes them."""

    keep_last: int | None
    keep_every: int | None
    keep_best: int | None
    metric: str
    mode: Literal["min", "max"]
    keep_for: timedelta | str | None


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules that keep steps; others are deleted. Without rules all steps are kept."""

    keep_last: int | None = None  # newest steps to keep
    keep_every: int | None = None  # steps whose number is a multiple of this are kept
    # Best steps to keep by metric; the later of equal ones. A NaN is worse than any number. Steps without the metric
    # cannot be ranked: they are kept if this is the only rule, else the other rules decide.
    keep_best: int | None = None
    mode: Literal["min", "max"] = "min"  # whether the best step has the smallest or the largest metric
    keep_for_s: float | None = None  # steps saved less than this number of seconds ago are kept
    metric: str = "loss"  # for `keep_best`

    @classmethod
    def from_params(cls, function: str, /, **rules: Unpack[RetentionParams]) -> Retention:
        """Return the rules from a user's call."""
        require_keywords(function, rules, RetentionParams.__annotations__)
        keep_for_s = parse_age("keep_for", rules.pop("keep_for", None))
        if keep_for_s == 0:
            raise UsageError("`keep_for` must be longer than nothing", found="0", expected="a time such as 7d")
        return cls(**rules, keep_for_s=keep_for_s)  # type: ignore[misc]  # mypy does not see that `keep_for` is gone

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"`{name}` must be a number of steps", found=repr(value), expected="an integer from 1")
        if self.keep_for_s is not None and not _is_duration(self.keep_for_s):
            raise UsageError("`keep_for` must be a time", found=repr(self.keep_for_s), expected="more than 0 seconds")
        if not isinstance(self.metric, str):
            raise UsageError("`metric` must be the name of a metric", found=repr(self.metric))
        if self.mode not in ("min", "max"):
            raise UsageError("the mode is unknown", found=self.mode, expected="min or max")

    def encode(self) -> str:
        """Return the rules as text that a step stores; empty for the default."""
        default = Retention()
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name: value for name, value in given.items() if value != getattr(default, name)}
        return json.dumps(changed) if changed else ""

    @property
    def has_ranking(self) -> bool:
        """Whether a metric or a mode was chosen to rank steps."""
        return self.keep_best is not None or (self.metric, self.mode) != ("loss", "min")

    @property
    def is_needed(self) -> bool:
        """Whether any rule is set."""
        return self.keep_best is not None or self.has_others

    @property
    def has_others(self) -> bool:
        """Whether any rule is set that needs no metric."""
        return any(rule is not None for rule in (self.keep_last, self.keep_every, self.keep_for_s))


def decode_retention(text: str) -> Retention | None:
    """Return the rules that a step stores; None without any, or if the text is damaged."""
    try:
        return Retention(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def _is_duration(seconds: object) -> bool:
    """Return True for valid seconds, including infinity."""
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        return False
    try:
        return float(seconds) >= 0
    except OverflowError:
        return False


def parse_age(name: str, time: timedelta | str | int | None) -> float | None:
    """Parse an age in seconds; None stays None."""
    text = str(time).strip() if isinstance(time, (str, Real)) else ""
    match = _TIME.fullmatch(text)
    if match:
        return float(match[1]) * _SECONDS[match[2]]
    if time is None or text == "0":
        return None if time is None else 0.0
    if _NO_UNIT.fullmatch(text):  # a reader would have to guess: 7 days, or 7 seconds; 0 needs no unit
        units = ", ".join(f"{text}{unit}" for unit in "hd")
        raise UsageError(f"`{name}` must have a unit", found=repr(time), expected=f"{units} or {text}w")
    if isinstance(time, timedelta) and time >= timedelta(0):
        return time.total_seconds()
    raise UsageError(f"`{name}` must be a time", found=repr(time), expected="a number and s, m, h, d or w, such as 7d")


def with_trusted_times(steps: Iterable[SavedStep], now: float, *, may_be_over: bool = False) -> list[SavedStep]:
    """Return steps with corrected times, robust to one wrong clock."""
    # A step's age is computed from the intervals between later steps, and from its own time; the smaller counts. An
    # interval that is negative or longer than `PAUSE_S` counts as zero, since a paused run and a wrong clock look the
    # same. No step is older than one that was saved before it.
    trusted, age, later = [], 0.0, now
    longest = math.inf if may_be_over else PAUSE_S  # after the run's end, any time counts in full
    for step in sorted(steps, key=_age_order, reverse=True):
        if step.saved_at is not None:
            passed = later - step.saved_at
            age += passed if 0 < passed <= longest else 0.0
            later, longest = step.saved_at, PAUSE_S
            step = step._replace(saved_at=max(step.saved_at, now - age))
        trusted.append(step)
    return _without_times_behind(trusted[::-1], now)


def _without_times_behind(steps: Iterable[SavedStep], now: float) -> list[SavedStep]:
    """Return a run's steps in order, none older than earlier steps."""
    ordered, latest = [], -math.inf
    for step in steps:
        if step.saved_at is not None:
            saved_at = max(step.saved_at, latest)
            step = step._replace(saved_at=saved_at)
            latest = saved_at if saved_at <= now else latest  # a time in the future is ignored
        ordered.append(step)
    return ordered


def steps_to_delete(
    steps: Iterable[SavedStep], rules: Retention, *, now: float, protected: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the steps to delete, oldest first; never the newest complete one."""
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
    """Require that at least one step has the metric."""
    found = {name for step in steps for name in step.metrics}
    if metric not in found:
        raise UsageError(
            f"`keep_best` goes by the metric {metric!r}, which no step has",
            found=", ".join(sorted(found)) or "no metrics",
            fix="Name a metric that was saved, or save this one with the steps: NaN where it is not known yet.",
        )


_DEFAULT_METRIC = "loss"  # of `Checkpointer.best()`
# Name endings of metrics that say how long an evaluation took.
_TIMINGS = ("runtime", "_per_second", "_time")


def choose_ranking(
    steps: Iterable[SavedStep], metric: str | None, mode: Literal["min", "max"] | None, where: str
) -> tuple[str, Literal["min", "max"]]:
    """Return the metric that ranks steps, and its mode; UsageError if several are possible."""
    names = sorted({name for step in steps for name in step.metrics if not name.endswith(_TIMINGS)})
    if metric is None and len(names) > 1 and _DEFAULT_METRIC in names:  # as `Checkpointer.best()` does
        metric = _DEFAULT_METRIC
    if metric is None:
        if len(names) != 1:
            what = "no step has a metric" if not names else "the steps have several metrics"
            fix = f"Name one: @best:max:{names[0]} or @best:min:{names[0]}." if names else "Give metrics to each save."
            raise AmbiguousError(f"{what}, so that none is the best", where=where, found=", ".join(names), fix=fix)
        (metric,) = names
    if mode is None and metric in names and not metric.endswith("loss"):
        raise AmbiguousError(
            "the best step may have the smallest or the largest metric",
            where=where,
            found=metric,
            expected=f"@best:max:{metric} or @best:min:{metric}",
        )
    return metric, mode or "min"


def find_best(steps: Iterable[SavedStep], metric: str, mode: Literal["min", "max"]) -> int | None:
    """Return the complete step with the best metric, the later of equal ones; None without a complete step."""
    rules = Retention(keep_best=1, metric=metric, mode=mode)
    complete = sorted((step for step in steps if step.is_complete), key=_age_order)
    ranked = [step for step in complete if not math.isnan(step.metrics.get(metric, math.nan))]
    if complete and not ranked:
        names = ", ".join(sorted({name for step in complete for name in step.metrics}))
        fix = 'Name a metric that was saved: best("accuracy", mode="max"), or Checkpointer(metric=, mode=).'
        raise UsageError(
            f"no step has a number for the metric {metric!r}",
            found=names or "no metrics",
            fix=fix if names else "Give metrics to each save.",
        )
    return next(iter(_best(ranked, 1, rules)), None)


def _best(steps: Sequence[SavedStep], count: int, rules: Retention) -> list[int]:
    ranked = [step for step in reversed(steps) if rules.metric in step.metrics]  # the later of equal steps comes first
    best = sorted(ranked, key=lambda step: _badness(step.metrics[rules.metric], rules.mode))[:count]
    unranked = [] if rules.has_others else [step for step in steps if rules.metric not in step.metrics]
    return [step.number for step in (*best, *unranked)]


def _badness(value: float, mode: str) -> tuple[bool, float]:
    if math.isnan(value):
        return True, 0.0
    return False, value if mode == "min" else -value


def _is_recent(step: SavedStep, since: float) -> bool:
    return step.saved_at is None or step.saved_at > since  # a step of unknown age is not old


def is_expired(changed_at: float | None, now: float, age_s: float | None = None) -> bool:
    """Return True if an orphan is old enough to delete."""
    return changed_at is not None and now - changed_at > (ORPHAN_TTL_S if age_s is None else age_s)
