"""What tells one content of a file from the next one under the same name and of the same size."""

from __future__ import annotations

import os

from shardckpt.errors import MissingFileError
from shardckpt.storage.failures import failing
from shardckpt.storage.open_store import local_path, open_remote


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
    with failing("cannot look at it", where):
        try:
            found = os.stat(where)
        except FileNotFoundError as error:
            raise MissingFileError("no such file", where=where) from error
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
