"""Simulated operating system: functions from `os`, `fcntl` and `shutil` over a simulated disk."""

from __future__ import annotations

import errno
import fcntl
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from io import BytesIO
from types import SimpleNamespace
from typing import Any, NamedTuple

from shardckpt.tiers.memory.lease import LEASE
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.stores.disk import Disk, File, Folder, Node
from tests.simulation.stores.node_disks import NodeDisks
from tests.simulation.stores.node_memory import SHM

_HOME = "/home"
_USER = os.geteuid()
_FREE_BLOCKS = 1 << 30
_REMOVED = "/.removed-"  # in the new name of a removed folder in memory


class Status(NamedTuple):
    """Result of `stat`."""

    st_mode: int
    st_ino: int
    st_dev: int
    st_size: int
    st_ctime: float
    st_mtime_ns: int
    st_ctime_ns: int
    st_uid: int


class FolderEntry(NamedTuple):
    """Result of `scandir`."""

    name: str
    path: str
    node: Node

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a folder."""
        del follow_symlinks
        return isinstance(self.node, Folder)

    def is_symlink(self) -> bool:
        """Return False: disks have no symbolic links."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> Status:
        """Return the entry's status."""
        del follow_symlinks
        return _describe(self.node)


class Descriptor:
    """An open file."""

    def __init__(self, node: Node, path: str, disk: Disk, process: Process) -> None:
        self.node, self.path, self.disk, self.process = node, path, disk, process
        self.offset = 0


@lru_cache(maxsize=1024)
def _resolve(path: str) -> str:
    return posixpath.normpath(posixpath.join(_HOME, path))


class SimulatedPath:
    """Functions from `os.path` over a simulated disk, which has no links."""

    def __init__(self, system: NameCalls) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        """Return a pure text function, and keep it as an attribute."""
        value = self.__dict__[name] = getattr(posixpath, name)
        return value

    def _find(self, path: str) -> Node | None:
        try:
            return self._system.find(self._system.resolve(path))
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """Return True if a path exists."""
        return self._find(path) is not None

    lexists = exists

    def isdir(self, path: str) -> bool:
        """Return True for a folder."""
        return isinstance(self._find(path), Folder)

    def isfile(self, path: str) -> bool:
        """Return True for a file."""
        return isinstance(self._find(path), File)

    def islink(self, path: str) -> bool:
        """Return False."""
        del path
        return False

    def ismount(self, path: str) -> bool:
        """Return True for the root."""
        return self._system.resolve(path) == "/"

    def getsize(self, path: str) -> int:
        """Return a file's size. Raises OSError."""
        return self._system.stat(path).st_size

    def abspath(self, path: str) -> str:
        """Return an absolute path."""
        return self._system.resolve(path)

    realpath = abspath

    def samestat(self, one: Status, other: Status) -> bool:
        """Return True if both are one file's status."""
        return (one.st_ino, one.st_dev) == (other.st_ino, other.st_dev)


