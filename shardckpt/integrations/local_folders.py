"""Folders that a framework names by paths: what is in them, and errors of their permissions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shardckpt import ShardckptError, StorageError

__all__ = ["list_names", "raise_storage_errors", "require_access"]


def list_names(folder: str) -> list[str]:
    """Return the names in a folder; none if it does not exist.

    Args:
        folder: Path.

    Raises:
        StorageError: The folder cannot be listed.
    """
    with raise_storage_errors("cannot list", folder):
        return os.listdir(folder) if os.path.isdir(folder) else []


def require_access(path: str) -> None:
    """Require that one may see whether a path exists.

    Args:
        path: Path of a file or folder, which may be missing.

    Raises:
        StorageError: A folder above it may not be entered.
    """
    with raise_storage_errors("cannot look at it", path):
        try:
            os.stat(path)
        except PermissionError:
            raise
        except OSError:  # it does not exist
            return


@contextmanager
def raise_storage_errors(what: str, path: str) -> Iterator[None]:
    """Raise errors of permissions within the block as `StorageError`.

    Args:
        what: The action that fails, such as "cannot list".
        path: Path for the message.
    """
    try:
        yield
    except PermissionError as error:
        if isinstance(error, ShardckptError):
            raise
        raise StorageError(what, where=path, found=error.strerror, fix="Check the permissions.") from error
