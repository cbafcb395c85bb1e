"""List the versions of a stream, and verify each one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardckpt.errors import CheckpointError, MissingFileError, SourceNotFoundError
from shardckpt.notebook import Result
from shardckpt.readers.registry import resolve_step
from shardckpt.storage.resolve_url import as_url, split
from shardckpt.stream.format.delta_file import read_changes, read_index
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import COMMIT, Version, VersionCommit
from shardckpt.stream.versions.version_content import VersionContent

__all__ = ["VersionInfo", "VersionList", "find_commits", "list_versions", "verify_versions"]


@dataclass(frozen=True, slots=True, repr=False)
class VersionInfo(Result):
    """One published version.

    Attributes:
        number: Its number, which is unique in the epoch.
        epoch: Start of a publisher in this stream, from 1.
        published_at: When it was published, in seconds since the epoch of Unix; None if the store has no times.
        base: Number of the version that its changes apply to; None if it is an anchor alone.
        base_epoch: Epoch of that version.
        nbytes: Bytes of its changes.
        changed: Number of changed elements.
        share: Changed elements as a share of all.
        has_anchor: Whether its folder has all weights.
        problem: What is wrong, if it was verified; empty if nothing is.
    """

    number: int
    epoch: int
    published_at: float | None
    base: int | None
    base_epoch: int | None
    nbytes: int
    changed: int
    share: float
    has_anchor: bool
    problem: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class VersionList(Result):
    """Versions of a stream.

    Attributes:
        source: Path or URL of the stream.
        full_bytes: Bytes of all weights in one version.
        versions: Versions in order.
        is_verified: Whether all bytes were compared with hashes and digests.
        target: Path or URL where the versions were written; empty if they were not exported.
        removed: Numbers of versions that a compaction removed.
    """

    source: str
    full_bytes: int
    versions: tuple[VersionInfo, ...]
    is_verified: bool = False
    target: str = ""
    removed: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no version has a problem."""
        return not any(each.problem for each in self.versions)


def list_versions(src: str | os.PathLike[str]) -> VersionList:
    """List the versions of a stream.

    Args:
        src: Path or URL of a stream, or of one version: `STREAM@12`, `STREAM@latest`.

    Returns:
        Versions in order.

    Raises:
        SourceNotFoundError: No stream is here, or it has no such version.
        CheckpointError: A record is damaged.
        StorageError: Reading failed.

    Examples:
        >>> shardckpt.list_versions("stream").versions[-1].number  # doctest: +SKIP
    """
    return describe_versions(*find_commits(as_url(src)))


def verify_versions(src: str | os.PathLike[str]) -> VersionList:
    """Read every version from its anchor, and compare it with its hashes and digests.

    Args:
        src: As for `list_versions`.

    Returns:
        Versions in order, each with its problem.

    Raises:
        SourceNotFoundError: No stream is here, or it has no such version.
        CheckpointError: `STREAM.json` is damaged.
        StorageError: Reading failed.
    """
    folder, commits = find_commits(as_url(src))
    found = describe_versions(folder, commits)
    checked = (
        replace(info, problem=_find_problem(folder, commit))
        for info, commit in zip(found.versions, commits, strict=True)
    )
    return replace(found, versions=tuple(checked), is_verified=True)


def find_commits(src: str) -> tuple[StreamFolder, Sequence[VersionCommit]]:
    """Return a stream, and the commits of all versions, or of the one that a path names, in order."""
    path = resolve_step(src)
    version = Version.from_folder(path.rstrip("/").rpartition("/")[2])
    if version is None:
        folder = StreamFolder(path)
        folder.require_record()
        return folder, [*folder.iter_commits()][::-1]
    folder = StreamFolder(split(path)[0])
    commit = folder.find_commit(version)
    if commit is None:
        raise SourceNotFoundError("this version is not published", where=path, found=f"no {COMMIT}")
    return folder, [commit]


def describe_versions(folder: StreamFolder, commits: Iterable[VersionCommit]) -> VersionList:
    """Return what the commits say."""
    tensors = folder.record.tensors.values()
    elements = max(sum(prod(tensor.shape) for tensor in tensors), 1)
    versions = tuple(
        VersionInfo(
            commit.version.number,
            commit.version.epoch,
            folder.store.changed_at(f"{commit.version.folder}/{COMMIT}"),
            None if commit.base is None else commit.base.number,
            None if commit.base is None else commit.base.epoch,
            commit.nbytes,
            commit.changed,
            commit.changed / elements,
            folder.has_anchor(commit.version),
        )
        for commit in commits
    )
    return VersionList(folder.url, sum(tensor.nbytes for tensor in tensors), versions)


def _find_problem(folder: StreamFolder, commit: VersionCommit) -> str:
    """Read a version and its own changes; return what is wrong, or an empty text."""
    try:
        content = VersionContent(folder, commit)
        for boxes in content.groups:
            content.check(boxes, content.read(boxes))
        if content.chain.anchor == commit.version:  # its changes are not on the way to it
            index = read_index(folder.store, commit.version, commit.files, commit.stream, folder.record.tensors)
            for _ in read_changes(folder.store, index):
                pass
    except (CheckpointError, MissingFileError) as error:
        return str(error)
    return ""
