"""A store in the memory of a holder: a run's files, which outlive the process that wrote them."""

from __future__ import annotations

import builtins
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from shardckpt.errors import MissingFileError, NoSpaceError, StorageError
from shardckpt.storage.local import consecutive_reads, fill
from shardckpt.storage.store import Capabilities, ClosingWriter, Listed, Read, Store, check_name, convert_os_errors
from shardckpt.tiers.holder import SCHEME
from shardckpt.tiers.holder.holder_connection import HolderConnection, HolderGoneError, get_holder_connection
from shardckpt.tiers.holder.holder_sockets import require_run
from shardckpt.tiers.holder.mapped_memory import HUGE_BYTES, add_huge_pages, map_sealed

RESERVED_BYTES = 16 << 20  # bytes that a writer reserves at a time, at least

_OPEN_FILES = 64
_COPY_BYTES = 1 << 20


class HeldMemory:
    """Descriptor for a file's memory, which closes with its last reference."""

    __slots__ = ("_close", "_view", "fd")

    def __init__(self, fd: int) -> None:
        self.fd, self._close = fd, os.close  # `os` may be gone when the interpreter ends
        self._view: memoryview | None = None

    def view(self) -> memoryview | None:
        """Return the mapped bytes of the file, without a copy; None if they have to be read."""
        if self._view is None:
            self._view = map_sealed(self.fd)
        return self._view

    def close(self) -> None:
        """Close the descriptor, once."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._close(fd)

    __del__ = close


class HolderStore:
    """A run's files in this node's holder; empty and read-only without a holder. Reads are thread-safe."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.capabilities = Capabilities(renames=False, is_local=True)
        run, _, folder = url.partition("://")[2].strip("/").partition("/")
        self._run = require_run(run)
        if folder:
            check_name(folder, url)
        self._prefix = f"{folder}/" if folder else ""
        self._files: OrderedDict[str, HeldMemory] = OrderedDict()
        self._lock = threading.Lock()

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder`, sorted by name; empty without a holder, too."""
        path = (self._path(folder) if folder else self._prefix).rstrip("/")
        found: builtins.list[Listed] = []
        with suppress(HolderGoneError):
            has_more, after = True, ""
            while has_more:
                answer = self._connection.request("list", shown=self._shown(folder), folder=path, after=after)
                entries, start = answer["entries"], len(self._prefix)
                found += [Listed(str(name)[start:], int(nbytes), bool(kind)) for name, nbytes, kind in entries]
                has_more = bool(answer["has_more"]) and bool(entries)
                after = str(entries[-1][0]) if entries else ""
        return found

    def find_kind(self) -> str:
        """Return what the root is: `file`, `folder` or `missing`. Raises StorageError."""
        name = self._prefix.rstrip("/")
        if not name:
            return "folder" if self.list() else "missing"
        try:
            return "folder" if self._find(name)["is_folder"] else "file"
        except MissingFileError:
            return "missing"

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        return int(self._find_file(name)["nbytes"])

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer."""
        for run in consecutive_reads(reads):
            name, offset, _ = run[0]
            fill(self._open(name), self._shown(name), offset, *(read.buffer for read in run))

    def view(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        """Return a range of a file without a copy, as bytes that never change; None if it has to be read."""
        if nbytes < HUGE_BYTES:  # a copy is as cheap as a map
            return None
        memory = self._open(name).view()
        return memory[offset : offset + nbytes] if memory is not None and offset + nbytes <= len(memory) else None

    def create(self, name: str, *, is_new: bool = False, needed: str = "") -> HolderWriter:  # noqa: ARG002
        """Start a new file."""
        path, shown = self._path(name), self._shown(name)
        self._forget_files()
        answer, fd = self._connection.request_fd("create", shown=shown, name=path, is_new=is_new)
        return HolderWriter(self._connection, int(answer["number"]), fd, shown)

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error. Raises UnsafeError or StorageError."""
        path = self._path(name)
        self._forget_files()
        with suppress(HolderGoneError):
            self._connection.request("delete", shown=self._shown(name), name=path)

    def delete_files(self, folder: str, names: Collection[str]) -> None:
        """Remove some files in a folder. Raises UnsafeError or StorageError."""
        for name in sorted(names):
            self.delete(f"{folder}/{name}")

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all its content; a missing one is not an error."""
        path = self._path(folder)
        self._forget_files()
        with suppress(HolderGoneError):
            self._connection.request("delete_folder", shown=self._shown(folder), folder=path)

    def changed_at(self, folder: str) -> float | None:
        """Return when a folder last changed, in seconds since the epoch; None if it does not exist."""
        path = self._path(folder)
        with suppress(HolderGoneError):
            time = self._connection.request("changed_at", shown=self._shown(folder), folder=path)["time"]
            return None if time is None else float(time)
        return None

    def written_at(self, name: str) -> float | None:
        """Return when a file was written, in seconds since the epoch."""
        return float(self._find_file(name)["written_at"])

    def version(self, name: str) -> str:
        """Return a text that changes when a file is replaced."""
        found = self._find_file(name)
        return f"{found['number']} {found['written_at']}"

    def rename(self, source: str, target: str) -> None:
        """Raise an error: this store cannot rename folders atomically."""
        raise StorageError("this store cannot rename", where=self._shown(source), expected=target)

    @property
    def _connection(self) -> HolderConnection:
        return get_holder_connection(self._run)

    def _open(self, name: str) -> HeldMemory:
        with self._lock:
            known = self._files.get(name)
        if known is not None:
            return known
        memory = self._request_memory(name)
        with self._lock:
            self._files[name] = memory
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        return memory

    def _request_memory(self, name: str) -> HeldMemory:
        path, shown = self._path(name), self._shown(name)
        try:
            return HeldMemory(self._connection.request_fd("open", shown=shown, name=path)[1])
        except HolderGoneError as error:
            raise MissingFileError("no such file", where=shown, found=error) from error

    def _forget_files(self) -> None:
        with self._lock:
            self._files.clear()

    def _find_file(self, name: str) -> dict[str, Any]:
        found = self._find(self._path(name))
        if found["is_folder"]:
            raise MissingFileError("this is a folder, not a file", where=self._shown(name))
        return found

    def _find(self, path: str) -> dict[str, Any]:
        shown = f"{SCHEME}://{self._run}/{path}"
        try:
            return self._connection.request("find", shown=shown, name=path)
        except HolderGoneError as error:
            raise MissingFileError("no such file", where=shown, found=error) from error

    def _path(self, name: str) -> str:
        check_name(name, self.url)
        return self._prefix + name

    def _shown(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}" if name else self.url


class HolderWriter(ClosingWriter):
    """Writer of a file into a holder's memory; it appears on `close`."""

    def __init__(self, connection: HolderConnection, number: int, fd: int, shown: str) -> None:
        self._connection, self._number, self._shown = connection, number, shown
        self._memory: HeldMemory | None = HeldMemory(fd)
        self._written = self._reserved = 0
        self._is_mapped = False
        _WRITERS.add(self)

    def leave(self) -> None:
        """Close the memory in a forked process; otherwise it would stay as long as that process."""
        if self._memory is not None:
            self._memory.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        memory = self.extend(len(view))
        if memory is None:
            self._write_small_pages(view)
        else:
            _copy_bytes(memory, view)

    def extend(self, nbytes: int) -> memoryview | None:
        """Append bytes, and return them for the caller to fill; None if they have to be written."""
        self._reserve(self._written + nbytes)
        if nbytes < HUGE_BYTES:
            return None
        assert self._memory is not None, "nothing is written after the end"
        self._is_mapped = True
        memory = add_huge_pages(self._memory.fd, self._written, self._written + nbytes)
        self._written += 0 if memory is None else nbytes
        return memory

    def _write_small_pages(self, view: memoryview) -> None:
        """Append reserved bytes without a map."""
        assert self._memory is not None, "nothing is written after the end"
        if self._is_mapped:
            os.lseek(self._memory.fd, self._written, os.SEEK_SET)
        while view:
            try:
                count = os.write(self._memory.fd, view)
            except OSError as error:
                raise NoSpaceError("cannot write into memory", where=self._shown, found=error) from error
            self._written += count
            view = view[count:]

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._reserved:
            return
        wanted = max(nbytes, self._written + RESERVED_BYTES)
        try:
            self._request("reserve", nbytes=wanted)
        except NoSpaceError:
            if wanted == nbytes:
                raise
            wanted = nbytes
            self._request("reserve", nbytes=wanted)
        self._reserved = wanted

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file in `source`, through a buffer with `_COPY_BYTES`."""
        buffer = memoryview(bytearray(min(nbytes, _COPY_BYTES)))
        while nbytes:
            part = buffer[: min(nbytes, len(buffer))]
            source.read([Read(name, offset, part)])
            self.write(part)
            offset, nbytes = offset + len(part), nbytes - len(part)

    def close(self) -> None:
        """Make the file appear; no process can change it after that."""
        if self._memory is None:
            return
        memory, self._memory = self._memory, None
        if self._is_mapped:
            with convert_os_errors("cannot end a file in memory", self._shown):
                os.ftruncate(memory.fd, self._written)  # a huge page may end after the file
        del memory
        self._request("close")

    def abort(self) -> None:
        """Remove the written bytes; never raises."""
        if self._memory is None:
            return
        self._memory = None
        with suppress(StorageError):
            self._request("abort")

    def _request(self, op: str, **fields: int) -> None:
        self._connection.request(op, shown=self._shown, number=self._number, **fields)


_WRITERS: WeakSet[HolderWriter] = WeakSet()  # a forked process leaves them


def _leave_writers() -> None:
    for writer in [*_WRITERS]:
        writer.leave()
    _WRITERS.clear()


os.register_at_fork(after_in_child=_leave_writers)


def _copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes while other threads run."""
    import numpy as np  # noqa: PLC0415  (0.07 s; processes that only read need none)

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
