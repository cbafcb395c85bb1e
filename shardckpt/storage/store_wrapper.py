"""Stores over another store: one that passes every call on, and one that is a folder of it."""

from __future__ import annotations

from collections.abc import Sequence

from shardckpt.storage.safe_names import check_name
from shardckpt.storage.store import Capabilities, Listed, Read, Store, Writer


class WrappedStore:
    """The underlying store under another name, from which a store that changes some of it is made.

    Args:
        store: The underlying store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The root, as a person would type it."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""
        return self._store.capabilities

    def list(self, folder: str = "") -> list[Listed]:
        """As the underlying store."""
        return self._store.list(folder)

    def size(self, name: str) -> int:
        """As the underlying store."""
        return self._store.size(name)

    def read(self, reads: Sequence[Read]) -> None:
        """As the underlying store."""
        self._store.read(reads)

    def create(self, name: str) -> Writer:
        """As the underlying store."""
        return self._store.create(name)

    def delete(self, name: str) -> None:
        """As the underlying store."""
        self._store.delete(name)

    def delete_folder(self, folder: str) -> None:
        """As the underlying store."""
        self._store.delete_folder(folder)

    def changed_at(self, folder: str) -> float | None:
        """As the underlying store."""
        return self._store.changed_at(folder)

    def rename(self, source: str, target: str) -> None:
        """As the underlying store."""
        self._store.rename(source, target)


class SubfolderStore(WrappedStore):
    """Bytes at names below a folder of another store; closes, caches and retries as that one does.

    Args:
        store: The other one.
        folder: In it; need not exist.
    """

    def __init__(self, store: Store, folder: str) -> None:
        check_name(folder, store.url)
        super().__init__(store)
        self._folder = folder

    @property
    def url(self) -> str:
        """The root, as a person would type it."""
        return f"{self._store.url.rstrip('/')}/{self._folder}"

    def list(self, folder: str = "") -> list[Listed]:
        """Return what lies directly in `folder`, sorted by name; nothing for a folder that does not exist."""
        start = len(self._folder) + 1
        entries = self._store.list(self._name(folder) if folder else self._folder)
        return [entry._replace(name=entry.name[start:]) for entry in entries]

    def size(self, name: str) -> int:
        """Return a file's size in bytes. Raises MissingFileError, UnsafeError or StorageError."""
        return self._store.size(self._name(name))

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer. Raises TruncatedError, MissingFileError, UnsafeError or StorageError."""
        self._store.read([Read(self._name(name), offset, buffer) for name, offset, buffer in reads])

    def create(self, name: str) -> Writer:
        """Start a new file, folders above it included. Raises StorageError."""
        return self._store.create(self._name(name))

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is no error. Raises StorageError."""
        self._store.delete(self._name(name))

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all it holds; a missing one is no error. Raises StorageError."""
        self._store.delete_folder(self._name(folder))

    def changed_at(self, folder: str) -> float | None:
        """Return when anything in a folder last changed, in seconds since the epoch; None where nobody knows."""
        return self._store.changed_at(self._name(folder))

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder in one step; only where `capabilities.renames`. Raises StorageError."""
        self._store.rename(self._name(source), self._name(target))

    def _name(self, name: str) -> str:
        check_name(name, self.url)
        return f"{self._folder}/{name}"
