"""Simulated local file system, and what a power failure leaves of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from functools import lru_cache
from random import Random

PAGE_BYTES = 4096  # bytes that a disk writes at once, except at a power failure
_SAME = ("", ".")  # path parts that stay in the same folder
_MAX_SPLIT = 1024  # paths whose names are remembered


class ChangeCount:
    """Counts changes in all storage of a history, so that watchers compare one number; and the files made there."""

    def __init__(self) -> None:
        self.number = self._files = 0

    def take_inode(self) -> int:
        """Return a number that no other file or folder in the history has."""
        self._files += 1
        return self._files


@lru_cache(_MAX_SPLIT)
def _split(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part not in _SAME)


class File:
    """A file on a disk."""

    def __init__(self, inode: int, now: float) -> None:
        self.data, self.synced = bytearray(), b""  # `synced` survives a power failure
        self.version = 0  # counts changes
        self.inode, self.changed = inode, now
        self.lock: int | None = None  # descriptor that locks it
        self.sharing: frozenset[int] = frozenset()  # descriptors that share a lock
        self.released_at = 0.0  # when the last of them was closed


class Folder:
    """A folder on a disk."""

    def __init__(self, inode: int, now: float) -> None:
        self.names: dict[str, Node] = {}
        self.synced: dict[str, Node] = {}  # survives a power failure
        self.inode, self.changed = inode, now
        self.lock: int | None = None  # descriptor that locks it
        self.sharing: frozenset[int] = frozenset()
        self.released_at = 0.0


Node = File | Folder

# Maps folder and name to the new node; None removes the name.
Change = dict[tuple[Folder, str], "Node | None"]


class Disk:
    """A simulated disk with POSIX names, on which unsynced changes are lost at a power failure."""

    def __init__(self, changes: ChangeCount | None = None) -> None:
        # Changes of names are safe once a folder that they touch is synced; a power failure may undo any others.
        self._pending: list[Change] = []
        self._unsynced: dict[int, File] = {}  # a power failure leaves each page old, torn or new
        self._found: dict[str, Node] = {}
        self._walked: dict[str, list[tuple[str, File]]] = {}
        self.changes = ChangeCount() if changes is None else changes
        self.root = Folder(self.changes.take_inode(), 0.0)
        self.version = 0  # counts changes
        self.is_full = False

    # Names

    def find(self, path: str) -> Node:
        """Return what a path names. Raises FileNotFoundError or NotADirectoryError."""
        found = self._found.get(path)
        if found is None:
            found = self._found[path] = self._follow(path)
        return found

    def _follow(self, path: str) -> Node:
        node: Node = self.root
        for part in _split(path):
            if type(node) is not Folder:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            below = node.names.get(part)
            if below is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = below
        return node

    def find_folder(self, path: str) -> Folder:
        """Return the folder at a path. Raises OSError."""
        node = self.find(path)
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def find_parent(self, path: str) -> tuple[Folder, str]:
        """Return a path's folder and last name. Raises OSError."""
        folder, _, name = path.rstrip("/").rpartition("/")
        return self.find_folder(folder), name

    def walk(self, path: str = "") -> Sequence[tuple[str, File]]:
        """Return the files below a folder, with their paths; nothing if it is missing."""
        found = self._walked.get(path)
        if found is None:
            found = self._walked[path] = self._list_below(path)
        return found

    def _list_below(self, path: str) -> list[tuple[str, File]]:
        try:
            node = self.find(path)
        except OSError:
            return []
        found: list[tuple[str, File]] = []
        pending: list[tuple[str, Node]] = [(path.rstrip("/"), node)]
        while pending:
            where, node = pending.pop()
            if isinstance(node, File):
                found.append((where, node))
            else:
                pending += [(f"{where}/{name}", below) for name, below in sorted(node.names.items(), reverse=True)]
        return found

    # Changes

    def create(self, path: str, now: float) -> File:
        """Create a file. Raises OSError."""
        folder, name = self.find_parent(path)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        file = File(self.changes.take_inode(), now)
        self._change({(folder, name): file}, now)
        return file

    def make_folder(self, path: str, now: float) -> None:
        """Create a folder. Raises OSError."""
        folder, name = self.find_parent(path)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._change({(folder, name): Folder(self.changes.take_inode(), now)}, now)

    def write(self, file: File, offset: int, data: bytes, now: float) -> None:
        """Write bytes at an offset of a file."""
        if len(file.data) < offset:
            file.data.extend(bytes(offset - len(file.data)))
        file.data[offset : offset + len(data)] = data
        file.version += 1
        file.changed = now
        self.note_change()
        self._unsynced[file.inode] = file

    def truncate(self, file: File, nbytes: int, now: float) -> None:
        """Shorten or lengthen a file."""
        del file.data[nbytes:]
        self.write(file, nbytes, b"", now)

    def link(self, source: str, target: str, now: float) -> None:
        """Give a file another name. Raises OSError."""
        node = self.find(source)
        folder, name = self.find_parent(target)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self._change({(folder, name): node}, now)

    def unlink(self, path: str, now: float) -> None:
        """Remove a file. Raises OSError."""
        if isinstance(self.find(path), Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._change({self.find_parent(path): None}, now)

    def clear(self, path: str, names: Collection[str], now: float) -> None:
        """Remove names in a folder, with all below them, even after a power failure. Raises OSError."""
        folder = self.find_folder(path)
        self._change({(folder, name): None for name in names}, now)
        self.sync(folder)

    def remove_folder(self, path: str, now: float) -> None:
        """Remove an empty folder. Raises OSError."""
        if self.find_folder(path).names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._change({self.find_parent(path): None}, now)

    def rename(self, source: str, target: str, now: float) -> None:
        """Rename a file or folder, and replace a file or an empty folder. Raises OSError."""
        node, place = self.find(source), self.find_parent(target)
        old = place[0].names.get(place[1])
        if old is node:
            return
        if isinstance(old, Folder):
            if isinstance(node, File):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
            if old.names:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        elif old is not None and isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), target)
        self._change({self.find_parent(source): None, place: node}, now)

    def exchange(self, one: str, other: str, now: float) -> None:
        """Swap two names. Raises OSError."""
        nodes = self.find(one), self.find(other)
        self._change({self.find_parent(one): nodes[1], self.find_parent(other): nodes[0]}, now)

    def _change(self, change: Change, now: float) -> None:
        for (folder, name), node in change.items():
            if node is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = node
            folder.changed = now
        self._forget_places()
        self._pending.append(change)
        self.note_change()

    def _forget_places(self) -> None:
        """Look for paths again: names have changed."""
        self._found.clear()
        self._walked.clear()

    def note_change(self) -> None:
        """Record that the content has changed."""
        self.version += 1
        self.changes.number += 1

    # Safety

    def sync(self, node: Node) -> None:
        """Make a file's content, or a folder's names, survive a power failure."""
        if isinstance(node, File):
            node.synced = bytes(node.data)
            self._unsynced.pop(node.inode, None)
            return
        pending = []
        for change in self._pending:
            for folder, _ in change:
                if folder is node:
                    _apply(change)
                    break
            else:
                pending.append(change)
        self._pending = pending

    def lose_power(self, random: Random) -> None:
        """Reduce the content to what survives: all synced content, and any part of the rest."""
        luck = random.choice((0.0, 0.5, 0.9, 1.0))
        for change in self._pending:
            if random.random() < luck:
                _apply(change)
        self._pending = []
        folders = [self.root]
        while folders:
            folder = folders.pop()
            folder.names = dict(folder.synced)
            folder.lock = None
            folders += [node for node in folder.names.values() if isinstance(node, Folder)]
        self._forget_places()
        for file in self._unsynced.values():
            file.data = bytearray(_tear(file.synced, bytes(file.data), random))
            file.synced = bytes(file.data)
            file.version += 1
        self._unsynced = {}
        for _, file in self.walk():
            file.lock = None
        self.note_change()


def _apply(change: Change) -> None:
    for (folder, name), node in change.items():
        if node is None:
            folder.synced.pop(name, None)
        else:
            folder.synced[name] = node


def _tear(synced: bytes, now: bytes, random: Random) -> bytes:
    """Return bytes whose pages are as synced, torn or new."""
    if random.random() < 0.3:
        return synced
    mixed = bytearray(synced[: len(now)].ljust(len(now), b"\0"))
    for start in range(0, len(now), PAGE_BYTES):
        end = min(start + PAGE_BYTES, len(now))
        end = random.choice((start, (start + end) // 2, end))
        mixed[start:end] = now[start:end]
    return bytes(mixed)
