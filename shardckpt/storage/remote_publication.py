"""Publishing on a store without rename: new names beside the old ones, what makes the result loadable last."""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType

from typing_extensions import Self

from shardckpt.errors import StorageError, TargetExistsError
from shardckpt.storage.leftovers import is_partial
from shardckpt.storage.open_store import kind, open_store, split
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import Store, Writer


class HeldWriter:
    """A writer whose `close` waits for the publication's end.

    Args:
        writer: The one that is held.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`. Raises StorageError."""
        self._writer.write(data)

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file of `source`. Raises StorageError."""
        self._writer.copy_from(source, name, offset, nbytes)

    def close(self) -> None:
        """Do nothing yet."""

    def finish(self) -> None:
        """Close the file. Raises StorageError."""
        self._writer.close()

    def abort(self) -> None:
        """Drop what was written; never raises."""
        self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()


class RemoteFolder(Publication):
    """A folder that becomes loadable with its last object.

    While files of fresh names are written the old content stays whole. At the end the old content goes, its `last`
    first, so that no reader mixes old with new; then come the files whose names the old content had, then `last`.

    Args:
        url: The target.
        overwrite: Replace what lies there.
        last: Name of the file that makes the result loadable.

    Raises:
        TargetExistsError: Something lies there and may not be overwritten.
        StorageError: The store failed.
    """

    def __init__(self, url: str, *, overwrite: bool, last: str | None) -> None:
        if kind(url) == "file":
            raise TargetExistsError("the target is a file", where=url, fix="Choose another name.")
        self.place = url
        self._store = open_store(url)
        self._last = last
        self._old = _all_files(self._store)
        if not overwrite and any(not is_partial(name) for name in self._old):
            is_whole = last is None or last in self._old
            raise TargetExistsError(
                "the target exists already" if is_whole else f"files lie at the target, though no {last}",
                where=url,
                fix="Pass --overwrite to replace it." if is_whole else "If a killed run left them, pass --overwrite.",
            )
        self.fresh = os.urandom(4).hex() if self._old else ""
        self._held: dict[str, HeldWriter] = {}
        self._written: list[str] = []
        self._is_done = False

    def create(self, name: str) -> Writer:
        """Start a file of the result; it appears when closed, or at the end if it is the last or replaces an old one.

        Raises:
            StorageError: It cannot be created.
        """
        writer = self._store.create(name)
        if name == self._last or name in self._old:
            self._held[name] = HeldWriter(writer)
            return self._held[name]
        self._written.append(name)
        return writer

    def finish(self) -> None:
        """Remove the old content, finish the held files, the last one last. Raises StorageError."""
        for name in sorted(self._old, key=lambda name: name != self._last):
            self._store.delete(name)
        for name in sorted(self._held, key=lambda name: name == self._last):
            self._written.append(name)
            self._held[name].finish()
        self._is_done = True

    def drop(self) -> None:
        """Delete what was written, the last file first, unless all was; never raises."""
        if self._is_done:
            return
        for writer in self._held.values():
            writer.abort()
        for name in reversed(self._written):
            with suppress(StorageError):
                self._store.delete(name)


class RemoteFile(Publication):
    """One object, which its store puts in place by itself.

    Args:
        url: The target.
        overwrite: Replace what lies there.

    Raises:
        TargetExistsError: Something lies there and may not be overwritten.
        StorageError: The store failed.
    """

    def __init__(self, url: str, *, overwrite: bool) -> None:
        found = kind(url)
        if found == "folder":
            raise TargetExistsError(
                "the target is a folder, but the result is one file", where=url, fix="Choose another name."
            )
        if found == "file" and not overwrite:
            raise TargetExistsError("the target exists already", where=url, fix="Pass --overwrite to replace it.")
        parent, self._name = split(url)
        self._store = open_store(parent)
        self._writer: HeldWriter | None = None

    def create(self, name: str) -> Writer:
        """Start the file; it appears at the publication's end. Raises StorageError."""
        assert name == self._name, name
        self._writer = HeldWriter(self._store.create(name))
        return self._writer

    def finish(self) -> None:
        """Let the file appear. Raises StorageError."""
        if self._writer is not None:
            self._writer.finish()

    def drop(self) -> None:
        """Drop what was written; never raises."""
        if self._writer is not None:
            self._writer.abort()


def _all_files(store: Store, folder: str = "") -> list[str]:
    files = []
    for entry in store.list(folder):
        files += _all_files(store, entry.name) if entry.is_folder else [entry.name]
    return files
