"""Interface for stores of named bytes, with shared checks, errors and wrappers."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

from shardckpt.errors import MissingFileError, NoSpaceError, ShardckptError, StorageError, UnsafeError

if TYPE_CHECKING:
    from typing_extensions import Self


class Listed(NamedTuple):
    """An entry in a folder."""

    name: str  # relative to the store's root, with forward slashes
    size: int  # bytes; 0 for a folder
    is_folder: bool


class Read(NamedTuple):
    """A range to read."""

    name: str  # relative to the store's root
    offset: int  # of the first byte in the file
    buffer: memoryview  # writable, and filled completely; its length is the range's


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a store."""

    renames: bool  # folders can be renamed atomically, so that a result appears at once
    is_local: bool  # files are on this machine: reads are cheap, and small ones need not be merged
    # Bytes in a block that is read and verified in full, counted from the start of a file; 0 without blocks.
    block_bytes: int = 0
    is_shared: bool = True  # every rank reaches the same files in the same way, so that one may read for others
    creates_once: bool = True  # if several writers create a new file at once, only one succeeds


class Writer(Protocol):
    """A file being written sequentially, which appears under its name on `close`.

    As a context manager, a writer closes the file on success and aborts on an exception.
    """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`. Raises StorageError."""

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file in `source`, through one buffer of bounded size.

        Raises:
            TruncatedError: The file ends before the range does.
            StorageError: Reading or writing failed.
        """

    def close(self) -> None:
        """Finish the file and sync it to disk if the store can."""

    def abort(self) -> None:
        """Remove the written bytes; never raises."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class ExtendedWriter(Protocol):
    """A writer whose next bytes can be received or read where they stay, without a buffer."""

    def extend(self, nbytes: int) -> memoryview | None:
        """Append bytes, and return them for the caller to fill before the next call; None to `write` them instead."""


class ClosingWriter(ABC):
    """Base class for writers as context managers: close on success, abort on any exception."""

    @abstractmethod
    def close(self) -> None:
        """Finish the file. Raises StorageError."""

    @abstractmethod
    def abort(self) -> None:
        """Remove the written bytes; never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


@runtime_checkable
class Store(Protocol):
    """Named bytes below one root.

    Names are relative, with forward slashes and without `..`. They are `str`, to mean the same on a disk and in a
    bucket.
    """

    @property
    def url(self) -> str:
        """Path or URL of the root, as a user would type it."""

    @property
    def capabilities(self) -> Capabilities:
        """Optional capabilities of this store."""

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder`, sorted by name.

        Returns an empty list if the folder does not exist.
        """

    def size(self, name: str) -> int:
        """Return a file's size in bytes.

        Raises:
            MissingFileError: The file does not exist.
            UnsafeError: The name or its real path leaves the root.
            StorageError: The store failed.
        """

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer.

        A remote store merges near ranges into few requests and retries transient errors.

        Raises:
            TruncatedError: A file ends before a range does.
            MissingFileError: The file does not exist.
            UnsafeError: A name or its real path leaves the root.
            StorageError: The store failed, after retries.
        """

    def create(self, name: str) -> Writer:
        """Start a new file and create its parent folders. Raises StorageError."""

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error. Raises StorageError."""

    def delete_files(self, folder: str, names: Collection[str]) -> None:
        """Remove some files in a folder, in any order, and the folder if nothing else is there. Raises StorageError.

        Missing files are not an error. Files that other processes write there meanwhile stay.
        """

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all its content, in any order. Raises StorageError.

        A missing folder is not an error.
        """

    def changed_at(self, folder: str) -> float | None:
        """Return when a folder last changed, in seconds since the epoch; None if unknown."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder atomically, if `capabilities.renames`.

        Raises StorageError.
        """


class ObjectStore(Store, Protocol):
    """A store without rename: a file appears under its name when it is closed."""

    def create(self, name: str, *, is_new: bool = False, needed: str = "") -> Writer:
        """Start a new file. Raises StorageError.

        Args:
            name: Name of the file.
            is_new: Whether to fail if the name is in use when the file is closed.
            needed: File that must exist before a request is repeated; empty without one.
        """

    def written_at(self, name: str) -> float | None:
        """Return when a file was written, in seconds since the epoch; None if unknown.

        Raises MissingFileError, UnsafeError or StorageError.
        """

    def version(self, name: str) -> str:
        """Return a text that changes when a file is replaced; empty if unavailable.

        Raises MissingFileError, UnsafeError or StorageError.
        """


