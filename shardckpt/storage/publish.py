"""Publish a result: it appears under its target's name at once, or not at all.

One process begins a publication and puts it in place; others may join it and write files of their own beside its files.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from shardckpt.errors import MissingFileError, StorageError
from shardckpt.storage.local_publication import LocalPublication
from shardckpt.storage.publication import Publication
from shardckpt.storage.remote_publication import RemoteFile, RemoteFolder
from shardckpt.storage.replaceable import FileKind, Kind
from shardckpt.storage.resolve_url import local_path, open_store
from shardckpt.storage.store import Writer, convert_os_errors

_SHOWN = 3


@contextmanager
def publish(
    url: str, kind: Kind, *, overwrite: bool, needed_bytes: int, last: str | None = None, keep: Collection[str] = ()
) -> Iterator[Publication]:
    """Open a publication; leaving the block puts the result in place, an exception takes it back.

    On a disk everything is written beside the target, which a rename then replaces. On a store without rename files
    get their final names as they are closed, the old content stays readable meanwhile, and `last` is written after all
    others, whenever it was created.

    Args:
        url: The target: a folder, or one file.
        kind: What is written; of a file, the publication takes its name alone.
        overwrite: Replace one checkpoint of this kind.
        needed_bytes: Bytes the result will have, for the check of free space; 0 where not known.
        last: Name of the file that makes the result loadable.
        keep: Names of files of the old content that become a part of the new one, where they are there.

    Yields:
        Where to create the files of the result.

    Raises:
        TargetExistsError: The target is not empty, and `overwrite` is false or it holds anything but one checkpoint of
            this kind; nothing was written.
        UsageError: The target cannot be one.
        NoSpaceError: The result does not fit; nothing was written.
        StorageError: The storage failed; nothing is left under the target's name that was not there before.
    """
    publication = begin(url, kind, overwrite=overwrite, needed_bytes=needed_bytes, last=last, keep=keep)
    try:
        yield publication
        publication.commit()
    except BaseException:
        publication.rollback()
        raise


def begin(
    url: str,
    kind: Kind,
    *,
    overwrite: bool,
    needed_bytes: int,
    last: str | None = None,
    prefix: str = "",
    keep: Collection[str] = (),
) -> Publication:
    """Open a publication that ends with its `commit` or `rollback`, if `publish` cannot be used.

    Other arguments and errors are those of `publish`.

    Args:
        url: The target.
        kind: What is written.
        overwrite: Replace one checkpoint of this kind.
        needed_bytes: Bytes the result will have.
        last: Name of the file that makes the result loadable.
        prefix: What the names of all files but the last begin with, where they do and no old name does: then the old
            content stays until the last file is replaced.
        keep: Names of files of the old content that become a part of the new one, where they are there.
    """
    path = local_path(url)
    if path is not None:
        return LocalPublication(path, kind, overwrite=overwrite, needed_bytes=needed_bytes, keep=keep)
    if isinstance(kind, FileKind):
        return RemoteFile(url, kind, overwrite=overwrite)
    return RemoteFolder(url, kind, overwrite=overwrite, last=last, prefix=prefix, keep=keep)


class JoinedPublication(Publication):
    """A publication that another process began and commits: files are made in its `staging_url`.

    Args:
        staging_url: That of the process that began it.

    Raises:
        StorageError: This process does not see the folder that the other one made there.
    """

    def __init__(self, staging_url: str) -> None:
        path = local_path(staging_url)
        if path is not None:
            _require_folder(path)
        self.staging_url = staging_url
        self._store = open_store(staging_url)
        self._writers: dict[str, Writer] = {}

    def create(self, name: str) -> Writer:
        """Start a file; its name is one that no other writer and no old content has. Raises StorageError."""
        self._writers[name] = self._store.create(name)
        return self._writers[name]

    def commit(self) -> None:
        """Do nothing: the process that began it commits."""

    def rollback(self) -> None:
        """Remove the files of this process; never raises.

        Not on a store without rename: what was written there may be a part of the result by now. Who began removes it.
        """
        if not self._store.capabilities.renames:
            return
        for name, writer in self._writers.items():
            writer.abort()
            with suppress(StorageError):
                self._store.delete(name)


def _require_folder(path: str) -> None:
    """Make sure that a folder is there which another process has just made.

    Raises:
        StorageError: It is not.
    """
    if os.path.isdir(path) or _is_there_now(path):
        return
    raise StorageError(
        "this rank does not see the folder that rank 0 writes into: it sees another folder of this name",
        where=path,
        fix=SHARE_IT,
    )


def _is_there_now(path: str) -> bool:
    """Look once more, after making the folders above, which are removed again.

    A network file system may remember for a while that one of them did not exist; asked to make it, it looks again.
    """
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
    """Make a folder and those above it if they are missing, and note which."""
    if os.path.isdir(folder):
        return
    _make_missing(os.path.dirname(folder), created)
    with suppress(FileExistsError):
        os.mkdir(folder)
        created.append(folder)


def overlaps(source: str, target: str) -> bool:
    """Return whether two URLs name the same place, or one a place inside the other, links resolved.

    Raises:
        UsageError: One of them is not a path or URL.
    """
    one, other = local_path(source), local_path(target)
    if (one is None) != (other is None):
        return False
    if one is None or other is None:
        return _is_within(_tidy(source), _tidy(target))
    return _is_within(os.path.realpath(one), os.path.realpath(other))


def _tidy(url: str) -> str:
    protocol, mark, path = url.partition("://")
    return f"{protocol.lower()}{mark}" + "/".join(part for part in path.split("/") if part)


def _is_within(one: str, other: str) -> bool:
    one, other = one.rstrip("/") + "/", other.rstrip("/") + "/"
    return one.startswith(other) or other.startswith(one)


def missing_files(url: str, sizes: Mapping[str, int]) -> dict[str, int | None]:
    """Return the files that this process does not see in full, with the sizes that it sees: None for a missing one.

    One listing, where all are there.

    Args:
        url: The folder.
        sizes: Bytes by name.

    Raises:
        StorageError: The store failed.
    """
    there = {entry.name: entry.size for entry in open_store(url).list()}
    unseen = [name for name, nbytes in sizes.items() if there.get(name) != nbytes]
    nbytes_now = {name: _size(url, name) for name in unseen}  # lists may lag behind
    return {name: size for name, size in nbytes_now.items() if size != sizes[name]}


def require_files(url: str, place: str, sizes: Sequence[Mapping[str, int]]) -> None:
    """Require that this process sees the complete files of each rank.

    Args:
        url: The target, for the message.
        place: The folder that the ranks wrote into.
        sizes: For each rank, bytes by name of what it wrote; rank 0 is this process.

    Raises:
        StorageError: Some of it does not; the message names the ranks that wrote it.
    """
    missing = missing_files(place, {name: nbytes for each in sizes for name, nbytes in each.items()})
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


SHARE_IT = "Save to storage that every rank sees under this name: a shared file system, or a bucket."
"""What to do where ranks see different folders."""


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as messages name them, the first ones of many."""
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _size(url: str, name: str) -> int | None:
    """Return the size that the store reports of a file now, None for a missing one."""
    with suppress(MissingFileError):
        return open_store(url).size(name)
    return None
