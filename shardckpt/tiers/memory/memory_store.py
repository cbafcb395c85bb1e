"""Store in a run's memory folder: files are not synced, and have a limit."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from shardckpt.errors import MissingFileError, NoSpaceError, TargetExistsError, TruncatedError
from shardckpt.storage.local import LocalWriter
from shardckpt.storage.node_folder import NodeFolder
from shardckpt.storage.store import check_name, convert_os_errors
from shardckpt.tiers.memory.free_memory import read_available_bytes
from shardckpt.tiers.memory.lease import LEASE
from shardckpt.tiers.memory.run_folders import find_run_folder, require_run

__all__ = ["FREE_PART", "MemoryPlace", "MemoryStore", "list_sizes", "name_place"]

RESERVED_BYTES = 16 << 20  # bytes that a writer reserves at a time, at least
FREE_PART = 10  # one of so many parts of the mount stays free: other programs need it
_UNLIMITED = 1 << 62
_MAPPED_BYTES = 1 << 20  # shorter ranges are read: a copy is as cheap as a map


class MemoryPlace(NamedTuple):
    """A run's folder on this node."""

    folder: str
    max_bytes: int = _UNLIMITED
    is_memory: bool = False  # its file system is in memory: files can be mapped, and count as memory of the process

    def require_space(self, more: int) -> None:
        """Require space for the bytes that this process has just reserved. Raises NoSpaceError."""
        used = sum(list_sizes(self.folder))
        if used > self.max_bytes:
            raise NoSpaceError(
                "captures in memory would have too many bytes",
                where=self.folder,
                found=f"{used} bytes",
                expected=f"at most {self.max_bytes} bytes",
                fix="Raise `max_bytes`, or keep fewer captures.",
            )
        disk = os.statvfs(self.folder)
        if (disk.f_bavail * disk.f_frsize - more) * FREE_PART < disk.f_blocks * disk.f_frsize:
            raise NoSpaceError(
                "captures in memory would leave less than a tenth of their file system free",
                where=self.folder,
                found=f"{disk.f_bavail * disk.f_frsize} bytes free",
                fix="Enlarge it, or set `max_bytes`.",
            )
        available = read_available_bytes(more) if self.is_memory else None
        if available is not None and more > available:
            raise NoSpaceError(
                "this machine, or its container, has too little free memory",
                where=self.folder,
                found=f"{available} bytes",
            )


def list_sizes(folder: str) -> Iterator[int]:
    """Yield the size of each file below a folder, in bytes; files in progress have what they reserve."""
    for inner, _, names in os.walk(folder):
        for name in {*names} - {LEASE}:
            with suppress(FileNotFoundError):
                yield os.path.getsize(os.path.join(inner, name))


PLACES: dict[str, MemoryPlace] = {}  # by run id


def name_place(run: str, place: MemoryPlace) -> None:
    """Let a run's URL stand for its place on this node."""
    PLACES[require_run(run)] = place


def _find_place(run: str) -> MemoryPlace:
    """Return a run's place; an empty one if no process of this node has captured."""
    place = PLACES.get(require_run(run))
    return MemoryPlace(find_run_folder(run) or f"/nonexistent/{run}") if place is None else place


class MemoryStore(NodeFolder):
    """A run's captures in memory on this node, in which files appear one by one. Reads are thread-safe."""

    def __init__(self, url: str) -> None:
        run, _, folder = url.partition("://")[2].strip("/").partition("/")
        if folder:
            check_name(folder, url)
        self._place = _find_place(run)
        super().__init__(url, os.path.join(self._place.folder, folder) if folder else self._place.folder)

    def find_kind(self) -> str:
        """Return what the root is: `file`, `folder` or `missing`."""
        return "folder" if os.path.isdir(self._root) else "file" if os.path.isfile(self._root) else "missing"

    def view(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        """Return a range of a file without a copy, as bytes that never change; None if it has to be read."""
        if not self._place.is_memory or nbytes < _MAPPED_BYTES:
            return None
        file = self.open(name)
        start = offset % mmap.ALLOCATIONGRANULARITY
        if offset + nbytes > os.fstat(file.fd).st_size:
            raise TruncatedError.from_size(file.path, os.fstat(file.fd).st_size, offset + nbytes)
        with convert_os_errors("cannot map", file.path):  # no file with its final name becomes shorter
            mapped = mmap.mmap(file.fd, start + nbytes, access=mmap.ACCESS_COPY, offset=offset - start)
        return memoryview(mapped)[start:]

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        path = self._path(name, follow=False)
        self.close()
        with convert_os_errors("cannot delete", path), suppress(FileNotFoundError):
            os.unlink(path)

    def written_at(self, name: str) -> float | None:
        """Return when a file was written, in seconds since the epoch."""
        written = self.changed_at(name)
        if written is None:
            raise MissingFileError("no such file", where=self._shown(name))
        return written

    def version(self, name: str) -> str:
        """Return a text that changes when a file is replaced."""
        path = self._path(name)
        with convert_os_errors("cannot look at it", path):
            status = os.stat(path)
        return f"{status.st_ino} {status.st_ctime_ns}"

    def create(self, name: str, *, is_new: bool = False, needed: str = "") -> MemoryWriter:  # noqa: ARG002
        """Start a new file, and create its step's folder."""
        path = self._path(name, follow=False)
        with convert_os_errors("cannot create", path):
            if os.path.dirname(path) != self._place.folder:  # that one is made with its lease, or not at all
                with suppress(FileExistsError):
                    os.mkdir(os.path.dirname(path))
            writer = MemoryWriter(path, self.close, self._place.require_space)
        if is_new and os.path.lexists(path):
            writer.abort()
            raise TargetExistsError("another file has this name", where=path)
        return writer


class MemoryWriter(LocalWriter):
    """Writer of a file that is not synced, and whose bytes are reserved before they are written."""

    def __init__(self, path: str, appeared: Callable[[], None], require_space: Callable[[int], None]) -> None:
        super().__init__(path, (), appeared)
        self._require_space, self._reserved = require_space, 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`. Raises NoSpaceError."""
        nbytes = self._written + memoryview(data).nbytes
        if nbytes > self._reserved:
            try:
                self._reserve(self._written + max(nbytes - self._written, RESERVED_BYTES))
            except NoSpaceError:
                self._reserve(nbytes)
        super().write(data)

    def _reserve(self, nbytes: int) -> None:
        before = self._reserved
        with convert_os_errors("cannot reserve memory", self._path):
            os.ftruncate(self._fd, nbytes)  # so that other processes of the node count it
            try:
                self._require_space(nbytes - before)
            except NoSpaceError:
                os.ftruncate(self._fd, before)
                raise
        self._reserved = nbytes

    def _count(self, nbytes: int) -> None:
        """Count written bytes; their writeback is not started."""
        self._written += nbytes

    def _sync(self) -> None:
        """Give back what is reserved and not written."""
        os.ftruncate(self._fd, self._written)
