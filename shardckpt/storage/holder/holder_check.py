"""Find out in the background if a holder that did not answer in time hangs, and end it then: nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardckpt.errors import ShardckptError


class HolderCheck:
    """Check of a holder that did not answer in time, on a thread of its own."""

    def __init__(self, end_hung: Callable[[], int]) -> None:
        self._end_hung = end_hung  # waits longer for an answer; returns the id of the ended process, 0 if it answers
        self.ended = 0  # process id of the holder that was ended; 0 if it answers, or while the check goes on
        self.error: ShardckptError | None = None  # error of a holder that hangs and cannot be ended; None without one
        self._is_over = False
        threading.Thread(target=self._run, name="shardckpt-holder-check", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether it is not known yet if the holder hangs."""
        return not self._is_over

    def _run(self) -> None:
        try:
            self.ended = self._end_hung()
        except ShardckptError as error:
            self.error = error
        finally:
            self._is_over = True
