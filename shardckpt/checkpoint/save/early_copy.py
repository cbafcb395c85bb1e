"""`EarlyCopy`: copy of a state that is made while the ranks agree on its save."""

from __future__ import annotations

import time
from contextlib import ExitStack

from shardckpt.checkpoint.save.repeated_plan import RepeatedPlan
from shardckpt.checkpoint.save.session import SaveOptions, SavePlanner
from shardckpt.checkpoint.save.staging import StagingArea
from shardckpt.format.budget import gc_paused


class EarlyCopy:
    """Copy of a state that fits the plan of an earlier save.

    So the training does not wait for messages and copy one after the other. If the ranks do not agree on that plan, the
    copy is dropped, and the state is planned and copied again.

    Args:
        plan: The plan.
        staging: Staging area for the copy.
        held: Context in which no other save uses the staging buffers.

    Attributes:
        plan: The plan.
        staging: Staging area for the copy.
        seconds: Duration of the copy; 0 if the buffers do not suffice for all of it.
    """

    def __init__(self, plan: RepeatedPlan, staging: StagingArea, held: ExitStack) -> None:
        self.plan, self.staging, self._held = plan, staging, held
        self.seconds = 0.0
        self._error: Exception | None = None
        self._answer: tuple[str, str] | None = None
        self._is_taken = False

    def copy(self) -> None:
        """Copy the state if all of it fits into the buffers; keep an error for `require_copied`."""
        start = time.monotonic()
        try:
            if self.staging.has_space(self.plan.files):
                with gc_paused():
                    self.staging.fill(self.plan.files, self.plan.state)
        except Exception as error:  # noqa: BLE001  (the ranks may agree on the save meanwhile)
            self._error = error
        self.seconds = time.monotonic() - start

    def require_copied(self) -> None:
        """Raise the error of the copy."""
        if self._error is not None:
            raise self._error

    def agree(self, answer: tuple[str, str]) -> None:
        """Record that all ranks agree on the plan: they wait for this one at the end of the save.

        Args:
            answer: Result of `RepeatedPlan.begin` on rank 0.
        """
        self._answer = answer

    def take(self, options: SaveOptions) -> SavePlanner:
        """Return the planner of the save on which all ranks agree; the save cleans up from now on.

        Args:
            options: Options of the save.
        """
        assert self._answer is not None, "the ranks agree by then"
        self._is_taken = True
        return self.plan.accept(self._answer, options)

    def close(self) -> None:
        """Allow other saves; leave the save if the ranks agree on it and it has not begun here."""
        with self._held:
            if not self._is_taken:
                self.plan.rollback()
                if self._answer is not None:
                    self.plan.leave()
