"""`RootPosition`: root steps that a capture follows, which show a restore if both are from one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardckpt.checkpoint.run.step_finder import NO_STEP
from shardckpt.native.run_directory import RunDirectory, StepFolder


class RootSteps(NamedTuple):
    """Steps that the root has now."""

    steps: Mapping[tuple[int, int], StepFolder]  # complete steps by branch and number
    newest: tuple[int, int]  # order of the newest of them
    is_empty: bool  # whether the root has no step, complete or damaged; saves may have begun

    @classmethod
    def from_run(cls, run: RunDirectory) -> RootSteps:
        """Return the root's state from its steps."""
        steps = {(step.branch, step.number): step for step in run.complete}
        is_empty = all(step.is_base or step.has_only_begun for step in run.steps)
        return cls(steps, max(steps, default=NO_STEP), is_empty)


class RootPosition(NamedTuple):
    """Root steps that a run knows: its captures follow them."""

    committed: tuple[int, int] = NO_STEP  # order of the newest complete step
    started: tuple[int, int] = NO_STEP  # order of the step whose save was started last; it may be complete meanwhile
    # Order of the step whose save was started before that one. A step is captured before its save in the root waits for
    # this one, which is then under way.
    before: tuple[int, int] = NO_STEP

    def start(self, order: tuple[int, int]) -> RootPosition:
        """Return the position after a step's save was started."""
        return self._replace(started=order, before=self.started)

    def encode(self, attempt: str) -> str:
        """Return the position as text, for the custom metadata of a capture and the same root step."""
        return json.dumps([self.committed, self.started, attempt, self.before])

    @classmethod
    def decode(cls, text: str) -> RootPosition | None:
        """Return the position from the text of `encode`; None for other text."""
        try:
            committed, started, _, before = json.loads(text)
            return cls(*map(_read_order, (committed, started, before)))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None

    @staticmethod
    def read_attempt(text: str) -> str:
        """Return the attempt from the text of `encode`; empty for other text."""
        try:
            _, _, attempt, _ = json.loads(text)
            return str(attempt)
        except (ValueError, TypeError, RecursionError):
            return ""

    def leads_to(self, newest: tuple[int, int], *, is_empty: bool) -> bool:
        """Return True if the root belongs to this run, or has lost steps since."""
        # Otherwise the root was emptied, or another process saved steps without knowing of the captures: then the
        # captures belong to a course of the training that was given up.
        if newest == NO_STEP:
            return self.committed == NO_STEP or not is_empty
        return newest in self or newest < self.committed


def _read_order(order: Sequence[int]) -> tuple[int, int]:
    branch, number = order
    return int(branch), int(number)
