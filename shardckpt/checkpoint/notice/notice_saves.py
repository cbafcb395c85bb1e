"""`NoticeSaves`: how long a run's saves took in each place, and the save that a notice asks for."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardckpt.checkpoint.notice.notices import Clocks, Notices, RankNotice
from shardckpt.checkpoint.notice.place_prediction import (
    ChosenPlaces,
    ExpectedPlace,
    PastSave,
    choose_places,
    find_report_time,
    find_step_limit,
    find_survived_failures,
    predict_places,
)
from shardckpt.errors import StorageError, describe
from shardckpt.events import (
    FallbackEvent,
    OnEvent,
    OperationEvent,
    PreemptionEvent,
    PromotionEvent,
    ReplicateEvent,
    SaveEvent,
    deliver,
    emit,
)
from shardckpt.native.step_copies import ROOT, find_survived, read_mounts

_REMEMBERED = 8  # past saves in each place


class NoticeShare(NamedTuple):
    """The nodes of a step's captures."""

    machines: int = 1  # machines that each file is to be on
    has_leaving: bool = False  # whether some nodes have a notice, and others have none


class PlannedNotice(NamedTuple):
    """A save that a notice asks for, as rank 0 sends it to the rank that reports it."""

    number: int
    notice: RankNotice
    chosen: ChosenPlaces
    expected: Sequence[ExpectedPlace]
    share: NoticeShare
    has_started: bool  # whether the step was being saved to all its places before


@dataclass
class _NoticeSave:
    """The save that a notice asked for, until it is reported."""

    planned: PlannedNotice
    start: float
    faults: dict[str, str] = field(default_factory=dict)  # by place
    committed: list[str] = field(default_factory=list)

    @property
    def open_places(self) -> list[str]:
        """Places whose save has not ended."""
        return [name for name in self.planned.chosen.names if name not in self.committed and name not in self.faults]


