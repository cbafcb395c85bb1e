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

_POLL_S = 0.05


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
        until = min(deadline, time.monotonic() + round_s)
        while True:
            is_late = target is None and applied is None  # a server that has a version stays on it
            found = self._folder.find_newest() if is_late else self._folder.find_number(target)
            if found is not None and (target is not None or found.version != applied):
                return found
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_S)
        if until < deadline:
            return None
        if found is not None:
            return found
        raise SourceNotFoundError(
            "no version is published here" if target is None else f"version {target} is not published here",
            where=self._folder.url,
            fix="Pass timeout_s to wait for it.",
        )

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
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return folder.require_record()
        except SourceNotFoundError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_POLL_S)


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
