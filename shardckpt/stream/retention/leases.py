"""Leases of readers, and what removals announce: whoever comes second sees the other.

A reader writes its lease before it looks for announced removals. A removal is announced before it looks for leases. So
a version that a reader needs is not removed, or the reader knows that it goes.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardckpt.encodings.typed_json import dump
from shardckpt.errors import CheckpointError
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import Version

__all__ = ["LEASES", "REMOVALS", "ReaderLease", "Removal", "VersionLease", "list_doomed", "list_live_leases"]

LEASES, REMOVALS = "leases", "removals"
_NAME = re.compile(r"[0-9a-f]{32}\.json")
_SLACK_S = 60.0  # clocks of two machines may differ by so much
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


class ReaderLease:
    """The lease of one reader."""

    def __init__(self, folder: StreamFolder, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._name = f"{LEASES}/{uuid.uuid4().hex}.json"
        self._written: VersionLease | None = None

    def renew(self, held: Version | None, needs: Sequence[Version]) -> None:
        """Write the lease, unless the last one covers this and has more than half of its time. Raises StorageError."""
        now, last = time.time(), self._written
        is_fresh = last is not None and last.held == held and last.expires_at - now > self._seconds / 2
        if is_fresh and last is not None and set(needs) <= set(last.needs):
            return
        lease = VersionLease(held, tuple(needs), now + self._seconds)
        with self._folder.store.create(self._name) as writer:
            writer.write(dump(lease))
        self._written = lease

    def release(self) -> None:
        """Remove the lease. Raises StorageError."""
        if self._written is not None:
            self._written = None
            self._folder.store.delete(self._name)


def list_live_leases(folder: StreamFolder, now: float) -> list[VersionLease]:
    """Return the leases of readers that may still read, and remove the others."""
    live = []
    for name, lease in _iter_records(folder, LEASES, VersionLease):
        if lease.is_live(now):
            live.append(lease)
        else:
            folder.store.delete(name)
    return live


def list_doomed(folder: StreamFolder) -> set[Version]:
    """Return the versions whose removal is announced."""
    return {version for _, removal in _iter_records(folder, REMOVALS, Removal) for version in removal.versions}


def _iter_records(folder: StreamFolder, where: str, kind: type[_T]) -> Iterator[tuple[str, _T]]:
    for entry in folder.store.list(where):
        if entry.is_folder or not _NAME.fullmatch(entry.name.rpartition("/")[2]):
            continue
        try:
            record = folder.find(kind, entry.name)
        except CheckpointError:
            continue  # a damaged one names nothing
        if record is not None:
            yield entry.name, record
