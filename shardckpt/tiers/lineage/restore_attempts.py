"""Restores after which the run failed before its next step; the root has the counts, for all later starts."""

from __future__ import annotations

import logging
from dataclasses import replace

from shardckpt.checkpoint.run.save_schedule import SaveSchedule
from shardckpt.checkpoint.run.step_finder import StepFinder
from shardckpt.errors import ShardckptError, UsageError
from shardckpt.ranks.process_group import get_ranks
from shardckpt.tiers.durability.run_record import RECORD, Attempt, read_run_record, write_run_record

_LOG = logging.getLogger("shardckpt")

MAX_FAILED = 2  # default number of failures after which a step is passed over, for a run with tiers
_MAX_ATTEMPTS = 64  # maximum number of steps whose failures are remembered


def open_attempts(finder: StepFinder, schedule: SaveSchedule, most: object, *, has_tiers: bool) -> RestoreAttempts:
    """Return a run's counts; its finder passes over failed steps, and its schedule ends attempts."""
    number = (MAX_FAILED if has_tiers else 0) if most is None else most
    if type(number) is not int or number < 0:
        raise UsageError("`max_failed_restores` must be an integer from 0", found=repr(most))
    attempts = RestoreAttempts(finder, number)
    finder.find_failed, schedule.on_completed = attempts.find_failed, attempts.end
    return attempts


class RestoreAttempts:
    """Counts, for each step, its restores after which no further step was completed. On rank 0."""

    # Each restore adds one to its step's count, and the first completed step after it removes the count. Counts that
    # cannot be read or written are ignored: training continues.

    def __init__(self, finder: StepFinder, most: int) -> None:
        self._finder, self._most = finder, most
        self._open: Attempt | None = None

    def find_failed(self) -> dict[tuple[int, int], str]:
        """Return why steps are passed over, by their orders."""
        if not self._most:
            return {}
        failed = [attempt for attempt in self._read() if attempt.failures >= self._most]
        return {(attempt.branch, attempt.number): _describe(attempt) for attempt in failed}

    def start(self, order: tuple[int, int]) -> None:
        """Count a step's restore as failed, until a further step is completed."""
        if not self._most or get_ranks(self._finder.group).rank:
            return
        before = [attempt.failures for attempt in self._read() if attempt[:2] == order]
        self._open = Attempt(*order, sum(before) + 1)
        self._write(self._open)

    def end(self, completed: int) -> None:
        """Remove the restored step's count, after a further step was completed."""
        if self._open is not None and completed > self._open.number:
            ended, self._open = self._open, None
            self._write(ended._replace(failures=0))

    def _read(self) -> tuple[Attempt, ...]:
        try:
            return read_run_record(self._finder.open_store()).attempts
        except ShardckptError as error:
            _LOG.warning("failed restores of %s cannot be read: %s", self._finder.root, error)
            return ()

    def _write(self, changed: Attempt) -> None:
        """Write one step's count; 0 removes it."""
        try:
            store = self._finder.open_store()
            record = read_run_record(store)
            others = [attempt for attempt in record.attempts if attempt[:2] != changed[:2]]
            kept = [*others, *([changed] if changed.failures else [])]
            write_run_record(store, replace(record, attempts=tuple(kept[-_MAX_ATTEMPTS:])))
        except ShardckptError as error:
            _LOG.warning("a restore of %s is not recorded: %s", self._finder.root, error)


def _describe(attempt: Attempt) -> str:
    return (
        f"it is passed over: the run failed {attempt.failures} times after its restore, before the next step was "
        f"completed; restore(step={attempt.number}) loads it, and without the file {RECORD} in the root it is tried "
        "again"
    )