class NameCalls:
    """Functions from `os` on names, over a simulated disk."""

    def __init__(self, scheduler: Scheduler, disks: NodeDisks) -> None:
        self._scheduler, self._disks = scheduler, disks
        self.path = SimulatedPath(self)

    def resolve(self, path: str) -> str:
        """Return an absolute path."""
        return _resolve(os.fspath(path))

    def find_disk(self, where: str) -> Disk:
        """Return the disk that holds an absolute path, for the running process."""
        if not self._disks.has_several and not where.startswith(SHM):
            return self._disks.shared
        task = self._scheduler.current
        return self._disks.find(where, task.process.node if task is not None else "")

    def find(self, where: str) -> Node:
        """Return the node at an absolute path. Raises OSError."""
        return self.find_disk(where).find(where)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> Status:
        """Return a path's status."""
        del follow_symlinks
        return _describe(self.find(self.resolve(path)))

    lstat = stat

    def readlink(self, path: str) -> str:
        """Raise OSError: the disk has no links."""
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder."""
        where = self._enter("list", path)
        return list(self.find_disk(where).find_folder(where).names)

    @contextmanager
    def scandir(self, path: str) -> Iterator[Iterator[FolderEntry]]:
        """Yield an iterator over a folder's entries."""
        where = self._enter("list", path)
        names = self.find_disk(where).find_folder(where).names
        prefix = posixpath.join(path, "")
        yield iter([FolderEntry(name, prefix + name, node) for name, node in names.items()])

    def walk(self, top: str, topdown: bool = True, onerror: Any = None) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield the folders below a folder, with their folder and file names."""
        try:
            where = self._enter("list", top)
            names = dict(self.find_disk(where).find_folder(where).names)
        except OSError as error:
            if onerror is not None:
                onerror(error)
            return
        folders = [name for name, node in names.items() if isinstance(node, Folder)]
        found = (top, folders, [name for name in names if name not in folders])
        if topdown:
            yield found
        for name in folders:
            yield from self.walk(posixpath.join(top, name), topdown, onerror)
        if not topdown:
            yield found

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        """Create a folder; one that exists is told before a full disk is."""
        del mode
        if self.path.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        where = self._enter("mkdir", path)
        self.find_disk(where).make_folder(where, self._scheduler.clock)

    def makedirs(self, path: str, mode: int = 0o777, exist_ok: bool = False) -> None:
        """Create a folder and its parents."""
        if not self.path.exists(path):
            self.makedirs(posixpath.dirname(self.resolve(path)), mode, exist_ok=True)
            with nullcontext() if not exist_ok else suppress(FileExistsError):  # another process may be faster
                self.mkdir(path)
        elif not exist_ok:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        where = self._enter("rmdir", path)
        self.find_disk(where).remove_folder(where, self._scheduler.clock)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        where = self._enter("unlink", path)
        self.find_disk(where).unlink(where, self._scheduler.clock)

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder."""
        old, new = self._enter("rename", source, target), self.resolve(target)
        disk = self.find_disk(old)
        if _REMOVED in new:
            is_used = self.has_lock(disk, f"{old}/{LEASE}")
            self._disks.memory.check_removal(disk, old, self._scheduler.now, is_used=is_used)
        disk.rename(old, new, self._scheduler.clock)

    replace = rename

    def has_lock(self, disk: Disk, path: str) -> bool:
        """Return True if a process shares a lock on a file that has this path, or had it when it was opened."""
        raise NotImplementedError

    def link(self, source: str, target: str) -> None:
        """Give a file another name."""
        old = self._enter("link", source, target)
        self.find_disk(old).link(old, self.resolve(target), self._scheduler.clock)

    def exchange(self, one: str, other: str) -> bool:
        """Swap two names, instead of `linux_syscalls.exchange`."""
        where = self._enter("exchange", one, other)
        self.find_disk(where).exchange(where, self.resolve(other), self._scheduler.clock)
        return True

    def rmtree(self, path: str, ignore_errors: bool = False) -> None:
        """Remove a folder with its content, instead of `shutil.rmtree`."""

        def pass_or_raise(error: OSError) -> None:
            if not ignore_errors:
                raise error

        for inner, folders, files in self.walk(path, topdown=False, onerror=pass_or_raise):
            for name in files:
                try:
                    self.unlink(posixpath.join(inner, name))
                except OSError as error:
                    pass_or_raise(error)
            for name in folders:
                try:
                    self.rmdir(posixpath.join(inner, name))
                except OSError as error:
                    pass_or_raise(error)
        try:
            self.rmdir(path)
        except OSError as error:
            pass_or_raise(error)

    def access(self, path: str, mode: int) -> bool:
        """Return True if a path exists: processes have all permissions."""
        del mode
        return self.path.exists(path)

    def statvfs(self, path: str) -> SimpleNamespace:
        """Return the free space, which looks ample."""
        del path
        return SimpleNamespace(f_bavail=_FREE_BLOCKS, f_frsize=4096, f_blocks=_FREE_BLOCKS)

    def _enter(self, verb: str, path: str, other: str = "") -> str:
        """Start an operation: a scheduling point that may show a fault. Return the absolute path."""
        where = self.resolve(path)
        _raise_fault(self._scheduler.step(verb, f"{where} -> {self.resolve(other)}" if other else where), path)
        return where