@runtime_checkable
class MappedStore(Protocol):
    """A store that may have files in this machine's memory."""

    def view(self, name: str, offset: int, nbytes: int) -> memoryview | None:
        """Return a range of a file without a copy, as bytes that never change; None if it has to be read."""


@runtime_checkable
class CopiedStore(Protocol):
    """A store that may have several copies of a file."""

    def reject(self, name: str, offset: int, nbytes: int) -> bool:
        """Read a damaged range from another copy from now on; return False if no other copy is left."""

    def locate(self, name: str, offset: int, nbytes: int) -> str:
        """Return the place of the last rejected copy of a range, for messages."""

    def is_near(self, name: str) -> bool:
        """Return True if a copy is known to be on this machine, so that its bytes need no other rank."""


@lru_cache(maxsize=64)
def _has_copies(kind: type) -> bool:
    return issubclass(kind, CopiedStore)


def as_copied(store: Store) -> CopiedStore | None:
    """Return the store if it may have several copies of a file, else None."""
    # `isinstance` would look for each of the protocol's methods at every call.
    return cast("CopiedStore", store) if _has_copies(type(store)) else None


def read_bytes(store: Store, name: str, offset: int, nbytes: int) -> bytes:
    """Return one range of a file.

    Args:
        store: Store of the file.
        name: Name of the file in the store.
        offset: Offset of the first byte.
        nbytes: Number of bytes.

    Raises:
        TruncatedError: The file ends before the range does.
        StorageError: The store failed.
    """
    buffer = bytearray(nbytes)
    store.read([Read(name, offset, memoryview(buffer))])
    return bytes(buffer)


def check_name(name: str, where: str) -> None:
    """Require that a name stays below its root."""
    is_above = ".." in name and ".." in name.split("/")
    if not name or name.startswith("/") or "\0" in name or is_above or not _is_encodable(name):
        raise UnsafeError(
            "this file name leaves the checkpoint's folder",
            where=where,
            found=repr(name),
            expected="a relative name without '..'",
            fix="Do not use this checkpoint unless you know who wrote it.",
        )


def _is_encodable(name: str) -> bool:
    if name.isascii():
        return True
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


_REMEDIES = {
    errno.ENOSPC: "Free some space, or choose a target elsewhere.",
    errno.EDQUOT: "Free some of your quota, or choose a target elsewhere.",
    errno.EACCES: "Check the permissions.",
    errno.EPERM: "Check the permissions.",
    errno.EROFS: "Choose a target that can be written.",
    errno.EBUSY: "If this is a mount point, choose a folder inside it.",
    errno.EXDEV: "Choose a target on one file system; remove an old one by hand first.",
    errno.ENOTDIR: "A part of the path is a file: choose another.",
    errno.ENOENT: "Check the path; the checkpoint may be incomplete.",
}


_NO_PLACE = "No folder can be made there: choose another target."


def storage_error(error: OSError, what: str, where: str, *, is_target: bool = False) -> StorageError:
    """Return a StorageError for an OSError, as specific as its errno allows."""
    kind: type[StorageError] = StorageError
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        kind = NoSpaceError
    elif is_target:  # a path that is being created is never a missing file
        pass
    elif error.errno in {errno.ENOENT, errno.ENOTDIR} or isinstance(error, FileNotFoundError):
        kind = MissingFileError
    reason = error.strerror or str(error) or type(error).__name__
    is_placeless = is_target and error.errno == errno.ENOENT
    fix = _NO_PLACE if is_placeless else _REMEDIES.get(error.errno or 0, "")
    result = kind(what, where=where, found=reason, fix=fix)
    result.errno = error.errno
    result.strerror = error.strerror
    return result


@contextmanager
def convert_os_errors(what: str, where: str, *, is_target: bool = False) -> Iterator[None]:
    """Raise OSErrors in the block as StorageErrors; other errors pass unchanged."""
    try:
        yield
    except ShardckptError:  # some errors of shardckpt are OSErrors too
        raise
    except OSError as error:
        raise storage_error(error, what, where, is_target=is_target) from error


