"""What a publication offers to the one who writes, wherever it goes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shardckpt.storage.store import Writer

REPLACE_IT = "Pass overwrite=True (--overwrite) to replace it."
"""What to do where something lies at the target."""


class Publication(ABC):
    """A result on its way to its target.

    Attributes:
        fresh: Put this into the names of large files: empty where names may repeat those of the old content, else a
            short id, since on a store without rename the old files stay readable until the new ones are complete.
        place: Where files lie until they are put in place: other processes may write there, each under names of its
            own, and `JoinedPublication` does.
    """

    fresh: str = ""
    place: str = ""

    @abstractmethod
    def create(self, name: str) -> Writer:
        """Start a file of the result.

        Args:
            name: Relative to the target folder; a single-file target has its name already.

        Raises:
            StorageError: It cannot be created.
        """

    @abstractmethod
    def finish(self) -> None:
        """Put the whole result in place. Called by `publish`.

        Raises:
            StorageError: The store failed.
        """

    @abstractmethod
    def drop(self) -> None:
        """Take back what was written, unless the result is in place already; never raises. Called by `publish`."""
