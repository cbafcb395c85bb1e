"""Publish results atomically: a target shows the complete result or old content.

One process starts and commits a publication; other processes may join it and add files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from shardckpt.errors import MissingFileError, StorageError, UsageError
from shardckpt.storage.local_publication import LocalPublication
from shardckpt.storage.publication import FindKept, FindMissing, Publication, keep_no_file
from shardckpt.storage.remote_publication import RemoteFile, RemoteFolder
from shardckpt.storage.replaceable import FileKind, Kind
from shardckpt.storage.resolve_url import local_path, open_place
from shardckpt.storage.store import Writer, convert_os_errors

_SHOWN = 3


@contextmanager
def publish(
    url: str,
    kind: Kind,
    *,
    overwrite: bool,
    needed_bytes: int,
    last: str | None = None,
    prefix: str = "",
    find_kept: FindKept = keep_no_file,
) -> Iterator[Publication]:
    """Open a publication: leaving the block commits, an exception rolls back."""
    # On a disk, files are written next to the target, and a rename replaces it. Without rename, files get their final
    # names when they are closed, old content stays readable, and `last` is written after all others.
    publication = start_publication(
        url, kind, overwrite=overwrite, needed_bytes=needed_bytes, last=last, prefix=prefix, find_kept=find_kept
    )
    try:
        yield publication
        publication.commit()
    except BaseException:
        publication.rollback()
        raise


def start_publication(
    url: str,
    kind: Kind,
    *,
    overwrite: bool,
    needed_bytes: int,  # 0 if unknown
    last: str | None = None,  # file that makes the result loadable; it is written last
    prefix: str = "",  # of all other new names; if no old name has it, old content stays until `last` is replaced
    find_kept: FindKept = keep_no_file,  # called before any old file goes; on a disk, when all new ones are written
    staged: Collection[str] = (),  # files that `adopt` will add; on a remote store, they are in the target already
) -> Publication:
    """Open a publication; the caller must call its `commit` or `rollback`."""
    path = local_path(url)
    if path is not None:
        publication = LocalPublication(path, kind, overwrite=overwrite, needed_bytes=needed_bytes, find_kept=find_kept)
        if not (prefix and publication.is_better_replaced_by_file(prefix)):
            return publication
        url = publication.target
        publication.rollback()
    if isinstance(kind, FileKind):
        return RemoteFile(url, kind, overwrite=overwrite)
    return RemoteFolder(url, kind, overwrite=overwrite, last=last, prefix=prefix, find_kept=find_kept, staged=staged)


class JoinedPublication(Publication):
    """A publication that another process starts and commits; this one writes files into its `staging_url`."""

    def __init__(self, staging_url: str) -> None:
        path = local_path(staging_url)
        if path is not None:
            _require_folder(path)
        self.staging_url = staging_url
        self._store = open_place(staging_url)
        self._writers: list[Writer] = []

    def create(self, name: str) -> Writer:
        """Start a file with a unique name. Raises StorageError."""
        writer = self._store.create(name)
        self._writers.append(writer)
        return writer

    def find_written(self, name: str) -> str:
        """Return the path of a closed file; empty on a remote store."""
        path = local_path(self.staging_url)
        return "" if path is None else os.path.join(path, name)

    def commit(self, find_missing: FindMissing | None = None) -> None:
        """Do nothing: the process that started the publication commits it."""

    def rollback(self) -> None:
        """Remove this process's unfinished files; never raises."""
        # Finished files stay: the process that started the publication may have committed them, or may do so late.
        # Its rollback removes them.
        for writer in self._writers:
            writer.abort()


def _require_folder(path: str) -> None:
    """Require a folder that another process has just created."""
    if os.path.isdir(path) or _is_there_now(path):
        return
    raise StorageError(
        "this rank does not see the folder that rank 0 writes into: it sees another folder of this name",
        where=path,
        fix=SHARE_IT,
    )


def _is_there_now(path: str) -> bool:
    """Check again for a folder after creating its parents; those that were missing are removed again."""
    # Network file systems may cache that a parent does not exist; creating it makes them look again.
    created: list[str] = []
    with convert_os_errors("cannot join the other ranks", path):
        try:
            _make_missing(os.path.dirname(path), created)
            return os.path.isdir(path)
        finally:
            for folder in reversed(created):
                with suppress(OSError):
                    os.rmdir(folder)


def _make_missing(folder: str, created: list[str]) -> None:
    """Create a folder and missing parents; append created paths to `created`."""
    if os.path.isdir(folder):
        return
    _make_missing(os.path.dirname(folder), created)
    with suppress(FileExistsError):
        os.mkdir(folder)
        created.append(folder)


def overlaps(source: str, target: str) -> bool:
    """Return True if two URLs name the same place, or one is in the other. Links are resolved."""
    one, other = local_path(source), local_path(target)
    if (one is None) != (other is None):
        return False
    if one is None or other is None:
        return _is_within(_tidy(source), _tidy(target))
    return _is_within(os.path.realpath(one), os.path.realpath(other))


def require_apart(source: str, target: str) -> None:
    """Raise UsageError if one URL is in the other."""
    if overlaps(source, target):
        raise UsageError("source and target overlap", found=target, where=source, fix="Write to another folder.")


def _tidy(url: str) -> str:
    protocol, mark, path = url.partition("://")
    return f"{protocol.lower()}{mark}" + "/".join(part for part in path.split("/") if part)


def _is_within(one: str, other: str) -> bool:
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)


def find_missing_files(place: str, sizes: Sequence[Mapping[str, int]]) -> dict[str, int | None]:
    """Return incomplete files with the bytes that this process sees; None for a missing file."""
    expected = {name: nbytes for each in sizes for name, nbytes in each.items()}
    there = {entry.name: entry.size for entry in open_place(place).list()}
    unseen = [name for name, nbytes in expected.items() if there.get(name) != nbytes]
    nbytes_now = {name: _size(place, name) for name in unseen}  # listings may be out of date
    return {name: size for name, size in nbytes_now.items() if size != expected[name]}


def require_files(url: str, place: str, sizes: Sequence[Mapping[str, int]]) -> None:
    """Require that this process sees all ranks' complete files."""
    missing = find_missing_files(place, sizes)
    if not missing:
        return
    unseen = {name for name, size in missing.items() if size is None}
    elsewhere = [rank for rank, each in enumerate(sizes) if each and unseen.issuperset(each)]
    shown = ", ".join(list(missing)[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
    if elsewhere and 0 not in elsewhere:
        raise StorageError(
            f"rank 0 does not see the files that {format_ranks(elsewhere)} wrote: they see another folder of this name",
            where=url,
            found=f"no {shown}",
            fix=SHARE_IT,
        )
    raise StorageError(
        "files that were just written are missing or truncated",
        where=url,
        found=shown,
        fix="If another job saves to the same place, give each its own.",
    )


# Remedy for messages about ranks that see different folders.
SHARE_IT = "Save to storage that every rank sees under this name: a shared file system, or a bucket."


def format_ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers as text; only the first if there are many."""
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _size(url: str, name: str) -> int | None:
    """Return a file's bytes in the store; None for a missing file."""
    with suppress(MissingFileError):
        return open_place(url).size(name)
    return None
