"""Leases of readers, and what removals announce: whoever comes second sees the other.

A reader writes its lease before it looks for announced removals. A removal is announced before it looks for leases. So
a version that a reader needs is not removed, or the reader knows that it goes.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardckpt.encodings.typed_json import dump
from shardckpt.errors import CheckpointError, StorageError
from shardckpt.events.warn_user import warn_user
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import Version

__all__ = [
    "LEASES",
    "LEASE_S",
    "REMOVALS",
    "ReaderLease",
    "Removal",
    "VersionLease",
    "delete_expired",
    "list_doomed",
    "list_live_leases",
]

LEASES, REMOVALS = "leases", "removals"
LEASE_S = 3600.0  # seconds that a reader's lease lasts
_NAME = re.compile(r"[0-9a-f]{32}(-\d{1,9})?\.json")
_SLACK_S = 60.0  # clocks of two machines may differ by so much
_REMOVAL_S = 3600.0  # seconds that a removal takes at most
_MAX_LISTINGS = 100
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class VersionLease:
    """A reader, and the versions that it needs."""

    held: Version | None  # that its server has: the changes after it stay
    needs: tuple[Version, ...]  # that it is reading
    expires_at: float  # seconds since the epoch, by the reader's clock

    def is_live(self, now: float) -> bool:
        """Return True if the reader may still read."""
        return now < self.expires_at + _SLACK_S


@dataclass(frozen=True, slots=True)
class Removal:
    """Versions that are about to be removed."""

    versions: tuple[Version, ...]
    announced_at: float  # seconds since the epoch


class ReaderLease:
    """The lease of one reader."""

    def __init__(self, folder: StreamFolder, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._id, self._count = uuid.uuid4().hex, 0
        self._written: VersionLease | None = None

    def renew(self, held: Version | None, needs: Sequence[Version]) -> None:
        """Write the lease, unless the last one covers this and has more than half of its time. Raises StorageError."""
        now, last = time.time(), self._written
        is_fresh = last is not None and last.held == held and last.expires_at - now > self._seconds / 2
        if is_fresh and last is not None and set(needs) <= set(last.needs):
            return
        lease = VersionLease(held, tuple(needs), now + self._seconds)
        old = self._name
        # Each lease has a name of its own: stores remember the sizes of files, which never change elsewhere.
        self._count += 1
        with self._folder.store.create(self._name) as writer:
            writer.write(dump(lease))
        if last is not None:
            self._folder.store.delete(old)
        self._written = lease

    @property
    def _name(self) -> str:
        return f"{LEASES}/{self._id}-{self._count}.json"

    def release(self) -> None:
        """Remove the lease. Raises StorageError."""
        if self._written is not None:
            self._written = None
            self._folder.store.delete(self._name)


def list_live_leases(folder: StreamFolder, now: float) -> list[VersionLease]:
    """Return the leases of readers that may still read; a damaged one needs all versions."""
    return [lease for _, lease in _read_leases(folder) if lease.is_live(now)]


def _read_leases(folder: StreamFolder) -> list[tuple[str, VersionLease]]:
    def replace(written_at: float) -> VersionLease:
        return VersionLease(None, tuple(folder.list_folders()), written_at + LEASE_S)

    return _read_records(folder, LEASES, VersionLease, replace)


def _read_removals(folder: StreamFolder) -> list[tuple[str, Removal]]:
    return _read_records(folder, REMOVALS, Removal, lambda written_at: Removal((), written_at))


def delete_expired(folder: StreamFolder, now: float) -> None:
    """Remove leases of readers that are gone, and announcements of removals that were killed."""
    for name, lease in _read_leases(folder):
        if not lease.is_live(now):
            folder.store.delete(name)
    for name, removal in _read_removals(folder):
        if now - removal.announced_at >= _REMOVAL_S:
            folder.store.delete(name)


def list_doomed(folder: StreamFolder) -> set[Version]:
    """Return the versions whose removal is announced; a process that was killed does not remove them after an hour."""
    now = time.time()
    removals = [each for _, each in _read_removals(folder) if now - each.announced_at < _REMOVAL_S]
    return {version for removal in removals for version in removal.versions}


def _read_records(
    folder: StreamFolder, where: str, kind: type[_T], replace: Callable[[float], _T]
) -> list[tuple[str, _T]]:
    """Return the records in a folder by name; in place of a damaged one what `replace` makes of its file's time."""

    def read(name: str) -> _T | None:
        try:
            return folder.find(kind, name)
        except CheckpointError as error:
            warn_user(f"a damaged record counts until it would have expired: {error}")
            written_at = folder.store.changed_at(name)
            return replace(float("inf") if written_at is None else written_at)

    for _ in range(_MAX_LISTINGS):
        names = [entry.name for entry in folder.store.list(where) if not entry.is_folder]
        records = [(name, read(name)) for name in names if _NAME.fullmatch(name.rpartition("/")[2])]
        found = [(name, record) for name, record in records if record is not None]
        if len(found) == len(records):
            return found
        # One was replaced after the listing, which may lack its successor.
    raise StorageError("records of readers change faster than they can be read", where=f"{folder.url}/{where}")
