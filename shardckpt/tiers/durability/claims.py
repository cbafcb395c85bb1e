"""Durability claims that this process made, and which of them turned out false."""

from __future__ import annotations

from collections.abc import Sequence

from shardckpt.checkpoint.run.step_finder import StepFinder
from shardckpt.events import OnEvent, WithdrawalEvent, emit
from shardckpt.native.step_copies import Durability, StepCopy, find_survived_by
from shardckpt.ranks.process_group import get_ranks

_MAX_CLAIMS = 4096  # maximum number of steps whose claims are remembered


class DurabilityClaims:
    """Copies that this process claimed, by step."""

    def __init__(self, finder: StepFinder, on_event: OnEvent | None) -> None:
        self._finder, self._on_event = finder, on_event
        self._claimed: dict[int, Sequence[StepCopy]] = {}

    def claim(self, step: int) -> Durability:
        """Claim a step's complete copies, and withdraw earlier claims that are false now. Collective."""
        # A copy may be lost, or be on fewer machines than before.
        copies = self._finder.find_copies(step)
        is_first = get_ranks(self._finder.group).rank == 0
        now = {(copy.path, copy.save): copy for copy in copies}
        for copy in self._claimed.pop(step, ()) if is_first else ():
            left = now.get((copy.path, copy.save))
            is_held = left is not None and {*copy.survives} <= {*left.survives}
            if not is_held and copy.save not in self._finder.find_finder(copy.path).removed:
                survives = find_survived_by(copies)
                emit(WithdrawalEvent(copy.path, step=step, tier=copy.tier, survives=survives), self._on_event)
        self._claimed[step] = copies
        if len(self._claimed) > _MAX_CLAIMS:
            del self._claimed[next(iter(self._claimed))]
        return Durability(step, tuple(copies))

    def forget(self, step: int) -> None:
        """Forget the claims for a step that was saved again, whose earlier copies are replaced."""
        self._claimed.pop(step, None)
