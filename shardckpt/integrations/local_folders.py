"""Folders that a framework names by path: their names, and errors about permissions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardckpt import ShardckptError
from shardckpt.errors import StorageError

__all__ = ["list_names", "raise_storage_errors", "require_access"]


def list_names(folder: str) -> list[str]:
    """Return the names in a folder; none if it does not exist. Raises StorageError."""
    with raise_storage_errors("cannot list", folder):
        return os.listdir(folder) if os.path.isdir(folder) else []


def require_access(path: str) -> None:
    """Raise StorageError if permissions hide whether a path exists."""
    with raise_storage_errors("cannot look at it", path):
        try:
            os.stat(path)
        except PermissionError:
            raise
        except OSError:  # it does not exist
            return


@contextmanager
def raise_storage_errors(what: str, path: str) -> Iterator[None]:
    """Raise permission errors in the block as `StorageError`; `what` is the action, such as "cannot list"."""
    try:
        yield
    except PermissionError as error:
        if isinstance(error, ShardckptError):
            raise
        raise StorageError(what, where=path, found=error.strerror, fix="Check the permissions.") from error
