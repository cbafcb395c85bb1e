"""Which steps of a run to save and, after a save, which ones no rule keeps."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from shardckpt.checkpoint.notice.notice_saves import NoticeSaves, NoticeShare, PlannedNotice
from shardckpt.checkpoint.notice.notices import RankNotice, find_staying
from shardckpt.checkpoint.notice.place_prediction import ChosenPlaces
from shardckpt.checkpoint.run.step_finder import SHOWN, StepFinder, find_unreadable, require_step_number
from shardckpt.errors import CheckpointError, StorageError, UsageError, escape
from shardckpt.events import OnEvent, PruneEvent, Recorder, emit
from shardckpt.events.warn_user import warn_user
from shardckpt.native.apply_retention import StepClock, apply_retention
from shardckpt.native.run_directory import RETENTION, RunDirectory, StepFolder, read_metrics, read_run
from shardckpt.plan.retention import Retention, SavedStep, find_best, require_metric
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.store import Store

_SIGNAL, _FAILURE = 1, 2


@dataclass
class BackgroundSave:
    """The last background save's result."""

    has_failed: bool = False  # whether the save ended without a committed step


class SaveSchedule:
    """Schedules the steps to save.

    Attributes:
        stop_requested: Whether any rank received a notice and all ranks have agreed on it.
        notice_saves: Notices of this process, and the saves that they ask for.
        needs_all_ranks: Whether ranks with a notice take part until the commit in any case.
    """

    def __init__(
        self,
        save_every: int | None,
        tier_every: Sequence[int] = (),
        on_completed: Callable[[int], object] = lambda _: None,
        notice_saves: NoticeSaves | None = None,
    ) -> None:
        if save_every is not None and (type(save_every) is not int or save_every < 1):
            raise UsageError("`save_every` must be a positive integer", found=repr(save_every))
        self._save_every, self._tier_every = save_every, tier_every
        self._last_step: int | None = None
        self._background: BackgroundSave | None = None
        self._is_due = self._is_watching = False
        self.stop_requested, self.notice_saves = False, notice_saves or NoticeSaves()
        self.needs_all_ranks = False
        self._on_completed = on_completed  # called with the number of a training step that has ended

    @property
    def has_signal(self) -> bool:
        """Whether this process received a notice."""
        return self.notice_saves.notices.has_notice

    def record_restore(self, number: int) -> None:
        """Record that a step was restored, so that it is not saved again."""
        self._last_step = number

    def record_save(self, number: int, background: BackgroundSave | None) -> None:
        """Record that a step was saved; a request by a signal is fulfilled."""
        self._last_step, self._background, self._is_due = number, background, False
        self._on_completed(number)

    def set_requested(self, is_requested: bool) -> None:
        """Record whether the ranks agreed that a signal requested a stop."""
        if is_requested and not self.stop_requested:
            self.stop_requested = self._is_due = self.notice_saves.is_agreed = True

    @property
    def has_deadline(self) -> bool:
        """Whether the next save is the one that a notice asks for, and has a deadline; equal on all ranks."""
        return self._is_due and self.notice_saves.notices.has_deadline

    def choose_places(
        self,
        number: int,
        notices: Sequence[Any],
        names: Sequence[str],
        share: NoticeShare | None = None,
        *,
        has_started: bool = False,
    ) -> ChosenPlaces | None:
        """Choose the places for a step before a deadline; None if the schedule decides, or they are chosen. On rank 0.

        Args:
            number: Step number.
            notices: All ranks' `RankNotice` as JSON.
            names: Places that can take the step, the nearest first.
            share: Nodes of its captures.
            has_started: Whether the step is captured already.
        """
        notice = RankNotice.merge([RankNotice(*each) for each in notices])
        self.set_requested(notice.has_notice)
        if not self.has_deadline or self.notice_saves.is_planned(number):
            return None
        return self.notice_saves.plan(number, notice, names, share, has_started=has_started)

    def find_staying(self, notices: Sequence[Any], given: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """Return the ranks that can commit the next save without the others; empty if all have to. On rank 0.

        Args:
            notices: All ranks' `RankNotice` as JSON.
            given: Names of what each rank gives. Rank 0's values count; if it leaves, the values that the lowest
                rank gives that stays.
        """
        if self.needs_all_ranks or not self.has_deadline:
            return ()
        staying = find_staying([RankNotice(*each) for each in notices])
        if staying and given[staying[0]] != given[0]:
            warn_user(
                f"rank 0 leaves, and gives other metrics, custom_metadata or model_files than rank {staying[0]}:"
                " the save needs all ranks until its commit"
            )
            return ()
        return staying

    def hand_over(self, staying: Sequence[int]) -> PlannedNotice | None:
        """Return what the rank that reports the save needs, if rank 0 leaves. On rank 0."""
        return self.notice_saves.hand_over() if staying and staying[0] else None

    def should_save(self, step: Any, coordinator: LinkedGroup) -> bool:
        """Return True if a step should be saved. Collective inside `watch`."""
        number, fault = 0, None
        try:
            number = require_step_number(step)
        except UsageError as error:
            fault = error
        if self._is_watching or coordinator.size == 1:
            has_failed = self._background is not None and self._background.has_failed
            flags = bytes([(_SIGNAL if self.has_signal else 0) | (_FAILURE if has_failed else 0)])
            (answer,) = coordinator.ask_rank0("agreeing whether to save", fault or flags, _merge_flags)
            self.set_requested(bool(answer & _SIGNAL))
            if answer & _FAILURE:  # the save failed on all ranks
                self._last_step = self._background = None
                self._is_due = self.stop_requested
        elif fault is not None:
            raise fault
        self._on_completed(number)
        is_turn = self._is_turn_of_root(number) or (
            number > 0 and any(not number % every for every in self._tier_every)
        )
        return number != self._last_step and (is_turn or self._is_due)

    def is_for_root(self, number: int) -> bool:
        """Return True if a step belongs in the root: it is its turn, a signal came, or no tier takes it."""
        return self._is_due or self._is_turn_of_root(number) or all(number % every for every in self._tier_every)

    def _is_turn_of_root(self, number: int) -> bool:
        return self._save_every is not None and number > 0 and number % self._save_every == 0

    @contextmanager
    def watch(self, numbers: tuple[int, ...]) -> Iterator[None]:
        """Record signals inside the context; restore their handlers on exit."""
        try:
            with self.notice_saves.notices.watch(numbers):
                self._is_watching = True
                yield
        finally:
            self._is_watching = False


def _merge_flags(messages: list[bytes]) -> list[bytes]:
    """Return all ranks' combined flags: a signal came, a background save failed."""
    return [bytes([reduce(operator.or_, (flags for (flags,) in messages))])] * len(messages)


class StepRetention:
    """Applies a run's retention rules, on rank 0."""

    def __init__(
        self,
        rules: Retention,
        finder: StepFinder,
        on_event: OnEvent | None = None,
        list_needed: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._rules, self._finder, self._on_event = rules, finder, on_event
        self._list_needed, self._lock = list_needed, threading.Lock()
        self._metrics: dict[str, Mapping[str, float]] = {}
        self._clock = StepClock()
        self._is_tidy = False

    @property
    def notes(self) -> dict[str, str]:
        """Custom metadata that says by which rules the run removes steps."""
        text = self._rules.encode()
        return {RETENTION: text} if text else {}

    def apply(self, saved: int | None) -> None:
        """Delete the steps that no rule keeps; errors become warnings."""
        if self._is_tidy and not self._rules.is_needed:
            return
        recorder = Recorder(PruneEvent, self._finder.root)
        try:
            with self._lock:
                removed = self._delete(saved)
            self._is_tidy = True
            if removed:
                numbers, nbytes = tuple(step.number for step in removed), sum(step.nbytes for step in removed)
                recorder.values.update(removed=numbers, nbytes=nbytes)
                emit(recorder.build(None), self._on_event)
        except (StorageError, CheckpointError, UsageError) as error:
            emit(recorder.build(error), self._on_event)
            what = "old steps" if saved is None else f"step {saved} is saved, but old ones"
            warn_user(f"{what} could not be removed: {error}")

    def _delete(self, saved: int | None) -> tuple[StepFolder, ...]:
        store = self._finder.open_store()
        run = read_run(store)
        if any(step.is_newer for step in run.steps) and not self._rules.is_needed:
            return ()
        run.require_readable()
        deleted = apply_retention(
            store,
            run,
            self._rules,
            now=self._clock.read(),
            find_saved_at=self._clock.find_saved_at,
            is_complete=self._finder.is_good,
            get_metrics=lambda step: self._read_metrics(store, step),
            protected={*self._list_needed(), *([] if saved is None else [saved])},
            on_delete=lambda steps: self._finder.removed.update({step.save: step.number for step in steps}),
        )
        if deleted.other_content:
            stay = deleted.other_content
            shown = ", ".join(map(escape, stay[:SHOWN])) + (", ..." if len(stay) > SHOWN else "")
            warn_user(f"removed steps had files that no save wrote, which were left there: {shown}")
        return deleted.steps

    def _read_metrics(self, store: Store, step: StepFolder) -> Mapping[str, float]:
        """Return a step's metrics, cached by save, since they never change."""
        if step.save not in self._metrics:
            self._metrics[step.save] = read_metrics(store, step)
        return self._metrics[step.save]

    def find_ranking_fault(self, number: int, names: Sequence[str]) -> str:
        """Return why `keep_best` cannot rank steps: none has the metric. Empty if it can."""
        if self._rules.keep_best is None or not names or self._rules.metric in names:
            return ""
        saved = [SavedStep(number, metrics=dict.fromkeys(names, 0.0))]
        others = [step for step in self._list_metrics(read_run(self._finder.open_store())) if step.number != number]
        try:
            require_metric([*saved, *others], self._rules.metric)
        except UsageError as error:
            return f"step {number} is saved, but no step can be removed: {error}"
        return ""

    def find_best(self, metric: str | None, mode: Literal["min", "max"] | None) -> int | None:
        """Return the number of the complete step with the best metric; None without steps."""
        if metric not in (None, self._rules.metric) and mode is None:
            raise UsageError(
                f"`mode` must be given for the metric {metric!r}, since the Checkpointer ranks by another",
                found=repr(self._rules.metric),
                expected="mode='min' or mode='max'",
            )
        rules = replace(
            self._rules,
            metric=self._rules.metric if metric is None else metric,
            mode=self._rules.mode if mode is None else mode,
        )
        run = self._finder.read()
        self._finder.require_readable(find_unreadable(run))
        return find_best(self._list_metrics(run), rules.metric, rules.mode)

    def _list_metrics(self, run: RunDirectory) -> list[SavedStep]:
        """Return the steps that can be loaded, with their metrics."""
        store = self._finder.open_store()
        good = [step for step in run.complete if self._finder.is_good(step)]
        return [SavedStep(s.number, metrics=self._read_metrics(store, s), branch=s.branch) for s in good]
