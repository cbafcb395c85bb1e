"""Writers over fsspec: put request, multipart upload, or temporary file."""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import fsspec
from fsspec.asyn import AsyncFileSystem

from shardckpt.errors import ShardckptError, TargetExistsError
from shardckpt.storage.publication import files_removed_error
from shardckpt.storage.range_cache import MAX_REQUEST
from shardckpt.storage.retry import remote_error, renew_credentials, retry
from shardckpt.storage.sftp import SftpFiles
from shardckpt.storage.store import ClosingWriter, Read, Store

PART_BYTES = 16 << 20  # bytes of one part of an upload; one part is buffered, and parts grow if there are many

# Number of parts after which they grow with the file. S3 allows 10,000 parts; this stays below at 5 TB.
_PARTS = 1000

_SLICE = 4 << 20  # maximum bytes passed to a back end's writer at once: its buffer must not exceed a part

_COPY_BUFFER = 4 * MAX_REQUEST

# Protocols whose objects appear when their writer closes; other protocols use a temporary name and a rename.
_APPEARS_AT_ONCE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "hf", "oci", "oss", "obs", "tos", "r2"}

# Protocols of `_APPEARS_AT_ONCE` whose stores can create an object only if it does not exist.
_CREATES_NEW = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"}

# File systems whose servers cannot create an object only if it does not exist, by their answer.
_WITHOUT_CREATE: WeakSet[Any] = WeakSet()

_NOT_OFFERED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


