"""Delete steps of a run that no retention rule keeps, and orphans."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shardckpt.native.run_directory import (
    Orphan,
    RunDirectory,
    StepFolder,
    delete_orphan,
    delete_steps,
    find_orphans,
    other_content,
    without_steps,
)
from shardckpt.plan.retention import Retention, SavedStep, is_expired, steps_to_delete, with_trusted_times
from shardckpt.storage.resolve_url import open_remote
from shardckpt.storage.store import Store

_CLOCK = ".shardckpt-clock"  # file that is written into a run and removed, to know the time of the store


@dataclass(frozen=True, slots=True)
class Deleted:
    """Deleted folders and content that stays; with `dry_run`, folders to delete."""

    steps: tuple[StepFolder, ...]  # deleted step folders, including duplicates of a step number
    orphans: tuple[str, ...]  # names of deleted folders from killed saves
    other_content: tuple[str, ...]  # names of content in these steps that no save wrote; it stays
    waiting: tuple[Orphan, ...] = ()  # folders of unfinished saves and removals that are too young to delete


class StepClock:
    """A process's clock for saving and removing steps. It never jumps ahead."""

    # The machine's clock may jump ahead. A step whose time is ahead of this clock counts as saved when it was first
    # seen.

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()
        self._seen: dict[str, float] = {}  # by save

    def read(self) -> float:
        """Return the current time, in seconds since the epoch."""
        return min(time.time(), self._count())

    def find_saved_at(self, step: StepFolder) -> float | None:
        """Return when a step's save started; None if unknown."""
        if step.saved_at is not None and step.saved_at > (counted := self._count()):
            self._seen.setdefault(step.save, counted)
        return self._seen.get(step.save, step.saved_at)

    def _count(self) -> float:
        return self._start + time.monotonic()


def apply_retention(
    store: Store,
    run: RunDirectory,
    rules: Retention,
    *,
    now: float,
    is_complete: Callable[[StepFolder], bool],
    get_metrics: Callable[[StepFolder], Mapping[str, float]],
    find_saved_at: Callable[[StepFolder], float | None] = attrgetter("saved_at"),
    chosen: Collection[int] | None = None,
    may_be_over: bool = False,
    protected: Collection[int] = (),
    orphan_age_s: float | None = None,
    dry_run: bool = False,
    on_delete: Callable[[Sequence[StepFolder]], object] | None = None,
) -> Deleted:
    """Delete the steps that no rule keeps, then expired orphans."""
    steps = [
        _describe(step, is_complete(step), find_saved_at(step), get_metrics if rules.keep_best is not None else None)
        for step in run.steps
    ]
    trusted = with_trusted_times(steps, now, may_be_over=may_be_over)
    if chosen is None:
        numbers = set(steps_to_delete(trusted, rules, now=now, protected=protected))
    else:
        numbers = set(chosen).difference(step.number for step in run.complete[-1:])
    deleted = [step for step in run.steps if step.number in numbers and (step.is_double or is_complete(step))]
    if on_delete is not None and not dry_run:
        on_delete(deleted)
    content = other_content(deleted) if dry_run else delete_steps(store, run, [step.name for step in deleted])
    kept = run if dry_run else without_steps(run, deleted)
    expired, waiting, orphans = list[Orphan](), list[Orphan](), find_orphans(store, kept)
    if not dry_run and any(is_expired(left.changed_at, now, orphan_age_s) for left in orphans):
        now = min(now, _read_store_time(store, now))
    for left in orphans:
        if is_expired(left.changed_at, now, orphan_age_s):
            expired.append(left)
        else:
            waiting.append(left)
    gone = expired if dry_run else [orphan for orphan in expired if delete_orphan(store, orphan)]
    return Deleted(tuple(deleted), tuple(orphan.name for orphan in gone), tuple(content), tuple(waiting))


def _read_store_time(store: Store, now: float) -> float:
    """Return the time by a store's clock; `now` if the store has no times."""
    # If this machine's clock is days ahead, a save that is under way elsewhere would look like an orphan.
    files = open_remote(store.url)
    files.create(_CLOCK).close()  # without content: the disk may be full
    try:
        return files.written_at(_CLOCK) or now
    finally:
        files.delete(_CLOCK)


def _describe(
    step: StepFolder,
    is_complete: bool,
    saved_at: float | None,
    get_metrics: Callable[[StepFolder], Mapping[str, float]] | None,
) -> SavedStep:
    """Describe a step for the retention rules."""
    metrics = get_metrics(step) if get_metrics is not None and is_complete else {}
    return SavedStep(step.number, is_complete, saved_at, metrics, step.branch)
