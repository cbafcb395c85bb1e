"""Remove the versions of a stream that nothing needs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection

from shardckpt.encodings.typed_json import dump
from shardckpt.plan.retention import ORPHAN_TTL_S
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import COMMIT, Version
from shardckpt.stream.retention.leases import REMOVALS, Removal, delete_expired, list_live_leases
from shardckpt.stream.retention.removal_plan import plan_removal, require_anchors

__all__ = ["prune_stream"]


def prune_stream(
    folder: StreamFolder, *, keep_anchors: int, kept: Collection[int] = (), dry_run: bool = False
) -> list[Version]:
    """Remove what no reader, rule or kept step needs; return the removed versions, in order.

    Args:
        folder: The stream.
        keep_anchors: How many of the newest anchors stay, with all versions after them.
        kept: Numbers of versions that stay readable.
        dry_run: Whether to remove nothing.

    Raises:
        UsageError: `keep_anchors` is less than 1.
        CheckpointError: A commit cannot be read. Nothing is removed.
        StorageError: The store failed.
    """
    require_anchors(keep_anchors)
    bases: dict[Version, Version | None] = {}
    uncommitted = []
    for version in folder.list_folders():
        commit = folder.find_commit(version)
        if commit is None:
            uncommitted.append(version)
        else:
            bases[version] = commit.base
    anchors = {version for version in bases if folder.has_anchor(version)}

    def plan() -> list[Version]:
        return plan_removal(bases, anchors, list_live_leases(folder, time.time()), keep_anchors, kept)

    doomed = plan()
    if dry_run:
        return doomed
    delete_expired(folder, time.time())
    if doomed:
        announcement = f"{REMOVALS}/{uuid.uuid4().hex}.json"
        with folder.store.create(announcement) as writer:
            writer.write(dump(Removal(tuple(doomed), time.time())))
        # A reader may have come between the first look and the announcement.
        doomed = [version for version in plan() if version in doomed]
        for version in doomed:
            _remove(folder, version)
        folder.store.delete(announcement)
    if bases:
        _remove_orphans(folder, uncommitted, max(bases))
    return doomed


def _remove(folder: StreamFolder, version: Version) -> None:
    """Remove a version: first its commit, so that it does not exist without its files."""
    folder.store.delete(f"{version.folder}/{COMMIT}")
    folder.store.delete_folder(version.folder)


def _remove_orphans(folder: StreamFolder, uncommitted: Collection[Version], newest: Version) -> None:
    """Remove what attempts left that never became a version, after a day."""
    for version in uncommitted:
        changed = folder.store.changed_at(version.folder)
        if version < newest and changed is not None and time.time() - changed > ORPHAN_TTL_S:
            folder.store.delete_folder(version.folder)
