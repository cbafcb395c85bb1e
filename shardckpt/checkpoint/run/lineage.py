"""Which saves belong to a run, and which of them are newer: the run's record, as this process knows it."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist

from shardckpt.errors import ShardckptError, UsageError
from shardckpt.events import FallbackEvent, OnEvent, emit
from shardckpt.events.warn_user import warn_user
from shardckpt.native.commit import SaveMark
from shardckpt.native.run_directory import RECORD, RunDirectory, StepFolder, read_run, step_name
from shardckpt.native.run_record import (
    RunRecord,
    RunStart,
    find_run,
    read_run_record,
    select_captures,
    write_run_record,
)
from shardckpt.ranks.process_group import get_ranks
from shardckpt.storage.resolve_url import open_store

_LOG = logging.getLogger("shardckpt")

MAX_FAILED = 2  # default number of failures after which a step is passed over, for a run with tiers


class Lineage:
    """The run's starts. Each has an epoch, the branch of its steps: they are newer than all of earlier starts.

    On rank 0. A run without tiers has no record, and no epochs, unless a process with tiers or with
    `max_failed_restores` used it.
    """

    def __init__(
        self,
        root: str,
        group: dist.ProcessGroup | None,
        on_event: OnEvent | None,
        max_failed: object,
        *,
        has_tiers: bool,
        local: str = "",
    ) -> None:
        most = (MAX_FAILED if has_tiers else 0) if max_failed is None else max_failed
        if type(most) is not int or most < 0:
            raise UsageError("`max_failed_restores` must be an integer from 0", found=repr(max_failed))
        self._root, self._group, self._on_event, self._most, self._has_tiers = root, group, on_event, most, has_tiers
        self._has_record = False  # whether the run had a record, or steps of one, when it was read last
        self._lock = threading.Lock()  # a save in the root ends in the background
        self._id, self._saves = secrets.token_hex(4), 0
        self._record = RunRecord(local=local)  # as this process knows it
        self._seen = 0  # the greatest epoch of a record that this process has read
        self._replaced = ""  # id of the run that had this root before, if it was emptied
        self._start: RunStart | None = None
        self._last: tuple[int, int] | None = None  # order of the step that this process restored or saved last
        self._branch: int | None = None  # branch of the next step in a run without a record; None if unknown
        self._is_restored = False  # whether nothing was saved since
        self._newest = ""  # name of the root's newest known step
        self._is_in_doubt = False  # whether the root may have lost the record or all steps
        self._is_overtaken = False  # whether a later start may have saved

    @property
    def run(self) -> str:
        """Id of the run; empty before it was looked for."""
        return self._record.run

    def find_failed(self) -> dict[tuple[int, int], str]:
        """Return why steps are passed over, by their orders."""
        try:
            counts = read_run_record(open_store(self._root)).count_failures() if self._most else {}
        except ShardckptError as error:
            _LOG.warning("failed restores of %s cannot be read: %s", self._root, error)
            return {}
        return {order: _describe_failures(order[1], count) for order, count in counts.items() if count >= self._most}

    def start_restore(self, root: RunDirectory, captures: Iterable[StepFolder] = ()) -> str:
        """Return the id of the run whose captures count, now that a restore starts. Raises ShardckptError."""
        if self._start is not None:
            self.follow(root)
        record = self._read()
        run = find_run(record, root, captures)
        self._replaced = "" if run else record.run
        known = record if run and run == record.run else RunRecord(run or secrets.token_hex(8))
        local = self._record.local or record.local
        self._note(root, replace(known, is_rooted=not root.has_lost_all, local=local))
        return self.run

    def _read(self) -> RunRecord:
        record = read_run_record(open_store(self._root))
        self._seen = max(self._seen, record.last_epoch)
        return record

    def _note(self, root: RunDirectory, record: RunRecord) -> None:
        self._record = record
        self._newest = root.complete[-1].name if root.complete else ""

    def note_read(self, run: RunDirectory) -> None:
        """Note whether a run that was read has a record."""
        self._has_record = run.has_record or any(step.mark is not None for step in run.steps)

    def record_restore(self, restored: tuple[int, int], least: int) -> None:
        """Record a start that counts as failed until it completes a further step; `least` is as in `open_epoch`."""
        self._start, self._last, self._branch, self._is_restored = None, restored, least, True
        if not self._most or get_ranks(self._group).rank:
            return
        try:
            if not self.run:
                self.start_restore(read_run(open_store(self._root)))
            self._append(RunStart(self._id, least + 1, restored))
        except ShardckptError as error:
            _LOG.warning("a restore of %s is not recorded: %s", self._root, error)

    def record_completed(self, number: int) -> None:
        """Record that the run completed a step, so that the start has not failed."""
        start = self._start
        if start is None or start.is_completed or start.restored is None or number == start.restored[1]:
            return
        try:
            self._change(start._replace(has_saved=True, is_completed=True))
        except ShardckptError as error:
            _LOG.warning("a completed step of %s is not recorded: %s", self._root, error)

    def _change(self, start: RunStart) -> None:
        """Record what this start did."""
        self._start = start
        with self._lock:
            record = self._read()
            if record.run == self.run:
                self._write(record.with_start(start))

    def record_save(self, number: int, branch: int) -> None:
        """Record that a step was saved."""
        self._last, self._branch, self._is_restored = (branch, number), branch, False

    def find_branch(self, number: int, find_newest: Callable[[], int]) -> int:
        """Return the branch for a step in a run without a record; `find_newest` returns the newest step's."""
        if self._branch is None:
            return find_newest()
        return self._branch + (self._is_restored and self._last is not None and number < self._last[1])

    def open_epoch(self, least: int, *, is_for_root: bool) -> int:
        """Return the branch of this start's steps, which is recorded before the first save. Raises ShardckptError.

        Args:
            least: From `find_branch`.
            is_for_root: Whether the step is saved in the root, so that one more request does not matter.
        """
        if self._start is not None and (is_for_root or self._is_overtaken):
            self._is_overtaken = False
            if self._read().last_saved > self._start.epoch:  # another process has saved: this one does it again
                self._start = None
        if self._start is None:
            if not (self._has_tiers or self._has_record):
                return least
            if not self.run:
                self.start_restore(read_run(open_store(self._root)))
            self._append(RunStart(self._id, least + 1, self._last, has_saved=True, is_completed=True))
        elif not self._start.has_saved:
            self._change(self._start._replace(has_saved=True))
        if self._is_in_doubt:
            self._is_in_doubt = False
            with suppress(ShardckptError):
                self.follow(read_run(open_store(self._root)))
        return least if self._start is None else self._start.epoch

    def _append(self, start: RunStart) -> None:
        """Record a start, in an epoch after all earlier ones."""
        with self._lock:
            found = self._read()
            run = self.run if found.run in ("", self._replaced) else found.run  # another process was faster
            known = next((each for each in (found, self._record) if each.run == run), RunRecord())
            start = start._replace(epoch=max(start.epoch, self._seen + 1))
            rooted, local = known.is_rooted or self._record.is_rooted, self._record.local or known.local
            self._write(replace(known.with_start(start), run=run, is_rooted=rooted, local=local))
            self._start = start

    def _write(self, record: RunRecord) -> None:
        write_run_record(open_store(self._root), record)
        self._record = record

    def make_mark(self) -> str:
        """Return the mark of a new save as text; empty in a run without a record."""
        self._saves += 1
        return SaveMark(self.run, self._id, self._saves).encode() if self.run else ""

    def note_root_step(self, number: int) -> None:
        """Record that the root has a step: if it has none later, it was emptied. In the background."""
        self._newest = step_name(number)
        if self._record.is_rooted or self._start is None:
            return
        with self._lock, suppress(ShardckptError):  # the next save in the root tries again
            record = read_run_record(open_store(self._root))
            if record.run == self.run:
                self._write(replace(record, is_rooted=True))

    def look(self) -> None:
        """Look if the root still has the run's record and its newest step, and no later start. In the background."""
        # If the root has lost them, the next save reads it, and records there that this start continues.
        needed, start = {RECORD, *([self._newest] if self._newest else [])}, self._start
        with suppress(ShardckptError):  # a root that cannot be listed is seen by the saves into it
            if not needed <= {entry.name for entry in open_store(self._root).list()}:
                self._is_in_doubt = True
            elif start is not None and read_run_record(open_store(self._root)).last_saved > start.epoch:
                self._is_overtaken = True

    def follow(self, root: RunDirectory) -> None:
        """Write the record again if the root has lost it, or all its steps, while this start continues."""
        if self._start is None:
            return
        text = f"all steps in {self._root} are gone while the run continues"
        is_emptied = self._record.is_rooted and root.has_lost_all
        try:
            with self._lock:
                found = read_run_record(open_store(self._root))
                if found.run not in ("", self.run):  # a new run has started here
                    return
                is_emptied = root.has_lost_all and (found.is_rooted if found.run else self._record.is_rooted)
                if found.run and not is_emptied:
                    self._note(root, found)
                    return
                known = found if found.run else self._record
                self._write(replace(known, is_rooted=not root.has_lost_all))
                self._note(root, self._record)
        except ShardckptError as error:
            self._is_in_doubt = True  # the next save tries again
            _LOG.warning("%s, and it cannot be recorded that captures are still needed: %s", text, error)
            return
        if is_emptied:
            text += ": what this start has captured is restored all the same, unless its record there goes too"
            emit(FallbackEvent(self._root, warnings=(text,)), self._on_event)
            warn_user(text)

    def find_run(self, root: RunDirectory) -> str:
        """Return the id of the run whose captures a new start would use; empty if it would use none."""
        return find_run(read_run_record(open_store(self._root)), root)

    def select_found_again(self, captures: Sequence[StepFolder], root: RunDirectory) -> list[StepFolder]:
        """Return the captures that count for a new start: it restores them, or steps that followed them."""
        if not captures:
            return []
        record = read_run_record(open_store(self._root))
        found = select_captures(captures, find_run(record, root))
        return [step for step in found if record.is_on_course(step.order)]

    def has_lost_last_start(self, epochs: Iterable[int]) -> bool:
        """Return True if the last start that saved is not among the epochs of steps."""
        return self._record.last_saved not in (0, *epochs)


def _describe_failures(number: int, count: int) -> str:
    return (
        f"it is passed over: the run failed {count} times after its restore, before the next step was completed; "
        f"restore(step={number}) loads it, and Checkpointer(max_failed_restores={count + 1}) tries it again"
    )
