"""Ledger of a holder: its files, their writers and bytes, without I/O and without a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field

from shardckpt.errors import MissingFileError, NoSpaceError, StorageError, TargetExistsError
from shardckpt.storage.store import Listed, check_name

MAX_FILES = 100_000  # including files that are being written

MAX_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file in a holder's memory."""

    number: int  # unique in the holder, and never used again
    nbytes: int
    written_at: float  # when it appeared, in seconds since the epoch
    client: int  # client that wrote it


@dataclass(slots=True)
class _OpenFile:
    """A file that a client writes, and the bytes reserved for it."""

    name: str
    client: int
    is_new: bool
    nbytes: int = 0


@dataclass
class HolderLedger:
    """Files in a holder, and their writers."""

    max_bytes: int  # of all files, including those being written
    last: (
        str  # file that makes a folder complete; a folder without it goes when all clients that wrote into it are gone
    )
    release: Callable[[int], None] = lambda _: None  # called with the number of each file that is removed
    _files: dict[str, HeldFile] = field(default_factory=dict)
    _open: dict[int, _OpenFile] = field(default_factory=dict)
    _count: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all files, including those being written."""
        return sum(file.nbytes for file in self._files.values()) + sum(file.nbytes for file in self._open.values())

    def create(self, client: int, name: str, *, is_new: bool) -> int:
        """Start a file, and return its number."""
        check_name(name, "holder")
        if len(self._files) + len(self._open) >= MAX_FILES or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
            raise NoSpaceError("too many files, or too long a name", where=name, expected=f"at most {MAX_FILES} files")
        self._count += 1
        self._open[self._count] = _OpenFile(name, client, is_new)
        return self._count

    def reserve(self, client: int, number: int, nbytes: int) -> int:
        """Reserve `nbytes` in all for a file that is being written; return the bytes that were reserved before."""
        file = self._require_open(client, number)
        wanted = self.nbytes + nbytes - file.nbytes
        if wanted > self.max_bytes:
            raise NoSpaceError(
                "the holder would have too many bytes",
                found=f"{wanted} bytes",
                expected=f"at most {self.max_bytes} bytes",
            )
        before, file.nbytes = file.nbytes, nbytes
        return before

    def close(self, client: int, number: int, nbytes: int, now: float) -> None:
        """Make a file appear under its name, in place of an older one."""
        file = self._require_open(client, number)
        if nbytes > file.nbytes:
            self.abort(client, number)
            raise StorageError(
                "the file is larger than its reserved memory",
                found=f"{nbytes} bytes",
                expected=f"at most {file.nbytes} bytes",
            )
        if file.is_new and file.name in self._files:
            self.abort(client, number)
            raise TargetExistsError("somebody else wrote this meanwhile", where=file.name)
        del self._open[number]
        self.delete(file.name)
        self._files[file.name] = HeldFile(number, nbytes, now, client)

    def abort(self, client: int, number: int) -> None:
        """Remove a file that is being written. Raises StorageError if the client does not write it."""
        self._require_open(client, number)
        del self._open[number]
        self.release(number)

    def find(self, name: str) -> HeldFile:
        """Return a file. Raises MissingFileError."""
        file = self._files.get(name)
        if file is None:
            raise MissingFileError("no such file", where=name)
        return file

    def is_folder(self, name: str) -> bool:
        """Return True if there are files below a name."""
        return any(each.startswith(f"{name}/") for each in self._files)

    def list(self, folder: str) -> list[Listed]:
        """Return a folder's content, sorted by name; empty if it does not exist."""
        prefix = f"{folder}/" if folder else ""
        found: dict[str, Listed] = {}
        for name, file in self._files.items():
            if name.startswith(prefix):
                base, slash, _ = name[len(prefix) :].partition("/")
                found[prefix + base] = Listed(prefix + base, 0 if slash else file.nbytes, bool(slash))
        return sorted(found.values())

    def changed_at(self, folder: str) -> float | None:
        """Return when the newest file in a folder appeared, in seconds since the epoch; None without files."""
        return max((self._files[name].written_at for name in self._below(folder)), default=None)

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        file = self._files.pop(name, None)
        if file is not None:
            self.release(file.number)

    def delete_folder(self, folder: str) -> None:
        """Remove all files below a folder; a missing one is not an error."""
        for name in list(self._below(folder)):
            self.delete(name)

    def forget(self, client: int, connected: Set[int]) -> None:
        """Remove a lost client's unfinished work: its open files, and incomplete folders without other writers."""
        for number in [number for number, file in self._open.items() if file.client == client]:
            self.abort(client, number)
        folders: dict[str, set[int]] = {}
        for name, file in self._files.items():
            folders.setdefault(name.rpartition("/")[0], set()).add(file.client)
        writing = {file.name.rpartition("/")[0] for file in self._open.values()}
        for folder, clients in folders.items():
            is_torn = folder and f"{folder}/{self.last}" not in self._files
            if is_torn and folder not in writing and clients.isdisjoint(connected):
                self.delete_folder(folder)

    def _below(self, folder: str) -> Iterator[str]:
        return (name for name in self._files if name.startswith(f"{folder}/"))

    def _require_open(self, client: int, number: int) -> _OpenFile:
        file = self._open.get(number)
        if file is None or file.client != client:
            raise StorageError("this client does not write this file", found=number)
        return file
