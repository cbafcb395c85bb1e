"""What a store of named bytes can do: the contract that local and remote stores fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, runtime_checkable

from typing_extensions import Self


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
        renames: Folders can be renamed in one step, so that a result appears whole.
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
        """Finish the file, so that it survives a power cut where the store can promise that."""

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
        """Return what lies directly in `folder`, sorted by name; nothing for a folder that does not exist."""

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
        """Remove a file; a missing one is no error. Raises StorageError."""

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all it holds, in no order; a missing one is no error. Raises StorageError."""

    def changed_at(self, folder: str) -> float | None:
        """Return when anything in a folder last changed, in seconds since the epoch; None where nobody knows."""

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder in one step; only where `capabilities.renames`. Raises StorageError."""


def read_bytes(store: Store, name: str, offset: int, nbytes: int) -> bytes:
    """Return one range of a file.

    Args:
        store: Where the file lies.
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
