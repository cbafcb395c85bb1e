"""Several writers of one publication: one began it and will put it in place, the others write beside its files."""

from __future__ import annotations

from contextlib import suppress

from shardckpt.errors import StorageError
from shardckpt.storage.open_store import open_store
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import Writer


class JoinedPublication(Publication):
    """What another process began: files are made where it says, and are put in place by that process.

    Args:
        place: The other's `place`.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._store = open_store(place)
        self._writers: dict[str, Writer] = {}

    def create(self, name: str) -> Writer:
        """Start a file; its name is one that no other writer and no old content has. Raises StorageError."""
        self._writers[name] = self._store.create(name)
        return self._writers[name]

    def finish(self) -> None:
        """Do nothing: who began it puts it in place."""

    def drop(self) -> None:
        """Take back what this writer wrote; never raises.

        Not on a store without rename: what was written there may be a part of the result by now. Who began removes it.
        """
        if not self._store.traits.renames:
            return
        for name, writer in self._writers.items():
            writer.abort()
            with suppress(StorageError):
                self._store.delete(name)
