"""Folders local to each node, under a URL that is the same on all nodes."""

from __future__ import annotations

import os

from shardckpt.errors import MissingFileError, TargetExistsError, UsageError
from shardckpt.storage.local import LocalStore, LocalWriter, make_folders
from shardckpt.storage.store import Capabilities, convert_os_errors

SCHEME = "shardckpt-local"  # of URLs: `shardckpt-local://RUN`
_FOLDERS: dict[str, str] = {}  # URL to path on this node


def name_folder(run: str, folder: str) -> str:
    """Give this node's folder a URL that is the same on all nodes, and return it."""
    url = f"{SCHEME}://{run}"
    _FOLDERS[url] = folder
    return url


def find_folder(url: str) -> str | None:
    """Return this node's path for a URL that `name_folder` gave, or for a name below it; None for another URL."""
    protocol, mark, rest = url.partition("://")
    if protocol != SCHEME or not mark:
        return None
    run, _, name = rest.strip("/").partition("/")
    folder = _FOLDERS.get(f"{SCHEME}://{run}")
    if folder is None:
        raise UsageError("no folder of this process has this URL", where=url, fix="Name the folder by its path.")
    return os.path.join(folder, name) if name else folder


class NodeFolder(LocalStore):
    """A folder on this node in which files appear one by one, as in a bucket."""

    def __init__(self, url: str, path: str) -> None:
        super().__init__(path)
        self.url = url
        # No rename shows a step on all nodes at once; on each node its `COMMIT` is the last file.
        self.capabilities = Capabilities(renames=False, is_local=True)
        self._is_made = False

    def create(self, name: str, *, is_new: bool = False, needed: str = "") -> LocalWriter:  # noqa: ARG002
        """Start a new file and create its parent folders."""
        if not self._is_made:
            with convert_os_errors("cannot create", self._shown(name)):
                make_folders(self._root)
            self._is_made = True
        writer = super().create(name)
        if is_new and os.path.lexists(self._shown(name)):
            writer.abort()
            raise TargetExistsError("another file has this name", where=self._shown(name))
        return writer

    def written_at(self, name: str) -> float | None:
        """Return None: unknown."""
        del name
        return None

    def version(self, name: str) -> str:
        """Return an empty text: unavailable."""
        del name
        return ""


class SharedFolder(NodeFolder):
    """A folder in which files appear one by one, and other machines may write."""

    def __init__(self, path: str) -> None:
        super().__init__(path, path)
        self.capabilities = Capabilities(renames=False, is_local=True, creates_once=False)

    def written_at(self, name: str) -> float | None:
        """Return when a file was written, by the disk's clock."""
        written = self.changed_at(name)
        if written is None:
            raise MissingFileError("no such file", where=self._shown(name))
        return written