class WrappedStore:
    """A store that forwards all calls to another one; base class for wrappers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """Path or URL of the root, as a user would type it."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """Optional capabilities of this store."""
        return self._store.capabilities

    def list(self, folder: str = "") -> list[Listed]:
        """Forward to the underlying store."""
        return self._store.list(folder)

    def size(self, name: str) -> int:
        """Forward to the underlying store."""
        return self._store.size(name)

    def read(self, reads: Sequence[Read]) -> None:
        """Forward to the underlying store."""
        self._store.read(reads)

    def reject(self, name: str, offset: int, nbytes: int) -> bool:
        """Forward to the underlying store, if that may have copies."""
        copied = as_copied(self._store)
        return copied is not None and copied.reject(name, offset, nbytes)

    def locate(self, name: str, offset: int, nbytes: int) -> str:
        """Forward to the underlying store; return the file's path or URL if that has no copies."""
        copied = as_copied(self._store)
        return f"{self._store.url}/{name}" if copied is None else copied.locate(name, offset, nbytes)

    def is_near(self, name: str) -> bool:
        """Forward to the underlying store, if that may have copies."""
        copied = as_copied(self._store)
        return copied is None or copied.is_near(name)

    def create(self, name: str) -> Writer:
        """Forward to the underlying store."""
        return self._store.create(name)

    def delete(self, name: str) -> None:
        """Forward to the underlying store."""
        self._store.delete(name)

    def delete_files(self, folder: str, names: Collection[str]) -> None:
        """Forward to the underlying store."""
        self._store.delete_files(folder, names)

    def delete_folder(self, folder: str) -> None:
        """Forward to the underlying store."""
        self._store.delete_folder(folder)

    def changed_at(self, folder: str) -> float | None:
        """Forward to the underlying store."""
        return self._store.changed_at(folder)

    def rename(self, source: str, target: str) -> None:
        """Forward to the underlying store."""
        self._store.rename(source, target)


class SubfolderStore(WrappedStore):
    """Named bytes below a folder in another store, which closes, caches and retries."""

    def __init__(self, store: Store, folder: str) -> None:
        check_name(folder, store.url)
        super().__init__(store)
        self._folder = folder

    @property
    def url(self) -> str:
        """Path or URL of the folder, as a user would type it."""
        return f"{self._store.url.rstrip('/')}/{self._folder}"

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder`, sorted by name; empty if it does not exist."""
        start = len(self._folder) + 1
        entries = self._store.list(self._name(folder) if folder else self._folder)
        return [Listed(name[start:], size, is_folder) for name, size, is_folder in entries]

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        return self._store.size(self._name(name))

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer."""
        self._store.read([Read(self._name(name), offset, buffer) for name, offset, buffer in reads])

    def reject(self, name: str, offset: int, nbytes: int) -> bool:
        """Read a damaged range from another copy, as `CopiedStore`."""
        return super().reject(self._name(name), offset, nbytes)

    def locate(self, name: str, offset: int, nbytes: int) -> str:
        """Return the place of the last rejected copy, as `CopiedStore`."""
        return super().locate(self._name(name), offset, nbytes)

    def is_near(self, name: str) -> bool:
        """Return True if a copy is on this machine, as `CopiedStore`."""
        return super().is_near(self._name(name))

    def create(self, name: str) -> Writer:
        """Start a new file and create its parent folders. Raises StorageError."""
        return self._store.create(self._name(name))

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error. Raises StorageError."""
        self._store.delete(self._name(name))

    def delete_files(self, folder: str, names: Collection[str]) -> None:
        """Remove some files in a folder, and the folder if nothing else is there. Raises StorageError."""
        self._store.delete_files(self._name(folder), names)

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all its content; a missing one is not an error. Raises StorageError."""
        self._store.delete_folder(self._name(folder))

    def changed_at(self, folder: str) -> float | None:
        """Return when a folder last changed, in seconds since the epoch; None if unknown."""
        return self._store.changed_at(self._name(folder))

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder atomically, if `capabilities.renames`."""
        self._store.rename(self._name(source), self._name(target))

    def _name(self, name: str) -> str:
        check_name(name, self.url)
        return f"{self._folder}/{name}"
