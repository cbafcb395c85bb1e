"""Implement `compact_versions`: write an anchor for a stream's newest version, and remove old versions."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from shardckpt.errors import SourceNotFoundError, TargetExistsError, UsageError, require_bools
from shardckpt.events.progress import OnProgress
from shardckpt.offline.reshard import write_all
from shardckpt.offline.select.options import Options
from shardckpt.offline.targets.base import RankOptions
from shardckpt.offline.targets.target_registry import find_rank_target
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.storage.resolve_url import as_url
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import ANCHOR, VersionCommit
from shardckpt.stream.receive.version_chooser import VersionChooser
from shardckpt.stream.retention.prune_stream import prune_stream
from shardckpt.stream.versions.version_list import VersionList, list_versions

__all__ = ["compact_versions"]


def compact_versions(
    src: str | os.PathLike[str],
    *,
    keep_anchors: int | None = None,
    keep: Collection[int] = (),
    dry_run: bool = False,
    on_progress: OnProgress | None = None,
) -> VersionList:
    """Write an anchor for a stream's newest version, and remove versions that nothing needs.

    A publisher and receivers may use the stream meanwhile. Memory is constant.

    Args:
        src: Path or URL of a stream.
        keep_anchors: How many of the newest anchors stay, with all versions after them. None removes nothing.
        keep: Numbers of versions that stay readable in any case. What live readers need stays too.
        dry_run: Write and remove nothing.
        on_progress: As for `consolidate`.

    Returns:
        Versions that are left, in order, and the numbers of removed ones; with `dry_run` those that would go now.

    Raises:
        SourceNotFoundError: No stream with a version is here, or the newest version was removed meanwhile.
        UsageError: `keep_anchors` is less than 1, or `keep` has something else than numbers.
        CheckpointError: A version cannot be read. Nothing is removed.
        StorageError: The store failed.
    """
    require_bools(dry_run=dry_run)
    if not all(type(number) is int for number in keep):
        raise UsageError("`keep` must have numbers of versions", found=repr(keep))
    url = as_url(src)
    folder = StreamFolder(url)
    folder.require_record()
    newest = folder.find_number(None)
    if newest is None:
        raise SourceNotFoundError("no version is published here", where=url)
    if not (dry_run or folder.has_anchor(newest.version)):
        path = f"{url.rstrip('/')}/{newest.version.folder}"
        anchor, ranks = f"{path}/{ANCHOR}", RankOptions(1, parse_size("5GB"))
        # Its files stay while they are read. The publisher, or another compaction, may write the anchor first.
        with _keep_readable(folder, newest), suppress(TargetExistsError):
            write_all(path, anchor, find_rank_target("native", anchor), ranks, Options(), on_progress)
    removed = []
    if keep_anchors is not None:
        removed = prune_stream(folder, keep_anchors=keep_anchors, kept=frozenset(keep), dry_run=dry_run)
    return replace(list_versions(src), removed=tuple(version.number for version in removed))


@contextmanager
def _keep_readable(folder: StreamFolder, commit: VersionCommit) -> Iterator[None]:
    """Lease a version and what leads to it. Raises SourceNotFoundError if a removal was faster."""
    chooser = VersionChooser(folder)
    try:
        doomed = chooser.take_lease(commit, None, (None,))
        if commit.version in doomed or not folder.has_commit(commit.version):
            raise SourceNotFoundError(
                "the version was removed meanwhile", where=folder.url, found=commit.version, fix="Compact it again."
            )
        yield
    finally:
        chooser.release()
