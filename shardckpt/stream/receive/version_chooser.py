"""Choose the version that all workers receive, and lease what leads to it. On rank 0."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from shardckpt.errors import CheckpointError, SourceNotFoundError, StorageError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.stream.format.chain import Chain, plan_chain
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import StreamRecord, Version, VersionCommit
from shardckpt.stream.retention.leases import LEASE_S, ReaderLease, list_doomed

__all__ = ["VersionChooser", "check_target", "find_chain", "wait_for_stream"]

_MIN_POLL_S, _MAX_POLL_S = 0.05, 1.0
_POLL_SHARE = 0.05  # of the time waited: how late a version may be seen


class VersionChooser:
    """Finds versions for one reader, and keeps them while they are read."""

    def __init__(self, folder: StreamFolder) -> None:
        self._folder = folder
        self._lease: ReaderLease | None = ReaderLease(folder, LEASE_S)

    def wait_for(
        self, target: int | None, applied: Version | None, deadline: float, round_s: float
    ) -> VersionCommit | None:
        """Return a version's commit once it is published; by default the newest, and a newer one than `applied`.

        Args:
            target: Number of the version.
            applied: Version that the server has.
            deadline: When to stop, in seconds on the `time.monotonic` clock.
            round_s: Seconds after which it returns None before the deadline.

        Raises:
            SourceNotFoundError: It is not published within the limit.
        """
        start = time.monotonic()
        until = min(deadline, start + round_s)
        while True:
            found = self._find(target, applied)
            if found is not None:
                return found
            if time.monotonic() >= until:
                break
            _pause(start)
        if until < deadline:
            return None
        held = self._folder.find_number(None) if target is None and applied is not None else None
        if held is not None:
            return held
        raise SourceNotFoundError(
            "no version is published here" if target is None else f"version {target} is not published here",
            where=self._folder.url,
            fix="Pass timeout_s to wait for it.",
        )

    def _find(self, target: int | None, applied: Version | None) -> VersionCommit | None:
        """Return the commit that `wait_for` waits for; None before it is published."""
        if target is not None:
            return self._folder.find_number(target)
        if applied is None:
            return self._folder.find_newest()
        if self._folder.list_folders()[-1:] == [applied]:  # most polls: no commit has to be read
            return None
        found = self._folder.find_number(None)  # a damaged commit raises: a server that has a version stays on it
        return None if found is None or found.version == applied else found

    def take_lease(
        self, commit: VersionCommit, applied: Version | None, mirrored: Collection[Version | None]
    ) -> tuple[Version, ...]:
        """Keep the versions that workers read, and return those that are being removed.

        Args:
            commit: The version.
            applied: Version that the server has; None if it needs all weights.
            mirrored: Versions that the workers' mirrors have.
        """
        if self._lease is None:
            return ()
        needs = {commit.version}
        for held in mirrored:
            with suppress(CheckpointError):  # the worker raises it, or takes an anchor
                chain = find_chain(self._folder, commit, held, ())
                needs.update(each.version for each in chain.deltas)
                needs.update(() if chain.anchor is None else (chain.anchor,))
        try:
            self._lease.renew(applied, sorted(needs))
        except StorageError as error:
            self._lease = None
            warn_user(f"a removal of old versions may interrupt this reader of {self._folder.url}: no lease, {error}")
            return ()
        return tuple(sorted(list_doomed(self._folder)))

    def release(self) -> None:
        """Drop the lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(StorageError):  # it expires
                lease.release()


def wait_for_stream(folder: StreamFolder, timeout_s: float) -> StreamRecord:
    """Return what a stream holds, once a publisher creates it.

    Raises:
        SourceNotFoundError: It is not created within the limit.
    """
    start = time.monotonic()
    while True:
        try:
            return folder.require_record()
        except SourceNotFoundError:
            if time.monotonic() >= start + timeout_s:
                raise
        _pause(start)


def _pause(start: float) -> None:
    """Wait between two polls: stores count requests, so that longer waits poll less often."""
    time.sleep(min(max(_MIN_POLL_S, _POLL_SHARE * (time.monotonic() - start)), _MAX_POLL_S))


def find_chain(
    folder: StreamFolder,
    commit: VersionCommit,
    held: Version | None,
    doomed: Collection[Version],
    damaged: Collection[Version] = (),
) -> Chain:
    """Return the way to a version, without doomed versions and damaged anchors. Raises IncompleteError."""
    return plan_chain(
        commit,
        held,
        lambda version: None if version in doomed else folder.find_commit(version),
        lambda version: version not in doomed and version not in damaged and folder.has_anchor(version),
        folder.url,
    )


def check_target(target: object, timeout_s: object) -> None:
    """Check the arguments of `stage`. Raises UsageError."""
    if target is not None and (not isinstance(target, int) or isinstance(target, bool) or target < 0):
        raise UsageError("`target` must be a version's number", found=repr(target))
    if not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s < float("inf"):
        raise UsageError("`timeout_s` must be a finite number of seconds", found=repr(timeout_s))
