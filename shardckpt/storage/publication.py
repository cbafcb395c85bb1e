"""Interface for publications on a disk or a remote store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from shardckpt.errors import StorageError, TargetExistsError
from shardckpt.storage.store import Writer

FindKept = Callable[[], Collection[str]]  # returns the names of old files that stay


# Returns the names of missing files in the result. Raises StorageError if the store failed.
FindMissing = Callable[[], Collection[str]]


def keep_no_file() -> Collection[str]:
    """Return no name: all old content is replaced."""
    return ()


_REPLACE_IT = "Pass overwrite=True (--overwrite) to replace it."


def target_exists_error(target: str) -> TargetExistsError:
    """Return the error for a complete result at the target."""
    return TargetExistsError("the target exists already", where=target, fix=_REPLACE_IT)


def folder_exists_error(target: str) -> TargetExistsError:
    """Return the error for a folder in place of a file."""
    return TargetExistsError(
        "the target is a folder, but the result is one file", where=target, fix="Choose another name."
    )


def files_removed_error(last: str, missing: str) -> StorageError:
    """Return the error for a file that stands for others that another process has removed."""
    return StorageError(
        "another process removed the files of this before its request was answered",
        where=last,
        found=f"no {missing}",
        fix="Save again, unless a later step was saved meanwhile.",
    )


class Publication(ABC):
    """A result that is written and then published at its target.

    Attributes:
        unique_suffix: Short id for the names of large files; empty if names may repeat. On a store without rename, new
            names keep the old files readable until the new ones are complete.
        staging_url: Folder that contains the files until the commit. Other processes may write files with other names
            there, as `JoinedPublication` does.
        is_hidden: Whether the result gets its name only at `commit`, so that all files can be checked before.
    """

    unique_suffix: str = ""
    staging_url: str = ""
    is_hidden: bool = False

    @abstractmethod
    def create(self, name: str) -> Writer:
        """Start a file in the result.

        Args:
            name: File name relative to the target folder; ignored if the target is a single file.

        Raises:
            StorageError: The file cannot be created.
        """

    def find_written(self, name: str) -> str:  # noqa: ARG002  (a disk has it)
        """Return a closed file's local path, before the commit.

        Args:
            name: As for `create`.

        Returns:
            The path; empty on a remote store.
        """
        return ""

    def adopt(self, staging_url: str, names: Collection[str]) -> None:  # noqa: B027  (a remote store has them)
        """Add closed files that other processes wrote, which stay where they are too.

        Args:
            staging_url: Folder with the files; `staging_url` of this publication on a remote store.
            names: As for `create`.

        Raises:
            StorageError: A file is missing, or cannot be added.
        """

    @abstractmethod
    def commit(self, find_missing: FindMissing | None = None) -> None:
        """Move the result to its target atomically. Called by `publish`.

        Args:
            find_missing: Called on a store without rename when the last file is there; None to skip the check. If files
                are missing, the last file is removed again.

        Raises:
            StorageError: The store failed, or files are missing.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Remove the files unless the result has been committed.

        Never raises. Called by `publish`.
        """
