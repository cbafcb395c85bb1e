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
from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError, TargetExistsError
from shardckpt.events import FallbackEvent, OnEvent, PromotionEvent, emit, record_operation
from shardckpt.native.run_directory import step_name
from shardckpt.native.stored_folders import copy_stored_step
from shardckpt.tiers.capture_tier import CaptureTier
from shardckpt.tiers.peers.copy_step import CopiedPart, copy_part
from shardckpt.tiers.peers.promoted_steps import PromotedStep

_MAX_WAITING = 2  # promotions that wait for the running one
_MAX_REMEMBERED = 4096  # steps whose last captures are remembered

_SAVED_AGAIN = "it was saved again meanwhile"


_PROMOTERS: WeakSet[Promoter] = WeakSet()


class Promotion(NamedTuple):
    """A step to copy to a farther tier."""

    number: int
    source: CaptureTier
    target: CaptureTier
    rank: int = 0
    capture: int = 0  # from `Promoter.note_capture`


class Promoter:
    """Copies committed captures to farther tiers, one at a time, on its own thread. On one rank of each node."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event
        self._lock, self._replacing = threading.Lock(), threading.Lock()
        self._captures = 0
        self._started: dict[tuple[int, CaptureTier], int] = {}
        self._committed: dict[tuple[int, CaptureTier], int] = {}
        self._waiting: deque[Promotion] = deque()
        self._running: Promotion | None = None
        self._thread: BackgroundThread | None = None
        _PROMOTERS.add(self)

    def add(self, promotion: Promotion) -> None:
        """Promote a committed capture in the background."""
        given_up: list[tuple[Promotion, str]] = []
        with self._lock:
            given_up += [(each, _SAVED_AGAIN) for each in self._waiting if each[:3] == promotion[:3]]
            self._waiting = deque(each for each in self._waiting if each[:3] != promotion[:3])
            self._waiting.append(promotion)
            if len(self._waiting) > _MAX_WAITING:  # nobody waits for a slow tier
                given_up.append((self._waiting.popleft(), "newer steps wait"))
            has_thread = True
            if self._thread is None:  # it inherits the priority of the capture's thread
                self._thread = BackgroundThread(self._run, "shardckpt-promote")
                has_thread = self._thread.start()
        if not has_thread:
            self._run()
        for each, reason in given_up:
            text, path = f"not copied from {each.source.path(each.number)}: {reason}", each.target.path(each.number)
            emit(FallbackEvent(path, step=each.number, rank=each.rank, warnings=(text,)), self._on_event)

    def note_capture(self, number: int, source: CaptureTier) -> int:
        """Record that a capture starts, which overwrites earlier ones even during promotion; return its number."""
        with self._lock:
            self._captures += 1
            _remember(self._started, (number, source), self._captures)
            return self._captures

    def note_commit(self, number: int, source: CaptureTier, capture: int) -> None:
        """Record that a capture is about to be committed, so that no earlier copy replaces it. In the background."""
        with self._replacing, self._lock:  # a copy may be replacing the step at this moment
            _remember(self._committed, (number, source), capture)

    def list_promoted(self, tier: CaptureTier) -> frozenset[int]:
        """Return the steps that are being promoted from or to a tier, or will be."""
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
                    with self._lock:
                        is_overwritten = self._started.get((number, source), 0) > capture
                    if not (is_overwritten or self._has_later(promotion)):
                        raise
                    reason = f"not copied from {source.path(number)}: {_SAVED_AGAIN}"
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
        """Require that the farther tier has no later capture of a step. Raises TargetExistsError."""
        if self._has_later(promotion):
            where = promotion.target.path(promotion.number)
            raise TargetExistsError("a copy must not replace a later save of its step", where=where)

    def _has_later(self, promotion: Promotion) -> bool:
        with self._lock:
            return self._committed.get((promotion.number, promotion.target), 0) > promotion.capture


def _remember(captures: dict[tuple[int, CaptureTier], int], key: tuple[int, CaptureTier], capture: int) -> None:
    """Set a step's last capture in a tier, and forget the oldest entry of too many."""
    captures[key] = max(captures.pop(key, 0), capture)
    if len(captures) > _MAX_REMEMBERED:
        del captures[next(iter(captures))]


def _copy(promotion: Promotion, replacing: Callable[[], AbstractContextManager[object]]) -> CopiedPart:
    """Copy a step, or this node's part. Raises ShardckptError."""
    number, source, target = promotion[:3]
    if source.is_spread:
        return copy_part(source.place.open_own(), target.place.open_own(), step_name(number), replacing)
    return CopiedPart(copy_stored_step(source.path(number), target.path(number), replacing))


def _end_promotions() -> None:
    """Wait for all promotions in this process. At process exit."""
    for promoter in [*_PROMOTERS]:
        promoter.wait()


# Registered before any capture, so that the last captures end first: they add promotions.
run_before_exit(_end_promotions)
