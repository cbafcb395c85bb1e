"""The contract of a store of named bytes, the checks and errors that all stores share, and stores over other stores."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, runtime_checkable

from typing_extensions import Self

from shardckpt.errors import MissingFileError, NoSpaceError, ShardckptError, StorageError, UnsafeError


class Listed(NamedTuple):
    """One name in a folder.

    Attributes:
        name: Relative to the store's root, with forward slashes.
        size: Bytes; 0 for a folder.
        is_folder: Whether it holds other names.
    """

    name: str
    size: int
    is_folder: bool


class Read(NamedTuple):
    """One wanted range.

    Attributes:
        name: File, relative to the store's root.
        offset: First byte.
        buffer: Writable bytes that are filled to the end; their length is the length of the range.
    """

    name: str
    offset: int
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do beyond naming bytes.

    Attributes:
        renames: Folders can be renamed in one step, so that a result appears at once.
        is_local: Files are on this machine: reads are cheap and small ones need no merging.
    """

    renames: bool
    is_local: bool


class Writer(Protocol):
    """A file being written from its start to its end. Nothing appears under its name before `close`.

    As a context manager it closes on success and aborts on any exception.
    """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`. Raises StorageError."""

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file of `source`, through one buffer of bounded size.

        Raises:
            TruncatedError: The file ends before the range does.
            StorageError: Reading or writing failed.
        """

    def close(self) -> None:
        """Finish the file, so that it survives a power failure if the store can promise that."""

    def abort(self) -> None:
        """Drop what was written; never raises."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ClosingWriter(ABC):
    """What a writer is as a context manager: closed on success, aborted on any exception."""

    @abstractmethod
    def close(self) -> None:
        """Finish the file. Raises StorageError."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what was written; never raises."""

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
    """Bytes at names below one root. Names are relative, with forward slashes, never absolute and never with `..`.

    Paths are `str`, so that the same name means the same thing on a disk and in a bucket.
    """

    @property
    def url(self) -> str:
        """The root, as a person would type it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder`, sorted by name; nothing for a folder that does not exist."""

    def size(self, name: str) -> int:
        """Return a file's size in bytes.

        Raises:
            MissingFileError: No such file.
            UnsafeError: The name or its real path leaves the root.
            StorageError: The store failed.
        """

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer. A remote store merges near ranges into few requests and retries what may pass.

        Raises:
            TruncatedError: A file ends before a range does.
            MissingFileError: No such file.
            UnsafeError: A name or its real path leaves the root.
            StorageError: The store failed, after retries.
        """

    def create(self, name: str) -> Writer:
        """Start a new file, folders above it included. Raises StorageError."""

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error. Raises StorageError."""

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all it holds, in any order; a missing one is not an error. Raises StorageError."""

    def changed_at(self, folder: str) -> float | None:
        """Return when anything in a folder last changed, in seconds since the epoch; None where nobody knows."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder in one step; only where `capabilities.renames`. Raises StorageError."""


def read_bytes(store: Store, name: str, offset: int, nbytes: int) -> bytes:
    """Return one range of a file.

    Args:
        store: The store of the file.
        name: The file.
        offset: First byte.
        nbytes: Bytes.

    Raises:
        TruncatedError: The file ends before the range does.
        StorageError: The store failed.
    """
    buffer = bytearray(nbytes)
    store.read([Read(name, offset, memoryview(buffer))])
    return bytes(buffer)


def check_name(name: str, where: str) -> None:
    """Refuse a name that could mean anything but a place below its root.

    Args:
        name: Relative, with forward slashes; often taken from an untrusted file.
        where: The root, for the message.

    Raises:
        UnsafeError: The name is empty, absolute, climbs with `..`, or cannot be a file name at all.
    """
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/") or not _is_encodable(name):
        raise UnsafeError(
            "this file name leaves the checkpoint's folder",
            where=where,
            found=repr(name),
            expected="a relative name without '..'",
            fix="Do not use this checkpoint unless you know who wrote it.",
        )


def _is_encodable(name: str) -> bool:
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
    """Return a StorageError for an OSError, as specific as its errno allows.

    Args:
        error: What the system raised; becomes the cause once the result is raised `from` it.
        what: What could not be done, e.g. "cannot read".
        where: The file or folder.
        is_target: Whether it is one that is made: then nothing can be missing from it.
    """
    kind: type[StorageError] = StorageError
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        kind = NoSpaceError
    elif is_target:
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
    """Raise an OSError of the block as a StorageError; our own errors pass as they are."""
    try:
        yield
    except ShardckptError:  # some of ours are OSErrors too
        raise
    except OSError as error:
        raise storage_error(error, what, where, is_target=is_target) from error


class WrappedStore:
    """The underlying store under another name, from which a store that changes some of it is made.

    Args:
        store: The underlying store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The root, as a person would type it."""
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""
        return self._store.capabilities

    def list(self, folder: str = "") -> list[Listed]:
        """As the underlying store."""
        return self._store.list(folder)

    def size(self, name: str) -> int:
        """As the underlying store."""
        return self._store.size(name)

    def read(self, reads: Sequence[Read]) -> None:
        """As the underlying store."""
        self._store.read(reads)

    def create(self, name: str) -> Writer:
        """As the underlying store."""
        return self._store.create(name)

    def delete(self, name: str) -> None:
        """As the underlying store."""
        self._store.delete(name)

    def delete_folder(self, folder: str) -> None:
        """As the underlying store."""
        self._store.delete_folder(folder)

    def changed_at(self, folder: str) -> float | None:
        """As the underlying store."""
        return self._store.changed_at(folder)

    def rename(self, source: str, target: str) -> None:
        """As the underlying store."""
        self._store.rename(source, target)


class SubfolderStore(WrappedStore):
    """Bytes at names below a folder of another store; closes, caches and retries as that one does.

    Args:
        store: The other one.
        folder: In it; need not exist.
    """

    def __init__(self, store: Store, folder: str) -> None:
        check_name(folder, store.url)
        super().__init__(store)
        self._folder = folder

    @property
    def url(self) -> str:
        """The root, as a person would type it."""
        return f"{self._store.url.rstrip('/')}/{self._folder}"

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder`, sorted by name; nothing for a folder that does not exist."""
        start = len(self._folder) + 1
        entries = self._store.list(self._name(folder) if folder else self._folder)
        return [entry._replace(name=entry.name[start:]) for entry in entries]

    def size(self, name: str) -> int:
        """Return a file's size in bytes. Raises MissingFileError, UnsafeError or StorageError."""
        return self._store.size(self._name(name))

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer. Raises TruncatedError, MissingFileError, UnsafeError or StorageError."""
        self._store.read([Read(self._name(name), offset, buffer) for name, offset, buffer in reads])

    def create(self, name: str) -> Writer:
        """Start a new file, folders above it included. Raises StorageError."""
        return self._store.create(self._name(name))

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error. Raises StorageError."""
        self._store.delete(self._name(name))

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all it holds; a missing one is not an error. Raises StorageError."""
        self._store.delete_folder(self._name(folder))

    def changed_at(self, folder: str) -> float | None:
        """Return when anything in a folder last changed, in seconds since the epoch; None where nobody knows."""
        return self._store.changed_at(self._name(folder))

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder in one step; only where `capabilities.renames`. Raises StorageError."""
        self._store.rename(self._name(source), self._name(target))

    def _name(self, name: str) -> str:
        check_name(name, self.url)
        return f"{self._folder}/{name}"
