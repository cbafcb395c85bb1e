"""Check stored files: what other processes wrote is here, or was replaced since.

Several processes may see different places under one name, and a file may be replaced by another one of the same size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from shardckpt.errors import MissingFileError, StorageError
from shardckpt.storage.os_errors import convert_os_errors
from shardckpt.storage.resolve_url import local_path, open_remote, open_store

_SHOWN = 3


def missing_files(url: str, sizes: Mapping[str, int]) -> dict[str, int | None]:
    """Return the files that this process does not see whole, with the sizes that it sees: None for an absent one.

    One listing, where all are there.

    Args:
        url: The folder.
        sizes: Bytes by name.

    Raises:
        StorageError: The store failed.
    """
    there = {entry.name: entry.size for entry in open_store(url).list()}
    unseen = [name for name, nbytes in sizes.items() if there.get(name) != nbytes]
    found = {name: _size(url, name) for name in unseen}  # lists may lag behind
    return {name: size for name, size in found.items() if size != sizes[name]}


def require_files(url: str, place: str, sizes: Sequence[Mapping[str, int]]) -> None:
    """Make sure that what each rank wrote lies whole where this process sees it.

    Args:
        url: The target, for the message.
        place: The folder that the ranks wrote into.
        sizes: For each rank, bytes by name of what it wrote; the first rank is this process.

    Raises:
        StorageError: Some of it does not; the message names the ranks that wrote it.
    """
    missing = missing_files(place, {name: nbytes for each in sizes for name, nbytes in each.items()})
    if not missing:
        return
    absent = {name for name, size in missing.items() if size is None}
    elsewhere = [rank for rank, each in enumerate(sizes) if each and absent.issuperset(each)]
    found = ", ".join(list(missing)[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
    if elsewhere and 0 not in elsewhere:
        raise StorageError(
            f"rank 0 does not see the files that {format_ranks(elsewhere)} wrote: they see another folder of this name",
            where=url,
            found=f"no {found}",
            fix=SHARE_IT,
        )
    raise StorageError(
        "files that were just written are gone or cut short",
        where=url,
        found=found,
        fix="If another job saves to the same place, give each its own.",
    )


SHARE_IT = "Save to storage that every rank sees under this name: a shared file system, or a bucket."
"""What to do where ranks see different folders."""


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as messages name them, the first ones of many."""
    shown = ", ".join(map(str, ranks[:10])) + (f" and {len(ranks) - 10} more" if len(ranks) > 10 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _size(url: str, name: str) -> int | None:
    """Return the size of a file as the store tells it now, None where there is none."""
    with suppress(MissingFileError):
        return open_store(url).size(name)
    return None


def file_version(folder: str, name: str) -> str:
    """Return a text that is another one once a file is replaced; empty where the store does not tell.

    Args:
        folder: Path or URL of the folder.
        name: Of the file.

    Raises:
        MissingFileError: No such file.
        StorageError: The store failed.
    """
    path = local_path(folder)
    if path is None:
        return open_remote(folder).version(name)
    where = os.path.join(path, name)
    with convert_os_errors("cannot look at it", where):
        try:
            found = os.stat(where)
        except FileNotFoundError as error:
            raise MissingFileError("no such file", where=where) from error
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