class FsspecWriter(ClosingWriter):
    """A file that appears under its name when it is closed."""

    def __init__(self, fs: Any, path: str, shown: str, *, is_new: bool) -> None:
        self._fs, self._path, self._shown, self._is_new = fs, path, shown, is_new
        self._is_open = True
        self._file: Any = None
        self._buffer: memoryview | None = None

    @abstractmethod
    def _append(self, part: bytes) -> None:
        """Append at most `_SLICE` bytes."""

    @abstractmethod
    def _finish(self) -> None:
        """Make the file appear."""

    @abstractmethod
    def _drop(self) -> None:
        """Remove the written bytes."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _SLICE):
                self._append(bytes(view[start : start + _SLICE]))
        except Exception as error:
            raise remote_error(error, "cannot write", self._shown) from error

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file in `source`."""
        if nbytes and self._buffer is None:
            self._buffer = memoryview(bytearray(min(nbytes, _COPY_BUFFER)))
        while nbytes:
            assert self._buffer is not None
            part = self._buffer[: min(nbytes, len(self._buffer))]
            source.read([Read(name, offset, part)])
            self.write(part)
            offset, nbytes = offset + len(part), nbytes - len(part)

    def close(self) -> None:
        """Make the file appear."""
        if not self._is_open:
            return
        self._buffer = None
        try:
            self._finish()
        except FileExistsError as error:
            self.abort()
            raise TargetExistsError("somebody else wrote this meanwhile", where=self._shown) from error
        except ShardckptError:
            self.abort()
            raise
        except Exception as error:
            self.abort()
            raise remote_error(error, "cannot finish", self._shown) from error
        except BaseException:
            self.abort()
            raise
        self._is_open = False

    def abort(self) -> None:
        """Remove the written bytes; never raises."""
        if not self._is_open:
            return
        self._is_open = False
        self._buffer = None
        with suppress(Exception):
            self._drop()

    def _refuse_old(self) -> None:
        """Raise FileExistsError if the name is in use, for back ends that cannot check and write atomically."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._path):
            raise FileExistsError(self._path)


class ObjectWriter(FsspecWriter):
    """An object in a bucket: one request with retries if it fits into a part, else a multipart upload."""

    def __init__(self, fs: Any, path: str, shown: str, *, is_new: bool, needed: str = "") -> None:
        super().__init__(fs, path, shown, is_new=is_new)
        self._needed, self._was_sent = needed, False
        self._kept = bytearray()
        self._written = 0
        self._can_create = can_create_once(fs)

    def _append(self, part: bytes) -> None:
        self._written += len(part)
        if self._file is None:
            self._kept += part
            if len(self._kept) <= PART_BYTES and _puts_at_once(self._fs):
                return
            mode = "xb" if self._is_new and self._can_create else "wb"
            self._file = self._fs.open(self._path, mode, block_size=PART_BYTES)
            renew_credentials(self._file)
            part, self._kept = bytes(self._kept), bytearray()
        self._file.write(part)
        if self._written > PART_BYTES * _PARTS and not getattr(self._fs, "fixed_upload_size", False):
            self._file.blocksize = max(PART_BYTES, self._written // _PARTS)

    def _finish(self) -> None:
        if self._is_new and not self._can_create:
            self._refuse_old()
        if self._file is None and not _puts_at_once(self._fs):
            self._file = self._fs.open(self._path, "wb", block_size=PART_BYTES)
        if self._file is None:
            retry(self._put, "cannot finish", self._shown)
        else:
            self._file.close()

    def _put(self) -> None:
        if self._was_sent and self._needed:
            self._require_needed()
        self._was_sent = True
        data = bytes(self._kept)
        if not (self._is_new and self._can_create):
            self._fs.pipe_file(self._path, data)
            return
        try:
            self._fs.pipe_file(self._path, data, mode="create")
        except FileExistsError as error:
            raise TargetExistsError("somebody else wrote this meanwhile", where=self._shown) from error
        except (OSError, NotImplementedError, TypeError) as error:
            if isinstance(error, OSError) and error.errno not in _NOT_OFFERED:
                raise
            _WITHOUT_CREATE.add(self._fs)  # the server implements only a part of its protocol
            self._can_create = False
            self._refuse_old()
            self._fs.pipe_file(self._path, data)

    def _require_needed(self) -> None:
        """Raise StorageError if the needed file is missing."""
        # The request may have succeeded without an answer, and another process may have removed both files.
        self._fs.invalidate_cache()
        try:
            self._fs.info(self._needed)
        except FileNotFoundError as error:
            raise files_removed_error(self._shown, self._needed.rpartition("/")[2]) from error

    def _drop(self) -> None:
        self._kept = bytearray()
        if self._file is None:
            return
        with suppress(Exception):
            self._file.discard()
        self._file.closed = True  # so that the garbage collector does not finish the upload


class MovedWriter(FsspecWriter):
    """A file written under a temporary name in the same folder and then renamed."""

    def __init__(self, fs: Any, path: str, shown: str, *, is_new: bool) -> None:
        super().__init__(fs, path, shown, is_new=is_new)
        folder, _, base = path.rpartition("/")
        self._partial = f"{folder}/.{base}.partial-{os.urandom(6).hex()}"
        self._file = retry(self._open, "cannot create", shown)

    def _open(self) -> Any:
        self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
        return self._fs.open(self._partial, "wb", block_size=PART_BYTES)

    def _append(self, part: bytes) -> None:
        self._file.write(part)

    def _finish(self) -> None:
        self._file.close()
        if isinstance(self._fs, SftpFiles) and self._is_new:
            self._fs.mv_new(self._partial, self._path)
            return
        if self._is_new:
            self._refuse_old()
        if type(self._fs).mv is not fsspec.AbstractFileSystem.mv:
            self._fs.mv(self._partial, self._path)
            return
        # fsspec's own method would interpret names as patterns.
        self._fs.cp_file(self._partial, self._path)
        self._fs.rm_file(self._partial)

    def _drop(self) -> None:
        with suppress(Exception):
            self._file.close()
        if isinstance(self._file, fsspec.spec.AbstractBufferedFile):
            self._file.closed = True  # so that the garbage collector does not finish the file
        retry(lambda: self._fs.rm_file(self._partial), "cannot delete", self._shown)


def new_writer(fs: Any, path: str, shown: str, *, is_new: bool, needed: str = "") -> FsspecWriter:
    """Return the writer for a file system. Raises StorageError."""
    if _protocols(fs) & _APPEARS_AT_ONCE:
        return ObjectWriter(fs, path, shown, is_new=is_new, needed=needed)
    return MovedWriter(fs, path, shown, is_new=is_new)


def can_create_once(fs: Any) -> bool:
    """Return True if only one writer succeeds when several create a new file at once."""
    if _protocols(fs) & _APPEARS_AT_ONCE:
        return bool(_protocols(fs) & _CREATES_NEW) and fs not in _WITHOUT_CREATE
    return isinstance(fs, SftpFiles) or "memory" in _protocols(fs)  # "memory": files of this process


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _puts_at_once(fs: Any) -> bool:
    """Return True if a file system has a put request for small objects."""
    return isinstance(fs, AsyncFileSystem) or type(fs).pipe_file is not fsspec.AbstractFileSystem.pipe_file
