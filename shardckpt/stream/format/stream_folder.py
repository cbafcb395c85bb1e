"""A stream's folder: read its records, list its versions, create a record once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TypeVar, cast

from shardckpt.encodings.typed_json import dump, load
from shardckpt.errors import CheckpointError, FormatError, MissingFileError, SourceNotFoundError, TargetExistsError
from shardckpt.events.warn_user import warn_user
from shardckpt.storage.resolve_url import open_place
from shardckpt.storage.store import ObjectStore, Store, read_bytes
from shardckpt.stream.format.stream_records import (
    ANCHOR,
    COMMIT,
    STREAM,
    StreamRecord,
    Version,
    VersionCommit,
    read_epoch,
)

_MAX_BYTES = 1 << 28
_T = TypeVar("_T")


class StreamFolder:
    """A folder or bucket prefix with a stream."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.store: Store = open_place(self.url)

    def create(self, name: str, record: object) -> bool:
        """Write a record unless a file has its name; return False if one has."""
        try:
            # Both kinds of stores have this; `Store` describes what readers and plugins need.
            with cast("ObjectStore", self.store).create(name, is_new=True) as writer:
                writer.write(dump(record))
        except TargetExistsError:
            return False
        return True

    def find(self, kind: type[_T], name: str) -> _T | None:
        """Return a record; None without its file. Raises CheckpointError, StorageError."""
        where = f"{self.url}/{name}"
        try:
            size = self.store.size(name)
            if size > _MAX_BYTES:
                raise FormatError("the record is too large", where=where, found=f"{size} bytes")
            data = read_bytes(self.store, name, 0, size)
        except MissingFileError:
            return None
        return load(kind, data, where=where)

    def require_record(self) -> StreamRecord:
        """Return what the stream holds. Raises SourceNotFoundError without a stream."""
        record = self.find(StreamRecord, STREAM)
        if record is None:
            raise SourceNotFoundError(
                "no stream of weights is here",
                where=self.url,
                found=f"no {STREAM}",
                fix="Check the path, or start the publisher first.",
            )
        return record

    @cached_property
    def record(self) -> StreamRecord:
        """What the stream holds; it never changes."""
        return self.require_record()

    def list_folders(self) -> list[Version]:
        """Return the versions that have a folder, committed or not, in order."""
        found = (Version.from_folder(entry.name.rstrip("/")) for entry in self.store.list() if entry.is_folder)
        return sorted(version for version in found if version is not None)

    def iter_commits(self) -> Iterator[VersionCommit]:
        """Yield the commits of all versions, the newest first."""
        for version in reversed(self.list_folders()):
            commit = self.find_commit(version)
            if commit is not None:
                yield commit

    def find_commit(self, version: Version) -> VersionCommit | None:
        """Return a version's commit; None if it is not published. Raises CheckpointError for one of another stream."""
        commit = self.find(VersionCommit, f"{version.folder}/{COMMIT}")
        if commit is None:
            return None
        where = f"{self.url}/{version.folder}/{COMMIT}"
        for what, found, expected in (
            ("stream", commit.stream, self.record.id),
            ("version", commit.version, version),
        ):
            if found != expected:
                raise CheckpointError(f"the commit is for another {what}", where=where, found=found, expected=expected)
        if commit.base is not None and commit.base >= version:
            raise CheckpointError("the base must be an earlier version", where=where, found=str(commit.base))
        unknown = next((name for name in commit.digests if name not in self.record.tensors), None)
        if unknown is not None:
            raise CheckpointError("the commit names a tensor that the stream lacks", where=where, found=unknown)
        return commit

    def find_number(self, number: int | None) -> VersionCommit | None:
        """Return the last version with a number, or the newest one; None without it."""
        versions = [each for each in self.list_folders() if number in (None, each.number)]
        return next(filter(None, map(self.find_commit, reversed(versions))), None)

    def find_newest(self) -> VersionCommit | None:
        """Return the newest version whose commit is undamaged, with a warning for newer ones; None without one."""
        for version in reversed(self.list_folders()):
            try:
                commit = self.find_commit(version)
            except CheckpointError as error:
                warn_user(f"version {version} is not used, because its commit is damaged: {error}")
                continue
            if commit is not None:
                return commit
        return None

    def find_last_epoch(self) -> int:
        """Return the last epoch that a publisher has claimed; 0 without one."""
        claims = (read_epoch(entry.name) for entry in self.store.list("epochs"))
        folders = (version.epoch for version in self.list_folders()[-1:])
        return max((*claims, *folders), default=0)

    def has_commit(self, version: Version) -> bool:
        """Return True if a version is published, damaged or not."""
        return self._has(f"{version.folder}/{COMMIT}")

    def has_anchor(self, version: Version) -> bool:
        """Return True if a version's folder has all its weights."""
        return self._has(f"{version.folder}/{ANCHOR}/COMMIT")

    def _has(self, name: str) -> bool:
        try:
            return self.store.size(name) >= 0
        except MissingFileError:
            return False
