"""Steps that a Trainer's `save_total_limit` removes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["choose_removed"]


def choose_removed(numbers: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """Return the steps to remove, oldest first, as the Trainer chooses its folders: never the newest or the best."""
    if limit is None or limit <= 0:
        return []
    protected = {best, *numbers[-1:]}.intersection(numbers)  # both stay with a limit of 1, too
    others = [number for number in numbers if number not in protected]
    return others[: max(len(numbers) - max(limit, len(protected)), 0)]
