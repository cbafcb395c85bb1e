"""Steps that `save_total_limit` of a Trainer removes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["choose_removed"]


def choose_removed(numbers: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """Return the steps to remove, as the Trainer chooses its folders: the oldest, but not the newest and the best.

    So `limit` steps stay; with a limit of 1 the newest and the best.

    Args:
        numbers: Numbers of all steps, the oldest first.
        limit: `save_total_limit`; without a positive number no step is removed.
        best: Number of the best step; None without one.

    Returns:
        Numbers of steps, the oldest first.
    """
    if limit is None or limit <= 0:
        return []
    protected = {best, *numbers[-1:]}.intersection(numbers)
    others = [number for number in numbers if number not in protected]
    return others[: max(len(numbers) - max(limit, len(protected)), 0)]
