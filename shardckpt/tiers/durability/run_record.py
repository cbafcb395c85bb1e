"""`RunRecord`: what a run with tiers keeps in its root, so that later processes find it; and a run's id."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardckpt.errors import CheckpointError, MissingFileError
from shardckpt.storage.resolve_url import local_path
from shardckpt.storage.store import Store, read_bytes

RECORD = ".shardckpt-run.json"  # name of the record's file in the root

_MAX_BYTES = 1 << 16

_MAX_BRANCH = 10**9  # the manifest's branch has at most nine digits
_MAX_STARTS = 64  # maximum starts in a record: memory keeps the last few's captures

# Records are filled up with spaces to a multiple of this; one with 64 failed steps has fewer bytes.
_UNIT_BYTES = 1 << 12


def find_run_id(root: str) -> str:
    """Return the id under which a run's captures are found again: equal for equal roots."""
    path = local_path(root)
    place = root.rstrip("/") if path is None else os.path.realpath(path)
    return hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Attempt(NamedTuple):
    """Restores of a step after which the run failed."""

    branch: int
    number: int  # number of the step
    failures: int  # number of restores since a further step was completed last


class CapturingStart(NamedTuple):
    """The run's start that captured last."""

    id: str = ""  # text that no other start has; empty if no start is known
    branch: int = 0


NO_START = CapturingStart()


class LostSteps(NamedTuple):
    """Steps that the root had lost while a start continued; its captures still belong to the run."""

    start: str = ""  # id of the start; empty if the root has lost nothing
    branch: int = -1  # branch of the newest step that it had
    number: int = -1


NOTHING_LOST = LostSteps()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Facts about tiers and starts that a run keeps in its root."""

    local: str = ""  # the tier's folder on a disk of the node; empty without one
    attempts: tuple[Attempt, ...] = ()  # steps after whose restore the run failed, or may be about to
    start: CapturingStart = NO_START  # start of the run that captured last
    lost: LostSteps = NOTHING_LOST  # steps that the root had lost last while a start continued
    starts: tuple[str, ...] = ()  # ids of the starts that have captured, or whose captures were found; empty if unknown

    def encode(self) -> bytes:
        """Return the record as a JSON line."""
        fields = {
            "local": self.local,
            "attempts": self.attempts,
            "start": self.start,
            "lost": self.lost,
            "starts": self.starts[-_MAX_STARTS:],
        }
        return json.dumps(fields).encode("ascii") + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> RunRecord:
        """Return a record from encoded bytes; what is damaged or unknown is as in a new one."""
        try:
            found: Any = json.loads(data)
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(found, Mapping):
            return cls()
        local, attempts, start = found.get("local"), found.get("attempts"), found.get("start")
        listed = attempts if isinstance(attempts, list) else []
        starts = found.get("starts")
        return cls(
            local if isinstance(local, str) and "\0" not in local else "",
            tuple(Attempt(*each) for each in listed if _is_attempt(each)),
            _decode_start(start),
            _decode_lost(found.get("lost")),
            tuple(each for each in starts if isinstance(each, str)) if isinstance(starts, list) else (),
        )


def _is_attempt(found: object) -> bool:
    return isinstance(found, list) and len(found) == len(Attempt._fields) and all(type(each) is int for each in found)


def _decode_start(found: Any) -> CapturingStart:
    if isinstance(found, list) and [*map(type, found)] == [str, int] and 0 <= found[1] < _MAX_BRANCH:
        return CapturingStart(*found)
    return NO_START


def _decode_lost(found: Any) -> LostSteps:
    if isinstance(found, list) and [*map(type, found)] == [str, int, int] and min(found[1:]) >= 0 and found[0]:
        return LostSteps(*found)
    return NOTHING_LOST


def read_run_record(store: Store) -> RunRecord:
    """Return a run's record; a new one if it has none."""
    try:
        size = store.size(RECORD)
        return RunRecord.decode(read_bytes(store, RECORD, 0, size)) if size <= _MAX_BYTES else RunRecord()
    except (MissingFileError, CheckpointError):
        return RunRecord()


def write_run_record(store: Store, record: RunRecord) -> None:
    """Write a run's record atomically, in place of an earlier one, which stays if the store fails."""
    # All records have one size: a reader asks for the size first and then for so many bytes, and another thread or
    # process may write between the two.
    data = record.encode()
    with store.create(RECORD) as writer:
        writer.write(data.ljust(-(-len(data) // _UNIT_BYTES) * _UNIT_BYTES))
