"""The start that captured last: noted in the root, so that later starts see if they reach its captures."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from shardckpt.checkpoint.run.step_finder import NO_STEP
from shardckpt.storage.store import Store
from shardckpt.tiers.durability.run_record import (
    NOTHING_LOST,
    CapturingStart,
    LostSteps,
    RunRecord,
    read_run_record,
    write_run_record,
)

_MAX_DIGITS = 9  # maximum number of digits of the number of an attempt


class LastStart:
    """The start that captured last. On rank 0."""

    # Nodes that a start does not use may have captures of an earlier one. The start cannot see them or their steps. Its
    # own saves are newer, so they belong to the next branch.
    # Captures in memory are found by the root's path, which another run may use in another container. So the root has
    # the ids of the starts that captured for it.

    def __init__(self, open_root: Callable[[], Store], local: str = "") -> None:
        self._open_root, self._local = open_root, local
        self._id = secrets.token_hex(4)
        self._attempts = 0
        self._recorded: int | None = None
        self._last = RunRecord().start
        self._known: tuple[str, ...] = ()
        self._is_listed = False
        # Steps that the root had lost while a start continued, as of the last look at the record.
        self.lost = NOTHING_LOST
        self.is_in_doubt = False  # whether the record may be gone

    @property
    def is_recorded(self) -> bool:
        """Whether the root got the record that this start captures."""
        return self._recorded is not None

    def make_attempt(self) -> str:
        """Return a unique text for an attempt to save, with this start's id and the attempt's number."""
        self._attempts += 1
        return f"{self._id}-{self._attempts}-{secrets.token_hex(8)}"

    def record(self, branch: int) -> None:
        """Record that this start captures, before its first capture in a branch; again if the record is gone."""
        is_recorded = self._recorded is not None and branch <= self._recorded
        if is_recorded and not self.is_in_doubt:
            return
        store = self._open_root()
        found = read_run_record(store)
        if not (is_recorded and found.start.id):
            local = found.local or (self._local if is_recorded else "")
            start, starts = CapturingStart(self._id, branch), self._list_starts(found)
            write_run_record(store, replace(found, local=local, start=start, starts=starts))
            self._recorded = branch
        self.is_in_doubt = False

    def record_save(self) -> None:
        """Record that this start saves in the root, before its first save there, if the record names no start."""
        # The root is new, or was emptied. Other starts' captures, which this one may be unable to read, follow steps
        # that it does not save.
        if self._is_listed:
            return
        store = self._open_root()
        found = read_run_record(store)
        if not found.starts:
            write_run_record(store, replace(found, starts=self._list_starts(found)))
        self._is_listed = True

    def record_lost(self, committed: tuple[int, int]) -> bool:
        """Record that the root lost its steps while this start continued; return True if that is new."""
        self.lost, self._is_listed = NOTHING_LOST, False
        store = self._open_root()
        found = read_run_record(store)
        self.lost, lost = found.lost, LostSteps(self._id, *committed)
        if self._recorded is None or committed == NO_STEP or (found.lost == lost and found.start.id):
            return False
        start = found.start if found.start.id else CapturingStart(self._id, self._recorded)
        local, starts = found.local or self._local, self._list_starts(found)
        write_run_record(store, replace(found, local=local, start=start, lost=lost, starts=starts))
        self.lost = lost
        return True

    def has_lost(self, committed: tuple[int, int], attempt: str) -> bool:
        """Return True if the root lost steps while a capture's start continued."""
        return read_start(attempt) == self.lost.start and committed <= (self.lost.branch, self.lost.number)

    def read(self) -> None:
        """Read the record of earlier starts. Raises ShardckptError if the root cannot be read."""
        record = read_run_record(self._open_root())
        self._last, self.lost = record.start, record.lost
        self._is_listed = bool(record.starts)
        if record.starts:
            self._known = self._list_starts(record)[:-1]

    def _list_starts(self, record: RunRecord) -> tuple[str, ...]:
        """Return the ids of starts that captured for this root, including a record's; this one is the last."""
        others = dict.fromkeys([*record.starts, *self._known])
        return (*(each for each in others if each != self._id), self._id)

    def has_captured(self, attempt: str) -> bool:
        """Return False if a capture's start never captured for this root."""
        return not self._known or read_start(attempt) in ("", self._id, *self._known)

    def add_found(self, attempts: Iterable[str]) -> None:
        """Record that some attempts' captures belong to this root: a record that was lost does not name them."""
        found = dict.fromkeys(map(read_start, attempts))
        self._known = tuple(dict.fromkeys([*self._known, *(each for each in found if each)]))

    def find_replaced(self, captured: Mapping[str, tuple[tuple[int, int], str]]) -> set[str]:
        """Return earlier starts' captures that are not older than the last start's first capture."""
        # A start that can read neither captures nor the record, because the root was emptied, starts over: its captures
        # have lower numbers than earlier starts' captures on other nodes, and the same branch or a lower one.
        known = {save: at for save, (at, attempt) in captured.items() if attempt}
        own = {save for save in known if read_start(captured[save][1]) == self._last.id}
        if not own:
            return set()
        first = min(known[save] for save in own)
        return {save for save, at in known.items() if at >= first} - own

    def select_saves(self, attempts: Mapping[str, str]) -> list[str]:
        """Return which saves of one step may count: from the last start, or else from this run, or unknown."""
        # If the root was emptied, an earlier start may have captured the step on machines that the last one did not
        # use, in a higher branch.
        starts = {save: read_start(attempt) for save, attempt in attempts.items()}
        if self._last.id and self._last.id in starts.values():
            return [save for save, start in starts.items() if start in ("", self._last.id)]
        return [save for save in attempts if self.has_captured(attempts[save])] or [*attempts]

    def find_least_branch(self, attempts: Iterable[str]) -> int:
        """Return the lowest branch that this start may save steps in, by the last record read."""
        last = self._last
        is_seen = last.id in ("", self._id) or last.id in map(read_start, attempts)
        return 0 if is_seen else last.branch + 1


def read_start(attempt: str) -> str:
    """Return the id of an attempt's start; empty if it is unknown."""
    return attempt.partition("-")[0]


def read_number(attempt: str) -> int:
    """Return an attempt's number within its start; 0 if it is unknown."""
    number, has_number, _ = attempt.partition("-")[2].partition("-")
    return int(number) if has_number and number.isdecimal() and len(number) <= _MAX_DIGITS else 0
