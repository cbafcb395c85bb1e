"""The interface of a publication, on a disk or a remote store."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shardckpt.storage.store import Writer

REPLACE_IT = "Pass overwrite=True (--overwrite) to replace it."
"""What to do if the target exists."""


class Publication(ABC):
    """A result on its way to its target.

    Attributes:
        unique_suffix: A short id for the names of large files, since on a store without rename the old files stay
            readable until the new ones are complete; empty if names may repeat those of the old content.
        staging_url: Folder of the files until the commit: other processes may write there, each under its own names,
            and `JoinedPublication` does.
    """

    unique_suffix: str = ""
    staging_url: str = ""

    @abstractmethod
    def create(self, name: str) -> Writer:
        """Start a file of the result.

        Args:
            name: Relative to the target folder; a single-file target has its name already.

        Raises:
            StorageError: It cannot be created.
        """

    @abstractmethod
    def commit(self) -> None:
        """Put the result in place, all at once. Called by `publish`.

        Raises:
            StorageError: The store failed.
        """

    @abstractmethod
    def rollback(self) -> None:
        """Remove the files unless the result is in place already; never raises. Called by `publish`."""
