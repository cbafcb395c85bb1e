"""A store over another one: everything is passed on, but for what a subclass is there for."""

from __future__ import annotations

from collections.abc import Sequence

from shardckpt.storage.store import Listed, Read, Store, Traits, Writer


class WrappedStore:
    """The store beneath under another name, from which a store that changes some of it is made.

    Args:
        store: The one beneath.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The root, as a person would type it."""
        return self._store.url

    @property
    def traits(self) -> Traits:
        """What this store can do."""
        return self._store.traits

    def list(self, folder: str = "") -> list[Listed]:
        """As the store beneath."""
        return self._store.list(folder)

    def size(self, name: str) -> int:
        """As the store beneath."""
        return self._store.size(name)

    def read(self, reads: Sequence[Read]) -> None:
        """As the store beneath."""
        self._store.read(reads)

    def create(self, name: str) -> Writer:
        """As the store beneath."""
        return self._store.create(name)

    def delete(self, name: str) -> None:
        """As the store beneath."""
        self._store.delete(name)

    def delete_folder(self, folder: str) -> None:
        """As the store beneath."""
        self._store.delete_folder(folder)

    def changed_at(self, folder: str) -> float | None:
        """As the store beneath."""
        return self._store.changed_at(folder)

    def rename(self, source: str, target: str) -> None:
        """As the store beneath."""
        self._store.rename(source, target)
