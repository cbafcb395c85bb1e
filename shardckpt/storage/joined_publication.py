"""Several writers of one publication: one began it and will put it in place, the others write beside its files."""

from __future__ import annotations

import os
from contextlib import suppress

from shardckpt.errors import StorageError
from shardckpt.storage.failures import failing
from shardckpt.storage.open_store import local_path, open_store
from shardckpt.storage.presence import SHARE_IT
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import Writer


class JoinedPublication(Publication):
    """What another process began: files are made where it says, and are put in place by that process.

    Args:
        place: The other's `place`.

    Raises:
        StorageError: This process does not see the folder that the other one made there.
    """

    def __init__(self, place: str) -> None:
        path = local_path(place)
        if path is not None:
            _require_folder(path)
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


def _require_folder(path: str) -> None:
    """Make sure that a folder is there which another process has just made.

    Raises:
        StorageError: It is not.
    """
    if os.path.isdir(path) or _is_there_now(path):
        return
    raise StorageError(
        "this rank does not see the folder that rank 0 writes into: it sees another folder of this name",
        where=path,
        fix=SHARE_IT,
    )


def _is_there_now(path: str) -> bool:
    """Look once more, after making the folders above, which are removed again.

    A network file system may remember for a while that one of them was absent; asked to make it, it looks again.
    """
    made: list[str] = []
    with failing("cannot join the other ranks", path):
        try:
            _make_missing(os.path.dirname(path), made)
            return os.path.isdir(path)
        finally:
            for folder in reversed(made):
                with suppress(OSError):
                    os.rmdir(folder)


def _make_missing(folder: str, made: list[str]) -> None:
    """Make a folder and those above it where they are absent, and note which."""
    if os.path.isdir(folder):
        return
    _make_missing(os.path.dirname(folder), made)
    with suppress(FileExistsError):
        os.mkdir(folder)
        made.append(folder)
