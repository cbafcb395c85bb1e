"""`TierFiles`: a node's files in its tiers, each below its tier's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol

from shardckpt.errors import MissingFileError
from shardckpt.storage.store import MappedStore, Read, Store


class FileReader(Protocol):
    """Reads a node's files for a rank."""

    @property
    def url(self) -> str:
        """Path or URL, for messages."""

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer. Raises ShardckptError."""


class TierFiles:
    """A node's files by names such as `memory/step-00000010/COMMIT`. Reads are thread-safe."""

    url = "tiers"

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self.stores = stores  # by tier

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer."""
        for tier, group in groupby(reads, lambda read: read.name.partition("/")[0]):
            store, _ = self._find(tier)
            store.read([read._replace(name=read.name.partition("/")[2]) for read in group])

    def view(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        """Return a range of a file where it is; None if it has to be read. Raises as `read`."""
        store, inside = self._find(name)
        return store.view(inside, offset, nbytes) if isinstance(store, MappedStore) else None

    def remove(self, name: str) -> None:
        """Remove a file, or a folder whose name ends with a slash. Raises ShardckptError."""
        store, inside = self._find(name)
        if name.endswith("/"):
            store.delete_folder(inside.rstrip("/"))
        else:
            store.delete(inside)

    def _find(self, name: str) -> tuple[Store, str]:
        """Return the store for a name, and the name there."""
        tier, _, inside = name.partition("/")
        store = self.stores.get(tier)
        if store is None:
            raise MissingFileError("this node does not have the tier", where=name)
        return store, inside
