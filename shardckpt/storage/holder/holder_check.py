"""Find out in the background if a holder hangs that did not answer in time, and end it then: nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardckpt.errors import ShardckptError


class HolderCheck:
    """Check on a separate thread of a holder that did not answer in time."""

    def __init__(self, end_hung: Callable[[], int]) -> None:
        self._end_hung = end_hung  # waits longer for an answer; returns the id of the ended process, 0 if it answers
        self.ended = 0  # process id of the ended holder; 0 if it answers, or while the check runs
        self.error: ShardckptError | None = None  # set if the holder hangs and cannot be ended
        self._is_over = False
        threading.Thread(target=self._run, name="shardckpt-holder-check", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the result is not known yet."""
        return not self._is_over

    def _run(self) -> None:
        try:
            self.ended = self._end_hung()
        except ShardckptError as error:
            self.error = error
        finally:
            self._is_over = True
