"""Claims of durability in a history, and which of them have to hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardckpt.testing.simulation.scheduler import Process


class MemoryClaim(NamedTuple):
    """Claim that an attempt survives the end of all training processes, by its capture in memory.

    Attributes:
        content: The attempt.
        holder: Holder of the capture.
    """

    content: int
    holder: Process


class Claims:
    """Claims of a run that rest on captures in memory.

    Args:
        list_holders: Returns the living holders.
    """

    def __init__(self, list_holders: Callable[[], Sequence[Process]]) -> None:
        self.list_holders = list_holders
        self._claims: list[MemoryClaim] = []

    def add(self, content: int, holders: Sequence[Process]) -> bool:
        """Record that a capture is claimed; return False if no holder could have it.

        Args:
            content: The attempt.
            holders: Holders that were alive when the claim was asked for.
        """
        able = [*holders, *self.list_holders()]
        self._claims += [MemoryClaim(content, holder) for holder in able[-1:]]
        return bool(able)

    def newest(self) -> MemoryClaim | None:
        """Return the newest claim that has to hold: the failures since are those that it names."""
        return next((claim for claim in reversed(self._claims) if self.holds(claim)), None)

    def holds(self, claim: MemoryClaim) -> bool:
        """Return True while a claim has to hold."""
        return claim in self._claims and not claim.holder.is_dead

    def give_up(self, holder: Process | None = None) -> None:
        """Drop claims: the run goes on without their captures.

        Args:
            holder: Holder that hangs; None for all.
        """
        self._claims = [claim for claim in self._claims if holder not in (None, claim.holder)]
