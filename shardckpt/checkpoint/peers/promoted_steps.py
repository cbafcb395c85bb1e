"""Steps that a node has copied to a farther tier, and which of them all nodes have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class PromotedSteps:
    """Steps that this node has copied to a tier.

    A step that other nodes may lack does not count for the rules of the tier: the step before it is complete, and it is
    not. Only the newest of such steps stays.

    Attributes:
        uncounted: Numbers of the steps that not all nodes are known to have, the oldest first.
    """

    def __init__(self) -> None:
        self.uncounted: list[int] = []
        self._has_common = False

    def add(self, number: int) -> None:
        """Record that this node has copied a step."""
        self.uncounted.append(number)

    def count(self, number: int) -> None:
        """Record that all nodes have a step: from now on it counts for the rules."""
        if number in self.uncounted:
            del self.uncounted[: self.uncounted.index(number) + 1]
            self._has_common = True

    def count_all(self) -> None:
        """Record that all nodes have all steps."""
        self.uncounted.clear()
        self._has_common = True

    def list_protected(self, held: Collection[int]) -> set[int]:
        """Return the numbers of steps that stay whatever the rules; before the first count all that others had before.

        Args:
            held: Numbers of the steps that this node has.
        """
        newest = {*self.uncounted[-1:]}
        return newest if self._has_common else newest | {*held}.difference(self.uncounted)


def find_common_steps(copied: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, int]:
    """Return the newest step that all nodes have copied, by the name of the tier; tiers without one are left out.

    Args:
        copied: Steps of each node by tier, the oldest first.
    """
    found = {}
    for tier, numbers in copied[0].items():
        common = [number for number in numbers if all(number in each.get(tier, ()) for each in copied)]
        found.update({tier: common[-1]} if common else {})
    return found
