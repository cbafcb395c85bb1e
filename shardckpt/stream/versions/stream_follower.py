"""Wait for the next version of a stream, and keep the versions meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from shardckpt.errors import SourceNotFoundError, StorageError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.storage.resolve_url import kind, split_step_suffix
from shardckpt.stream.format.chain import plan_chain
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import Version, VersionCommit
from shardckpt.stream.retention.leases import LEASE_S, ReaderLease

__all__ = ["StreamFollower"]

_POLL_S = 0.5


class StreamFollower:
    """Waits for versions of a stream, each time at most so many seconds. Raises UsageError for an impossible time."""

    def __init__(self, url: str, timeout_s: float) -> None:
        if not (isinstance(timeout_s, (int, float)) and 0 < timeout_s < float("inf")):
            raise UsageError("`follow_s` must be a finite number of seconds", found=repr(timeout_s))
        if split_step_suffix(url) is not None and kind(url) == "missing":
            raise UsageError("`follow_s` needs a stream, not one version", found=url)
        self._folder, self._timeout_s = StreamFolder(url), timeout_s
        self._lease: ReaderLease | None = ReaderLease(self._folder, LEASE_S)
        self._needs: set[Version] = set()

    def wait_for_start(self) -> None:
        """Wait until a version is published. Raises SourceNotFoundError if none is in time."""
        if self.wait_for_version(None) is None:
            raise SourceNotFoundError(
                "no version is published here", where=self._folder.url, fix="Start the publisher, or wait longer."
            )

    def wait_for_version(self, after: VersionCommit | None) -> VersionCommit | None:
        """Return the newest version once it is later than another one; None if none comes in time."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            for version in reversed(self._folder.list_folders()):  # none without a stream
                if after is not None and version <= after.version:
                    break
                commit = self._folder.find_commit(version)
                if commit is not None:
                    return commit
            if time.monotonic() >= deadline:
                return None
            self._renew()
            time.sleep(_POLL_S)

    def keep(self, lineage: Sequence[VersionCommit]) -> None:
        """Keep versions that follow each other, what leads to the first one, and all after the last one."""
        folder = self._folder
        chain = plan_chain(lineage[0], None, folder.find_commit, folder.has_anchor, folder.url)
        self._needs = {each.version for each in (*chain.deltas, *lineage)}
        self._needs.update(() if chain.anchor is None else (chain.anchor,))
        self._renew()

    def release(self) -> None:
        """Drop the lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(StorageError):  # it expires
                lease.release()

    def _renew(self) -> None:
        if self._lease is None or not self._needs:
            return
        try:
            self._lease.renew(max(self._needs), sorted(self._needs))
        except StorageError as error:
            self._lease = None
            warn_user(f"a removal of old versions may interrupt this export of {self._folder.url}: no lease, {error}")
