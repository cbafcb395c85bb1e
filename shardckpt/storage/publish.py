"""Publishing: a result appears under its target's name whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from shardckpt.storage.local_publication import LocalPublication
from shardckpt.storage.open_store import local_path
from shardckpt.storage.publication import Publication
from shardckpt.storage.remote_publication import RemoteFile, RemoteFolder
from shardckpt.storage.replaceable import FileKind, Kind


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
        TargetExistsError: The target is not empty, and `overwrite` is false or other content than one checkpoint of
            this kind lies there; nothing was written.
        UsageError: The target cannot be one.
        NoSpaceError: The result does not fit; nothing was written.
        StorageError: The storage failed; nothing is left under the target's name that was not there before.
    """
    publication = begin(url, kind, overwrite=overwrite, needed_bytes=needed_bytes, last=last, keep=keep)
    try:
        yield publication
        publication.finish()
    except BaseException:
        publication.drop()
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
    """Open a publication that ends with its `finish`, or its `drop`: for those who cannot use `publish`.

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


def overlaps(source: str, target: str) -> bool:
    """Return whether two URLs name the same place, or one a place inside the other, links resolved.

    Raises:
        UsageError: One of them is no path and no URL.
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
