"""Delete a run's steps that no rule keeps, after a save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from shardckpt.checkpoint.run.step_finder import SHOWN, StepFinder, find_unreadable
from shardckpt.errors import CheckpointError, StorageError, UsageError, escape
from shardckpt.events import OnEvent, PruneEvent, Recorder, emit
from shardckpt.events.warn_user import warn_user
from shardckpt.native.apply_retention import StepClock, apply_retention
from shardckpt.native.run_directory import RunDirectory, StepFolder, read_metrics, read_run
from shardckpt.plan.retention import Retention, SavedStep, find_best, require_metric
from shardckpt.storage.store import Store


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
