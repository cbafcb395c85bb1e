"""Remove steps that a framework no longer keeps, once the next step is complete."""

from __future__ import annotations

import os
from collections import deque

from shardckpt import ShardckptError, prune
from shardckpt.events import OperationEvent, SaveEvent
from shardckpt.events.warn_user import warn_user

__all__ = ["StepRemoval"]


class StepRemoval:
    """Steps to remove on this rank; each stays until the next saved step is complete."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._run = run
        self._numbers: deque[int] = deque()
        self._is_saved = False

    @property
    def numbers(self) -> list[int]:
        """Steps that are not removed yet."""
        return [*self._numbers]

    def start_save(self, number: int) -> None:
        """Keep all steps until this save is complete; its own step is not removed."""
        self._is_saved = False
        if number in self._numbers:
            self._numbers.remove(number)

    def take_event(self, event: OperationEvent) -> None:
        """Remove steps when the save is complete; background saves call this on their thread."""
        if isinstance(event, SaveEvent) and event.error is None:
            self._is_saved = True
            self._remove_all()

    def add(self, number: int) -> None:
        """Remove a step, now or once the current save is complete."""
        self._numbers.append(number)
        if self._is_saved:
            self._remove_all()

    def _remove_all(self) -> None:
        numbers = set()
        while self._numbers:
            numbers.add(self._numbers.popleft())
        try:
            if numbers:
                prune(self._run, steps=numbers)
        except ShardckptError as error:
            warn_user(f"steps {', '.join(map(str, sorted(numbers)))} could not be removed: {error}")
