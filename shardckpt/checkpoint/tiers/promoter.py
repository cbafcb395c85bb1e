"""`Promoter`: copy committed captures from a tier to a farther one, in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

from shardckpt.checkpoint.background_thread import BackgroundThread, run_before_exit
from shardckpt.checkpoint.peers.copy_step import CopiedPart, copy_part
from shardckpt.checkpoint.peers.promoted_steps import PromotedStep
from shardckpt.checkpoint.tiers.capture_tier import CaptureTier
from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError, TargetExistsError
from shardckpt.events import FallbackEvent, OnEvent, PromotionEvent, emit, record_operation
from shardckpt.format.native.copy_files import copy_stored_step
from shardckpt.format.native.run_directory import step_name
from shardckpt.storage.holder.holder_connection import STALL_S

_MOST_WAITING = 2
"""Maximum number of promotions that wait for the running one."""

_MOST_REMEMBERED = 4096
"""Maximum number of steps whose last captures are remembered."""


_PROMOTERS: WeakSet[Promoter] = WeakSet()


class Promotion(NamedTuple):
    """A step to copy to a farther tier.

    Attributes:
        number: Number of the step.
        source: Tier that has its capture.
        target: Tier that takes the copy.
        rank: This rank.
        capture: Number of the capture, from `Promoter.note_capture`.
    """

    number: int
    source: CaptureTier
    target: CaptureTier
    rank: int = 0
    capture: int = 0


class Promoter:
    """Copies of committed captures to farther tiers, one at a time, on a thread of its own. On one rank of each node.

    If the ranks are on several nodes, each node copies the files that it has.

    Nobody waits for a slow tier: if too many promotions wait, the oldest is given up, with an event. A capture that
    is being promoted, or will be, stays in its tier whatever the rules there; then the rules count again. A copy never
    replaces a later capture of its step.

    Args:
        on_event: Called with a `PromotionEvent` for each copy, and a `FallbackEvent` for each that was given up; None
            without a callback.
    """

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event
        self._lock, self._replacing = threading.Lock(), threading.Lock()
        self._captures = 0
        self._last: dict[tuple[int, CaptureTier], int] = {}
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

    def note_capture(self, number: int, source: CaptureTier) -> int:
        """Record that a step is captured now, and return the number of this capture.

        It overwrites earlier captures of the step in its tier, also while they are promoted. Copies of earlier ones to
        that tier are given up. If one replaces the step there at this moment, this waits for up to `STALL_S` seconds.
        """
        with self._lock:
            self._captures = capture = self._captures + 1
            self._last.pop((number, source), None)
            self._last[number, source] = capture
            if len(self._last) > _MOST_REMEMBERED:
                del self._last[next(iter(self._last))]
            running = self._running
        is_copied = running is not None and (running.number, running.target) == (number, source)
        if is_copied and self._replacing.acquire(timeout=STALL_S):
            self._replacing.release()
        return capture

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
        number, source, target, rank, capture = promotion
        place = target.place.name
        try:
            with record_operation(
                PromotionEvent, target.path(number), self._on_event, is_tolerated=True, tier=place
            ) as recorder:
                recorder.values.update(source=source.path(number), rank=rank)
                try:
                    self._require_last(promotion)
                    copied = _copy(promotion, partial(self._replace, promotion))
                    recorder.values["nbytes"] = copied.nbytes
                except (CheckpointError, MissingFileError, TargetExistsError):
                    if self._find_last(number, source, target) <= capture:
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

    @contextmanager
    def _replace(self, promotion: Promotion) -> Iterator[None]:
        """Replace a step in the farther tier within the context; raises as `_require_last`."""
        with self._replacing:
            self._require_last(promotion)
            yield

    def _require_last(self, promotion: Promotion) -> None:
        """Require that the farther tier takes no later capture of a step. Raises TargetExistsError."""
        number, _, target, _, capture = promotion
        if self._find_last(number, target) > capture:
            raise TargetExistsError("the step was saved again meanwhile", where=target.path(number))

    def _find_last(self, number: int, *tiers: CaptureTier) -> int:
        """Return the number of the last capture of a step in some tiers; 0 without one."""
        with self._lock:
            return max(self._last.get((number, tier), 0) for tier in tiers)


def _copy(promotion: Promotion, replacing: Callable[[], AbstractContextManager[object]]) -> CopiedPart:
    """Copy a step, or the part of this node. Raises ShardckptError.

    Args:
        promotion: The step and its tiers.
        replacing: As for `copy_stored_step`.
    """
    number, source, target = promotion[:3]
    if source.is_spread:
        return copy_part(source.place.open_own(), target.place.open_own(), step_name(number), replacing)
    return CopiedPart(copy_stored_step(source.path(number), target.path(number), replacing))


def _end_promotions() -> None:
    """Wait for the promotions of all runs of this process. At process exit."""
    for promoter in [*_PROMOTERS]:
        promoter.wait()


run_before_exit(_end_promotions)  # before any capture, so that the last captures have ended, which add promotions
