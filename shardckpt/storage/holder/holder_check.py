"""Find out in the background if a holder that did not answer in time hangs, and end it then: nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardckpt.errors import ShardckptError


class HolderCheck:
    """Check of a holder that did not answer in time, on a thread of its own.

    Args:
        end_hung: Ends the holder if it does not answer in a longer time; returns the id of its process, 0 if it
            answers. Raises ShardckptError if it cannot be ended.

    Attributes:
        ended: Process id of the holder that was ended; 0 if it answers, or while the check goes on.
        error: Error of a holder that hangs and cannot be ended; None without one.
    """

    def __init__(self, end_hung: Callable[[], int]) -> None:
        self._end_hung = end_hung
        self.ended = 0
        self.error: ShardckptError | None = None
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
