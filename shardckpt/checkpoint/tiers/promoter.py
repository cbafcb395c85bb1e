"""`Promoter`: copy committed captures from a tier to a farther one, in the background."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple
from weakref import WeakSet

from shardckpt.checkpoint.background_thread import BackgroundThread, run_before_exit
from shardckpt.checkpoint.peers.copy_step import CopiedPart, copy_part
from shardckpt.checkpoint.peers.promoted_steps import PromotedStep
from shardckpt.checkpoint.tiers.capture_tier import CaptureTier
from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError
from shardckpt.events import FallbackEvent, OnEvent, PromotionEvent, emit, record_operation
from shardckpt.format.native.copy_files import copy_stored_step
from shardckpt.format.native.run_directory import step_name

_MOST_WAITING = 2
"""Maximum number of promotions that wait for the running one."""


_PROMOTERS: WeakSet[Promoter] = WeakSet()


class Promotion(NamedTuple):
    """A step to copy to a farther tier.

    Attributes:
        number: Number of the step.
        source: Tier that has its capture.
        target: Tier that takes the copy.
        rank: This rank.
        is_overwritten: Whether the step was captured again since: its files may go, and another promotion follows.
    """

    number: int
    source: CaptureTier
    target: CaptureTier
    rank: int = 0
    is_overwritten: bool = False


class Promoter:
    """Copies of committed captures to farther tiers, one at a time, on a thread of its own. On one rank of each node.

    If the ranks are on several nodes, each node copies the files that it has.

    Nobody waits for a slow tier: if too many promotions wait, the oldest is given up, with an event. A capture that
    is being promoted, or will be, stays in its tier whatever the rules there; then the rules count again.

    Args:
        on_event: Called with a `PromotionEvent` for each copy, and a `FallbackEvent` for each that was given up; None
            without a callback.
    """

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event
        self._lock = threading.Lock()
        self._waiting: deque[Promotion] = deque()
        self._running: Promotion | None = None
        self._thread: BackgroundThread | None = None
        _PROMOTERS.add(self)

    def add(self, promotion: Promotion) -> None:
        """Promote a committed capture in the background."""
        given_up = None
        with self._lock:
            self._waiting.append(promotion)
            if len(self._waiting) > _MOST_WAITING:
                given_up = self._waiting.popleft()
            if self._thread is None:  # its priority is that of the thread of the capture
                self._thread = BackgroundThread(self._run, "shardckpt-promote")
                self._thread.start()
        if given_up is not None:
            reason = f"not copied from {given_up.source.path(given_up.number)}: newer steps wait"
            path = given_up.target.path(given_up.number)
            emit(FallbackEvent(path, step=given_up.number, rank=given_up.rank, warnings=(reason,)), self._on_event)

    def note_capture(self, number: int, source: CaptureTier) -> None:
        """Record that a step is captured now: earlier captures of it are overwritten, also while they are promoted."""

        def mark(each: Promotion) -> Promotion:
            return each._replace(is_overwritten=True) if (each.number, each.source) == (number, source) else each

        with self._lock:
            self._waiting = deque(map(mark, self._waiting))
            self._running = None if self._running is None else mark(self._running)

    def list_promoted(self, tier: CaptureTier) -> frozenset[int]:
        """Return the steps of a tier that are being promoted from there or to there, or will be."""
        with self._lock:
            promotions = [*self._waiting, *([] if self._running is None else [self._running])]
        return frozenset(each.number for each in promotions if tier in (each.source, each.target))

    def wait(self) -> None:
        """Wait until no promotion is left."""
        thread = self._thread
        while thread is not None and thread.is_running:
            thread.join()
            thread = self._thread

    def _run(self) -> None:
        """Promote what waits. On the promoter's thread."""
        while True:
            with self._lock:
                self._running = self._waiting.popleft() if self._waiting else None
                if self._running is None:
                    self._thread = None
                    return
                promotion = self._running
            self._promote(promotion)
            with self._lock:
                self._running = None
            promotion.source.apply_rules()

    def _promote(self, promotion: Promotion) -> None:
        number, source, target, rank, _ = promotion
        place = target.place.name
        try:
            with record_operation(
                PromotionEvent, target.path(number), self._on_event, is_tolerated=True, tier=place
            ) as recorder:
                recorder.values.update(source=source.path(number), rank=rank)
                try:
                    copied = _copy(promotion)
                    recorder.values["nbytes"] = copied.nbytes
                except (CheckpointError, MissingFileError):
                    if not self._is_overwritten():
                        raise
                    reason = f"not copied from {source.path(number)}: it was saved again meanwhile"
                    recorder.kind, recorder.values = FallbackEvent, {"rank": rank, "warnings": (reason,)}
                    return
        except ShardckptError as error:
            target.note_failure(error)
        else:
            target.note_success()
            if target.is_spread:
                target.promoted.add(PromotedStep(number, copied.save), copied.older)
            target.apply_rules(number)

    def _is_overwritten(self) -> bool:
        """Return True if the step that is being promoted was captured again since. On the promoter's thread."""
        with self._lock:
            return self._running is not None and self._running.is_overwritten


def _copy(promotion: Promotion) -> CopiedPart:
    """Copy a step, or the part of this node. Raises ShardckptError."""
    number, source, target = promotion[:3]
    if source.is_spread:
        return copy_part(source.place.open_own(), target.place.open_own(), step_name(number))
    return CopiedPart(copy_stored_step(source.path(number), target.path(number)))


def _end_promotions() -> None:
    """Wait for the promotions of all runs of this process. At process exit."""
    for promoter in [*_PROMOTERS]:
        promoter.wait()


run_before_exit(_end_promotions)  # before any capture, so that the last captures have ended, which add promotions
