"""What a power cut would leave: of files what was fsynced, of folders the entries as fsynced, or as they are."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

MUTATORS = ("write", "copy_file_range", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "link", "truncate")
"""Functions of `os` by which files and folders change; opening for writing is one more."""


@contextmanager
def watched(before: Callable[[str, tuple], None], after: Callable[[str, tuple], None]) -> Iterator[None]:
    """Call `before` and `after` around every change of a file or folder made through `os` or an exchange of names."""
    from shardckpt.storage import local_publication

    kept = {name: getattr(os, name) for name in (*MUTATORS, "open")}
    exchange = local_publication.exchange

    def wrap(name: str, whole: Callable) -> Callable:
        def changed(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return whole(*args, **kwargs)
            before(name, args)
            result = whole(*args, **kwargs)
            after(name, args)
            return result

        return changed

    for name, whole in kept.items():
        setattr(os, name, wrap(name, whole))
    local_publication.exchange = wrap("exchange", exchange)
    try:
        yield
    finally:
        for name, whole in kept.items():
            setattr(os, name, whole)
        local_publication.exchange = exchange


class Disk:
    """A folder and what of it is safe.

    Args:
        root: The folder; all that lies in it now is safe.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._synced_data: dict[int, bytes] = {}
        self._synced_entries: dict[int, dict[str, int]] = {}
        self._folders: set[int] = set()
        self._held: dict[int, int] = {}  # an open descriptor for each inode, or its number would be used again
        for folder, _, files in os.walk(root):
            for name in files:
                self._sync(self._hold(os.path.join(folder, name)))
            self._sync(self._hold(folder))

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)

    def after(self, name: str, args: tuple) -> None:
        """Note an fsync. Everything else is seen by looking."""
        if name == "fsync":
            self._sync(self._hold(f"/proc/self/fd/{args[0]}"))

    def _hold(self, path: str) -> int:
        inode = os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
            if stat.S_ISDIR(os.fstat(self._held[inode]).st_mode):
                self._folders.add(inode)
        return inode

    def _entries(self, inode: int) -> dict[str, int]:
        path = f"/proc/self/fd/{self._held[inode]}"
        return {name: self._hold(os.path.join(path, name)) for name in os.listdir(path)}

    def _sync(self, inode: int) -> None:
        if inode in self._folders:
            self._synced_entries[inode] = self._entries(inode)
        else:
            size = os.fstat(self._held[inode]).st_size
            self._synced_data[inode] = os.pread(self._held[inode], size, 0)

    def outcomes(self) -> Iterator[dict[str, bytes]]:
        """Yield what a power cut now might leave, as contents by path: names in the root and below as synced or not."""
        root = self._hold(self._root)
        for is_root_lazy, are_others_lazy in product((True, False), repeat=2):
            yield dict(self._walk(root, "", is_root_lazy, are_others_lazy))

    def _walk(self, folder: int, prefix: str, is_lazy: bool, are_others_lazy: bool) -> Iterator[tuple[str, bytes]]:
        entries = self._synced_entries.get(folder, {}) if is_lazy else self._entries(folder)
        for name, inode in entries.items():
            if inode in self._folders:
                yield from self._walk(inode, f"{prefix}{name}/", are_others_lazy, are_others_lazy)
            else:
                yield prefix + name, self._synced_data.get(inode, b"")
