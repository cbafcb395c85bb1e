"""Predict how long a save takes in each place, and choose the places that a deadline leaves time for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardckpt.native.step_copies import FAILURES, ROOT, TWO_NODES

MARGIN = 1.5  # a save counts as this much slower than the slowest of the past ones
_LARGE = 0.5  # fraction of the most bytes: latency rules smaller saves, such as those with a base
_REPORT_AT = 0.1  # fraction of the grace that is left when its result is reported
_WAIT_UNTIL = 0.5  # fraction of the grace for which a step is waited for in any case

LEAVING = "leaving nodes"  # what a step may survive, besides FAILURES: the loss of all nodes with a notice


class PastSave(NamedTuple):
    """A save that was committed: this rank's bytes, and the seconds until the commit."""

    nbytes: int
    seconds: float


class ExpectedPlace(NamedTuple):
    """A place and the seconds that a save there takes; None if no save there has ended."""

    name: str
    seconds: float | None


class ChosenPlaces(NamedTuple):
    """Places for a save before a deadline."""

    chosen: str  # the farthest place that fits; if none fits, the nearest one
    names: tuple[str, ...]  # all places to save to, the nearest first
    fits: bool  # whether the chosen place fits


def predict_seconds(saves: Sequence[PastSave]) -> float | None:
    """Return the seconds for a save as large as the largest of the past ones; None without any."""
    if not saves:
        return None
    most = max(save.nbytes for save in saves)
    large = [save for save in saves if save.nbytes >= most * _LARGE]
    return MARGIN * max(save.seconds * (most / save.nbytes if save.nbytes else 1.0) for save in large)


def predict_places(
    saves: Mapping[str, Sequence[PastSave]], names: Sequence[str], elapsed_s: float | None = None
) -> tuple[ExpectedPlace, ...]:
    """Predict the seconds for each place.

    Args:
        saves: Past saves by place. Those of a tier behind the nearest one are copies of its captures.
        names: Places, the nearest first.
        elapsed_s: Seconds since a save in the root started that still runs, and that the next one waits for.
    """
    expected: list[ExpectedPlace] = []
    for name in names:
        seconds = predict_seconds(saves.get(name, ()))
        before = expected[0].seconds if expected and name != ROOT else 0.0
        if name == ROOT and elapsed_s is not None and seconds is not None:
            before = max(seconds - elapsed_s, 0.0)
        expected.append(ExpectedPlace(name, None if seconds is None or before is None else before + seconds))
    return tuple(expected)


def choose_places(expected: Sequence[ExpectedPlace], left_s: float | None) -> ChosenPlaces:
    """Choose the places for a save.

    The nearest place takes it in any case, since it is the first to be safe. A place that no save has measured is tried
    in addition to the chosen one if it is farther.

    Args:
        expected: Places with their seconds, the nearest first.
        left_s: Seconds until the deadline; None if it is unknown.
    """
    if left_s is None:
        fitting = [len(expected) - 1]
    else:
        fitting = [at for at, place in enumerate(expected) if place.seconds is not None and place.seconds <= left_s]
    at = fitting[-1] if fitting else 0
    tried = [place.name for place in expected[at + 1 :] if place.seconds is None and left_s is not None and left_s > 0]
    names = dict.fromkeys([expected[0].name, expected[at].name, *tried])
    return ChosenPlaces(expected[at].name, tuple(names), bool(fitting))


def find_step_limit(grace_s: float, nearest_s: float | None) -> float:
    """Return how many seconds a running step must leave: with fewer, a save in the nearest place no longer fits."""
    return max(_REPORT_AT * grace_s, min(nearest_s or 0.0, _WAIT_UNTIL * grace_s))


def find_report_time(left_s: float | None) -> float | None:
    """Return after how many seconds a save's result is reported at the latest; None if only its end counts."""
    return None if left_s is None or left_s <= 0 else left_s * (1 - _REPORT_AT)


def find_survived_failures(
    committed: Sequence[str], in_root: Sequence[str], machines: int, *, is_off_leaving: bool
) -> tuple[str, ...]:
    """Return what a step survives.

    Args:
        committed: Places that have the step.
        in_root: What files in the root survive.
        machines: On how many machines each file of a capture is.
        is_off_leaving: Whether captures of nodes with a notice have copies on nodes without one.
    """
    in_tiers = FAILURES[: max(machines, 1)] if any(name != ROOT for name in committed) else ()
    survived = {*in_tiers, *(in_root if ROOT in committed else ())}
    is_left = TWO_NODES in in_root if ROOT in committed else False
    named = tuple(each for each in FAILURES if each in survived)
    return (*named, LEAVING) if is_left or (is_off_leaving and in_tiers) else named
