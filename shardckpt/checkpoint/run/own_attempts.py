"""`OwnAttempts`: the attempts to save steps that a process made or restored; only their copies have its states."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from shardckpt.checkpoint.run.step_finder import NO_STEP

_MAX_REMEMBERED = 4096  # maximum number of steps whose last attempts are remembered


@dataclass
class OwnAttempt:
    """An attempt to save a step."""

    order: tuple[int, int] = NO_STEP  # branch and number of the step
    after: str = ""  # text of `RootPosition.encode` that its captures have; empty if it has none
    saves: set[str] = field(default_factory=set)  # ids of its saves: its capture, and its save in the root


class OwnAttempts:
    """The last attempt for each step that this process saved or restored."""

    def __init__(self) -> None:
        self._by_number: dict[int, OwnAttempt] = {}
        self._found: tuple[int, OwnAttempt] | None = None

    def find(self, number: int) -> OwnAttempt | None:
        """Return a step's attempt; None if this process neither saved nor restored it."""
        return self._by_number.get(number)

    def begin(self, order: tuple[int, int], after: str) -> None:
        """Record that a step is saved now: other copies with its number have another state."""
        self._set(order[1], OwnAttempt(order, after))

    def add_save(self, number: int, save: str) -> None:
        """Record the id of a started save of a step."""
        self._by_number.setdefault(number, OwnAttempt()).saves.add(save)

    def note_found(self, number: int, order: tuple[int, int], after: str, saves: Collection[str]) -> None:
        """Record the attempt for a step that a restore found, and may load."""
        self._found = number, OwnAttempt(order, after, {*saves})

    def forget_saves(self) -> None:
        """Record that the step found last is from another attempt now: it may be the one that is loaded."""
        if self._found is not None:
            self._found[1].saves.clear()

    def restore(self, number: int) -> None:
        """Record that a step was restored: only copies from the attempt found last have its state."""
        if self._found is not None and self._found[0] == number:
            self._set(*self._found)

    def _set(self, number: int, attempt: OwnAttempt) -> None:
        self._by_number.pop(number, None)
        self._by_number[number] = attempt
        if len(self._by_number) > _MAX_REMEMBERED:
            del self._by_number[next(iter(self._by_number))]