class NoticeSaves:
    """Past saves by place, and the save that a notice asks for.

    Attributes:
        notices: Notices of this process.
        is_agreed: Whether all ranks know of a notice.
        begun: Saves that notices asked for.
        committed: How many of these were committed in at least one place.
    """

    def __init__(
        self,
        root: str = "",
        places: Sequence[str] = (ROOT,),
        notices: Notices | None = None,
        on_event: OnEvent | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._root, self._places, self._on_event = root, tuple(places), on_event
        self.notices, self._now = notices or Notices(), (clocks or Clocks()).monotonic
        self.is_agreed, self._is_given_up, self._grace_s = False, False, 0.0
        self.begun = self.committed = 0
        self._past: defaultdict[str, deque[PastSave]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._root_start: float | None = None  # of a save in the root that runs
        self._last: dict[str, int] = {}  # the last step committed in each place
        self._copied = -1  # the last captured step with all its copies
        self._save: _NoticeSave | None = None
        self._elsewhere = -1  # the step whose save another rank reports
        self._lock = threading.RLock()
        self.notices.on_tick = self.tick

    def listen(self, place: str, on_event: OnEvent | None) -> OnEvent | None:
        """Return a function for a place's events, which also measures its saves."""
        if not self.notices.has_deadline:
            return on_event

        def note(event: OperationEvent) -> None:
            self._note(event.tier if isinstance(event, PromotionEvent) else place, event)
            deliver(event, on_event)

        return note

    def note_root_start(self) -> None:
        """Record that a save in the root starts."""
        self._root_start = self._now()

    def _note(self, place: str, event: OperationEvent) -> None:
        with self._lock:
            is_end = isinstance(event, (SaveEvent, PromotionEvent))
            if place == ROOT and is_end:
                self._root_start = None
            if isinstance(event, SaveEvent) and event.has_left:
                return
            if is_end and event.error is None:
                seconds = event.seconds - event.phases.get("waiting", 0.0)
                self._past[place].append(PastSave(event.nbytes, max(seconds, 0.0)))
                self._last[place] = -1 if event.step is None else event.step
            if isinstance(event, ReplicateEvent) and event.step is not None and not event.warnings:
                self._copied = event.step
            if self._save is not None and event.step == self._save.planned.number:
                self._note_in_save(self._save, place, event, is_end=is_end)

    def _note_in_save(self, save: _NoticeSave, place: str, event: OperationEvent, *, is_end: bool) -> None:
        """Record an event of the notice's save, and report the save once all its places have ended."""
        if is_end and event.error is None:
            save.faults.pop(place, None)
            save.committed += [] if place in save.committed else [place]
        elif is_end or (isinstance(event, FallbackEvent) and place != ROOT):  # there a full save follows
            fault = describe(event.error) if event.error is not None else "; ".join(event.warnings)
            is_source = place == save.planned.chosen.names[0] != ROOT  # tiers behind it get copies of its captures
            failed = [name for name in save.open_places if name == place or (is_source and name != ROOT)]
            save.faults.update(dict.fromkeys(failed, fault))
        if not save.open_places:
            self._report(save)

    def is_planned(self, number: int) -> bool:
        """Return True if the places for a step are chosen and it is not reported yet. On rank 0."""
        return self._elsewhere == number or (self._save is not None and self._save.planned.number == number)

    def plan(
        self,
        number: int,
        notice: RankNotice,
        names: Sequence[str],
        share: NoticeShare | None = None,
        *,
        has_started: bool = False,
    ) -> ChosenPlaces:
        """Choose the places for the save that a notice asks for. On rank 0.

        Args:
            number: Step number.
            notice: What all ranks know of the notice.
            names: Places that can take the step, the nearest first.
            share: Nodes of its captures.
            has_started: Whether the step is saved to all these places already, since the notice came late.
        """
        with self._lock:
            if self._save is not None:  # it failed, and another one replaces it
                self._report(self._save)
            elapsed = None if self._root_start is None else self._now() - self._root_start
            expected = predict_places(self._past, names, elapsed)
            chosen = choose_places(expected, notice.left_s)
            if has_started:
                chosen = chosen._replace(names=tuple(names))
            self._open(PlannedNotice(number, notice, chosen, expected, share or NoticeShare(), has_started))
            return chosen

    def _open(self, planned: PlannedNotice) -> None:
        self._save, self._elsewhere = _NoticeSave(planned, self._now()), -1
        if planned.has_started:
            names = planned.chosen.names
            self._save.committed += [name for name in names if self._last.get(name) == planned.number]
        self.begun += 1

    def hand_over(self) -> PlannedNotice | None:
        """Return the planned save for another rank, which reports it; None without one. On rank 0."""
        with self._lock:
            save, self._save = self._save, None
            if save is None:
                return None
            self._elsewhere = save.planned.number
            self.begun -= 1
            return save.planned

    def take_over(self, planned: Sequence[Any]) -> None:
        """Report a save that rank 0 leaves to this rank, as JSON."""
        number, notice, (place, names, fits), expected, share, has_started = planned
        chosen, places = ChosenPlaces(place, tuple(names), fits), [ExpectedPlace(*each) for each in expected]
        with self._lock:
            self._open(PlannedNotice(number, RankNotice(*notice), chosen, places, NoticeShare(*share), has_started))

    def tick(self) -> float | None:
        """Report what is over; return after how many seconds the next report is due, None without one."""
        with self._lock:
            save = self._save
            if save is None:
                return self._give_up_step()
            limit_s = find_report_time(save.planned.notice.left_s)
            if limit_s is None:
                return None
            due_s = save.start + limit_s - self._now()
            if due_s <= 0:
                save.faults.update((name, "it did not end in time") for name in save.open_places)
                self._report(save)
            return due_s if due_s > 0 else None

    def _give_up_step(self) -> float | None:
        """Report once that the running step leaves no time for a save, unless it is early; as `tick`."""
        left_s = self.notices.find_left_s()
        if self.is_agreed or self._is_given_up or self.begun or left_s is None:
            return None
        self._grace_s = max(self._grace_s, left_s)
        if self._grace_s <= 0:  # the deadline had passed when it was given
            return None
        expected = {place.name: place.seconds for place in predict_places(self._past, self._places)}
        due_s = left_s - find_step_limit(self._grace_s, expected[self._places[0]])
        if due_s > 0:
            return due_s
        self._is_given_up = True
        last = max(self._last.values(), default=-1)
        have = [name for name in self._places if self._last.get(name, -1) == last >= 0]
        error = StorageError(
            "the running step did not end in time, so that no step was saved after the notice",
            where=self._root,
            found=f"step {last} in {' and '.join(have)}" if have else "no step that this process saved",
            fix="Save more often, in memory at best, or ask for a longer grace.",
        )
        self._emit(None, error, grace_s=left_s, expected_s=_known(expected))
        return None

    def _report(self, save: _NoticeSave) -> None:
        self._save, planned = None, save.planned
        committed = tuple(name for name in planned.chosen.names if name in save.committed)
        self.committed += bool(committed)
        warnings = [f"not in {name}: {fault}" for name, fault in save.faults.items()]
        error = None
        if not committed:
            found = "; ".join(warnings) or "the save did not end"
            error = StorageError("no save was committed after the notice", where=self._root, found=found)
        elif not planned.chosen.fits and any(place.seconds is not None for place in planned.expected):
            warnings.append("no place was expected to fit into the time left")
        has_copies = self._copied == planned.number
        machines = planned.share.machines if has_copies else 1
        has_off = planned.share.has_leaving and has_copies
        in_root = find_survived(self._root, read_mounts()) if ROOT in committed else ()
        self._emit(
            planned.number,
            error,
            seconds=self._now() - save.start,
            grace_s=planned.notice.left_s,
            chosen=planned.chosen.chosen,
            expected_s=_known({place.name: place.seconds for place in planned.expected}),
            committed=committed,
            survives=find_survived_failures(committed, in_root, machines, is_off_leaving=has_off),
            warnings=tuple(warnings),
            notices=max(planned.notice.notices, self.notices.count),
        )

    def _emit(self, step: int | None, error: Exception | None, **values: object) -> None:
        counts = {"notices": self.notices.count, "saves_begun": self.begun, "saves_committed": self.committed}
        event = PreemptionEvent(self._root, step=step, error=error, **{**counts, **values})  # type: ignore[arg-type]
        emit(event, self._on_event)


def _known(expected: dict[str, float | None]) -> dict[str, float]:
    return {name: seconds for name, seconds in expected.items() if seconds is not None}
