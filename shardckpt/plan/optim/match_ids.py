"""Match an optimizer's ids to parameter names; reject ambiguous matches."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

# Fix for ids without names.
GIVE_NAMES = (
    "Give --param-names FILE: a JSON array of names, such as [n for n, _ in model.named_parameters()] if the"
    " optimizer was built over model.parameters(), or an object from id to name."
)

# Warning for names that follow the model's order.
BY_ORDER = (
    "the optimizer's ids were taken in the order of the model's state dict, since shapes alone do not distinguish them:"
    " where the optimizer was built in another order, give --param-names"
)


def match_by_kind(wanted: Sequence[object], offered: Sequence[tuple[str, object]]) -> list[str] | None:
    """Match names to properties in any order, if unambiguous; None matches anything."""
    asked = Counter(kind for kind in wanted if kind is not None)
    held = Counter(kind for _, kind in offered)
    unknown, unclaimed = len(wanted) - asked.total(), len(offered) - asked.total()
    if any(count > 1 or held[kind] != 1 for kind, count in asked.items()) or unknown > 1:
        return None
    if unknown == 1 and unclaimed != 1:
        return None
    names = {kind: name for name, kind in offered if kind in asked}
    left = next((name for name, kind in offered if kind not in asked), "")
    return [left if kind is None else names[kind] for kind in wanted]


def match_in_order(groups: Sequence[Sequence[object]], offered: Sequence[tuple[str, object]]) -> list[list[str]] | None:
    """Match names to each group's properties in order, if unambiguous; None matches anything."""
    # Each group takes its names before the next group. A match is unique if the leftmost and the rightmost one are
    # equal, so two passes over a group are enough.
    free: dict[object, list[int]] = {None: list(range(len(offered)))}
    for position, (_, kind) in enumerate(offered):
        free.setdefault(kind, []).append(position)
    match: list[list[str]] = []
    for wanted in groups:
        chosen = _leftmost(wanted, free)
        if chosen is None or chosen != _rightmost(wanted, free, len(offered)):
            return None
        for position in chosen:
            for kind in (None, offered[position][1]):
                positions = free[kind]
                del positions[bisect_left(positions, position)]
        match.append([offered[position][0] for position in chosen])
    return match


def has_match(wanted: Sequence[object], offered: Sequence[tuple[str, object]]) -> bool:
    """Return True if names match the properties in any order; None matches anything."""
    held = Counter(kind for _, kind in offered)
    asked = Counter(kind for kind in wanted if kind is not None)
    return len(wanted) <= len(offered) and all(count <= held[kind] for kind, count in asked.items())


def _leftmost(wanted: Sequence[object], free: Mapping[object, Sequence[int]]) -> list[int] | None:
    chosen: list[int] = []
    last = -1
    for kind in wanted:
        positions = free.get(kind, ())
        at = bisect_left(positions, last + 1)
        if at == len(positions):
            return None
        last = positions[at]
        chosen.append(last)
    return chosen


def _rightmost(wanted: Sequence[object], free: Mapping[object, Sequence[int]], following: int) -> list[int] | None:
    chosen: list[int] = []
    for kind in reversed(wanted):
        positions = free.get(kind, ())
        at = bisect_left(positions, following)
        if at == 0:
            return None
        following = positions[at - 1]
        chosen.append(following)
    return chosen[::-1]