class OperatingSystem(NameCalls):
    """Functions from `os` that shardckpt uses, over a simulated disk; other attributes come from `os`."""

    # Every function that reads or changes content is a scheduling point.

    def __init__(self, scheduler: Scheduler, disks: NodeDisks) -> None:
        super().__init__(scheduler, disks)
        self._open: dict[int, Descriptor] = {}
        self._closed_by_death: set[int] = set()
        self._next = 1000
        self._observer = Process("observer", 1)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute from `os`, and keep it as an attribute."""
        value = self.__dict__[name] = getattr(os, name)
        return value

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        """Open a file or folder."""
        del mode
        is_created = flags & os.O_CREAT and (flags & os.O_EXCL or not self.path.exists(path))
        where = self._enter("create" if is_created else "open", path)
        disk = self.find_disk(where)
        if is_created:
            node: Node = disk.create(where, self._scheduler.clock)
        elif flags & os.O_DIRECTORY:
            node = disk.find_folder(where)
        else:
            node = disk.find(where)
        return self._add(node, where, disk)

    def _add(self, node: Node, path: str, disk: Disk) -> int:
        self._next += 1
        process = self._scheduler.current.process if self._scheduler.current is not None else self._observer
        self._open[self._next] = Descriptor(node, path, disk, process)
        return self._next

    def open_stream(self, path: str, mode: str = "r", **_: Any) -> BytesIO:
        """Open a file for reading, instead of the builtin `open`."""
        if mode != "rb":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        node = self.find(self._enter("read", path))
        if isinstance(node, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return BytesIO(bytes(node.data))

    def close(self, fd: int) -> None:
        """Close a file, and release its lock."""
        file = self._open.pop(fd, None)
        if file is None and fd in self._closed_by_death:
            return
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        node = file.node
        if node.lock == fd:
            node.lock = None
            self._scheduler.notify(node)
        if fd in node.sharing:
            node.sharing -= {fd}
            node.released_at = self._scheduler.now
            self._scheduler.notify(node)

    def has_lock(self, disk: Disk, path: str) -> bool:
        """Return True if a process shares a lock on a file that has this path, or had it when it was opened."""
        opened = [(fd, file) for fd, file in self._open.items() if file.disk is disk and file.path == path]
        return any(fd in file.node.sharing for fd, file in opened)

    def close_all(self, process: Process) -> None:
        """Close all files of an ended process."""
        for fd in [fd for fd, file in self._open.items() if file.process is process]:
            self.close(fd)
            self._closed_by_death.add(fd)

    def write(self, fd: int, data: memoryview) -> int:
        """Append bytes at an open file's offset."""
        file = self._get(fd)
        count = self.pwrite(fd, data, file.offset)
        file.offset += count
        return count

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write bytes at an offset."""
        file = self._get(fd)
        self._touch("write", file)
        assert isinstance(file.node, File)
        file.disk.write(file.node, offset, bytes(data), self._scheduler.clock)
        return len(data)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Shorten or lengthen a file."""
        file = self._get(fd)
        self._touch("write", file)
        assert isinstance(file.node, File)
        file.disk.truncate(file.node, nbytes, self._scheduler.clock)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Return bytes at an offset."""
        buffer = bytearray(nbytes)
        return bytes(buffer[: self.preadv(fd, [memoryview(buffer)], offset)])

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read bytes at an offset into buffers."""
        file = self._get(fd)
        self._touch("read", file)
        assert isinstance(file.node, File)
        count = 0
        for buffer in buffers:
            part = file.node.data[offset + count : offset + count + len(buffer)]
            buffer[: len(part)] = part
            count += len(part)
        return count

    def _touch(self, verb: str, file: Descriptor) -> None:
        """Start a read or write."""
        self._enter(verb, file.path)

    def lseek(self, fd: int, offset: int, whence: int) -> int:
        """Move an open file's offset."""
        assert whence == os.SEEK_CUR
        file = self._get(fd)
        file.offset += offset
        return file.offset

    def fsync(self, fd: int) -> None:
        """Make a file or a folder survive a power failure."""
        file = self._get(fd)
        self._enter("fsync", file.path)
        file.disk.sync(file.node)

    def flock(self, fd: int, operation: int) -> None:
        """Lock an open file, instead of `fcntl.flock`."""
        node, is_shared = self._get(fd).node, bool(operation & fcntl.LOCK_SH)

        def is_free() -> bool:
            return node.lock in {None, fd} and (is_shared or not node.sharing - {fd})

        if not operation & fcntl.LOCK_NB:
            self._scheduler.wait(is_free, "a lock", None, (node,))
        elif not is_free():
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        node.lock = None if is_shared else fd
        node.sharing = node.sharing | {fd} if is_shared else node.sharing - {fd}
        self._scheduler.notify(node)

    def fstat(self, fd: int) -> Status:
        """Return an open file's status."""
        return _describe(self._get(fd).node)

    def getpid(self) -> int:
        """Return the simulated process's id."""
        return self._scheduler.current.process.number if self._scheduler.current is not None else os.getpid()

    def urandom(self, nbytes: int) -> bytes:
        """Return bytes that the seed gives."""
        return self._scheduler.random.randbytes(nbytes)

    def _get(self, fd: int) -> Descriptor:
        file = self._open.get(fd)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return file


def _raise_fault(fault: str, path: str) -> None:
    """Raise a fault's OSError; faults in the environment raise nothing here."""
    code = getattr(errno, fault, None) if fault else None
    if code is not None:
        raise OSError(code, os.strerror(code), path)


def _describe(node: Node) -> Status:
    changed = int(node.changed * 1e9)
    if isinstance(node, Folder):
        mode, nbytes = stat.S_IFDIR | 0o700, 0
    else:
        mode, nbytes = stat.S_IFREG | 0o644, len(node.data)
    return tuple.__new__(Status, (mode, node.inode, 1, nbytes, node.changed, changed, changed, _USER))
