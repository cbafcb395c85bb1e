"""A signal that ends a training after the same step on all ranks."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from shardckpt.checkpoint.notice.watch_signals import require_signals
from shardckpt.checkpoint.run.save_schedule import SaveSchedule
from shardckpt.events.recorder import enter_call
from shardckpt.ranks.process_group import get_ranks

__all__ = ["StopSignal"]


def _note_nothing(_number: int) -> None:
    """Ignore completed steps."""


class StopSignal:
    """Whether any rank has got a signal."""

    def __init__(self, *, is_watched: bool = True) -> None:
        self._is_watched = is_watched  # whether `start` does anything
        self._schedule = SaveSchedule(None, (), _note_nothing)
        self._handlers = ExitStack()
        self._step = 0  # the last one after which the ranks agreed

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return partial(StopSignal, is_watched=self._is_watched), ()  # handlers belong to this process

    def watch(self, *numbers: int) -> AbstractContextManager[None]:
        """Return a context in which the signals, by default SIGTERM, end the training instead of the process."""
        return self._schedule.watch(require_signals(numbers) or (signal.SIGTERM,))

    def start(self) -> None:
        """Watch SIGTERM until `close`."""
        if self._is_watched:
            self._handlers.enter_context(self.watch())

    def close(self) -> None:
        """Restore the handlers."""
        self._handlers.close()

    def is_requested(self) -> bool:
        """Return True if any rank had got a signal when this was called. Collective while signals are watched."""
        with enter_call("is_stop_requested"):
            self._schedule.should_save(0, get_ranks(None))
        return self._schedule.stop_requested

    def is_requested_after(self, step: int) -> bool:
        """Return True if the training should stop after a step; False for the same step again. Collective."""
        is_new, self._step = step != self._step, step
        return self._is_watched and is_new and self.is_requested()
