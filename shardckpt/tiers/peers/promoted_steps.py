"""Steps that a node has copied to a farther tier, and which steps all nodes have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple


class PromotedStep(NamedTuple):
    """A step that was copied."""

    number: int
    save: str  # id of its save


class PromotedSteps:
    """Steps that this node has copied to a tier."""

    # A step that other nodes may lack is incomplete, so it does not count for the tier's rules, and files of its older
    # save stay. Only the newest such step stays.

    def __init__(self) -> None:
        self.uncounted: list[PromotedStep] = []  # steps that other nodes may lack, the oldest first
        self._older: dict[PromotedStep, Collection[str]] = {}
        self._removable: list[tuple[int, Collection[str]]] = []
        self._has_common = False

    def add(self, step: PromotedStep, older: Collection[str]) -> None:
        """Record that this node has copied a step."""
        if older:
            self._older[step] = older
        self.uncounted.append(step)

    def count(self, common: Iterable[PromotedStep]) -> None:
        """Record steps that all nodes have: these and earlier steps count for the rules from now on."""
        found = [step for step in common if step in self.uncounted]
        for step in found:
            self._removable += [(step.number, self._older[step])] if step in self._older else []
        if found:
            last = max(map(self.uncounted.index, found))
            for step in self.uncounted[: last + 1]:
                self._older.pop(step, None)
            del self.uncounted[: last + 1]
            self._has_common = True

    def count_all(self) -> None:
        """Record that all nodes have all steps."""
        self.uncounted.clear()
        self._older.clear()
        self._has_common = True

    def take_removable(self, kept: Collection[int]) -> list[tuple[int, Collection[str]]]:
        """Return and forget step numbers, each with the names of files that no node needs any more."""
        taken = [each for each in self._removable if each[0] not in kept]
        self._removable = [each for each in self._removable if each[0] in kept]
        return taken

    def list_protected(self, held: Collection[int]) -> set[int]:
        """Return the steps that rules must not remove: before the first count, all that others had."""
        newest = {step.number for step in self.uncounted[-1:]}
        uncounted = {step.number for step in self.uncounted}
        return newest if self._has_common else newest | {*held}.difference(uncounted)


def find_common_steps(
    copied: Sequence[Mapping[str, Sequence[tuple[int, str]]]],
) -> dict[str, list[tuple[int, str]]]:
    """Return by tier the steps that all nodes have copied, the oldest first, as `PromotedStep` fields after JSON."""
    found = {}
    for tier, steps in copied[0].items():
        common = [step for step in steps if all(step in each.get(tier, ()) for each in copied)]
        found.update({tier: common} if common else {})
    return found
