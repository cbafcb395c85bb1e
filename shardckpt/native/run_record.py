"""A run's record in its root: which captures belong to the run, and which restores failed."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from shardckpt.encodings.typed_json import OMITTED, UNSTORED, dump, load
from shardckpt.errors import CheckpointError, MissingFileError
from shardckpt.native.records import Count
from shardckpt.native.run_directory import RECORD, RunDirectory, StepFolder
from shardckpt.storage.store import Store, read_bytes

_MAX_BYTES = 1 << 16
_MAX_STARTS = 64

# Records are filled up with spaces to a multiple of this; one with 64 starts has fewer bytes.
_UNIT_BYTES = 1 << 13


class RunStart(NamedTuple):
    """A start of the run, or a restore in it."""

    id: str
    epoch: Annotated[Count, range(10**9)]  # branch of the steps that it saves; later starts have greater ones
    restored: tuple[Count, Count] | None  # order of the step that it restored; None without one
    has_saved: bool = False  # whether it was about to save a step
    is_completed: bool = False  # whether it has completed another step than the restored one


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run keeps in its root about starts and tiers."""

    # Id of the run: captures with another one are not used. Empty without a record.
    run: Annotated[str, re.compile("[0-9a-f]{0,32}")] = ""
    is_rooted: bool = False  # whether the root had a complete step: if it has none now, it was emptied
    starts: tuple[RunStart, ...] = ()  # the last ones, by epoch
    local: Annotated[str, OMITTED] = ""  # folder of the tier on a disk of the node
    is_damaged: Annotated[bool, UNSTORED] = False  # the file cannot be read

    @property
    def last_epoch(self) -> int:
        """The greatest epoch until now."""
        return max((start.epoch for start in self.starts), default=0)

    def with_start(self, start: RunStart) -> RunRecord:
        """Return the record with a start, in place of its earlier state."""
        others = [each for each in self.starts if (each.id, each.epoch) != (start.id, start.epoch)]
        starts = sorted([*others, start], key=lambda each: each.epoch)
        return replace(self, starts=tuple(starts[-_MAX_STARTS:]))

    def count_failures(self) -> Mapping[tuple[int, int], int]:
        """Return how often the run failed after restoring a step, before the next step, by the step's order."""
        counts = Counter[tuple[int, int]]()
        for start in self.starts:
            if start.restored is not None:
                counts[start.restored] = 0 if start.is_completed else counts[start.restored] + 1
        return counts

    @property
    def last_saved(self) -> int:
        """The greatest epoch of a start that saved."""
        return max((start.epoch for start in self.starts if start.has_saved), default=0)

    def is_on_course(self, order: tuple[int, int]) -> bool:
        """Return True unless a later start saved steps after it had restored an older one."""
        limit: tuple[int, int] | None = None
        for start in reversed([each for each in self.starts if each.has_saved]):
            if limit is not None and start.epoch > limit[0]:
                continue  # the run has left this start's steps
            if start.epoch <= order[0]:
                break
            if start.restored is None:
                return False
            limit = start.restored
        return limit is None or order <= limit


def read_run_record(store: Store) -> RunRecord:
    """Return a run's record; an empty one if it has none."""
    try:
        size = store.size(RECORD)
        data = read_bytes(store, RECORD, 0, size) if size <= _MAX_BYTES else b""
    except MissingFileError:
        return RunRecord()
    except CheckpointError:
        data = b""
    line, _, digest = data.rstrip(b" ").partition(b"\n")
    try:
        if digest.strip() != hashlib.sha256(line).hexdigest().encode("ascii"):
            return RunRecord(is_damaged=True)
        return load(RunRecord, line, is_open=True)
    except CheckpointError:
        return RunRecord(is_damaged=True)


def write_run_record(store: Store, record: RunRecord) -> None:
    """Write a run's record atomically, in place of an earlier one, which stays if the store fails."""
    # Records have one size: a reader asks for the size first and then for so many bytes, and another thread or process
    # may write between the two.
    line = dump(record)
    data = line + b"\n" + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n"
    with store.create(RECORD) as writer:
        writer.write(data.ljust(-(-len(data) // _UNIT_BYTES) * _UNIT_BYTES))


def find_run(record: RunRecord, root: RunDirectory, captures: Iterable[StepFolder] = ()) -> str:
    """Return the id of the run that has this root; empty if a new run starts here."""
    if record.run:
        return "" if record.is_rooted and root.has_lost_all else record.run
    # A record that somebody removed had the id of the root's steps. If it is damaged, captures have the id too.
    for steps in (root.steps, captures if record.is_damaged else ()):
        marked = [(step.order, step.mark.run) for step in steps if step.mark is not None]
        if marked:
            return max(marked)[1]
    return ""


def select_captures(captures: Iterable[StepFolder], run: str) -> list[StepFolder]:
    """Return a run's captures."""
    return [step for step in captures if step.mark is not None and step.mark.run == run]
