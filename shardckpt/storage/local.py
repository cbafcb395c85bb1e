"""A store in a local folder."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NoReturn, Protocol

from shardckpt.errors import MissingFileError, TargetExistsError, TruncatedError, UnsafeError
from shardckpt.storage.linux_syscalls import STEP_BYTES, start_writeback
from shardckpt.storage.orphans import close, make_partial_file, release
from shardckpt.storage.store import (
    Capabilities,
    ClosingWriter,
    Listed,
    Read,
    Store,
    check_name,
    convert_os_errors,
    storage_error,
)

_NOT_EMPTY_OR_GONE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)

_OPEN_FILES = 64  # maximum files that one store keeps open; a checkpoint may have thousands
_OPEN_SHARE = 8  # a store keeps at most 1/8 of the process's file descriptors open
_RUN = 512  # maximum buffers for one read call; Linux allows 1,024

# Bytes in the buffer for local copies: the data is still in the processor's cache when it is written.
# Measured on ext4: 3.9 GB/s with 1 MiB, 2.2 with 2 MiB, 2.7 with copy_file_range (docs/decisions/0005).
_BUFFER = 1 << 20

# Bytes in the buffer for copies from a remote source, which its concurrent requests fill.
_REMOTE_BUFFER = 32 << 20


class OpenFile:
    """A file descriptor that closes with its last reference, so that eviction cannot close it during a read."""

    __slots__ = ("_close", "fd", "path")

    def __init__(self, path: str) -> None:
        self._close: Callable[[int], None] = os.close  # names of modules may be gone at interpreter exit
        self.path = path
        # Without O_NONBLOCK a FIFO in a hostile folder would block forever.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        mode = os.fstat(self.fd).st_mode
        if stat.S_ISDIR(mode):
            raise MissingFileError("this is a folder, not a file", where=path)
        if not stat.S_ISREG(mode):
            raise UnsafeError("not a regular file", where=path, fix="Remove it from the checkpoint's folder.")

    def __reduce__(self) -> NoReturn:
        """Refuse copies: the first to end would close the descriptor for all."""
        raise TypeError("an open file cannot be copied or pickled")

    def __del__(self) -> None:
        """Close the descriptor."""
        fd = getattr(self, "fd", -1)
        if fd >= 0:
            self._close(fd)


class LocalStore:
    """A folder in the local file system. Reads are thread-safe."""

    def __init__(self, root: str) -> None:
        self.url = self._root = root
        self.capabilities = Capabilities(renames=True, is_local=True)
        self._real = os.path.realpath(root)
        self._root_id = _get_folder_id(root)
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close cached files; the store remains usable."""
        with self._lock:
            self._files.clear()

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder`, sorted by name."""
        return list(self.list_first(folder, None))

    def list_first(self, folder: str, limit: int | None) -> Sequence[Listed]:
        """List only some names in `folder`, in a time that does not grow with their number."""
        path = self._path(folder) if folder else self._root
        prefix = f"{folder}/" if folder else ""
        try:
            with os.scandir(path) as entries:
                listed = [each for entry in islice(entries, limit) if (each := _to_listed(prefix, entry)) is not None]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error(error, "cannot list", path) from error
        return sorted(listed)

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        path = self._path(name)
        with convert_os_errors("cannot find the size", path):
            status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise MissingFileError("this is a folder, not a file", where=path)
        return status.st_size

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer."""
        if len(reads) == 1 and reads[0].buffer.nbytes:  # large ranges come as very many single reads
            self._read_one(*reads[0])
            return
        for run in consecutive_reads(reads):
            name, offset, _ = run[0]
            file = self.open(name)
            fill(file, file.path, offset, *(read.buffer for read in run))

    def _read_one(self, name: str, offset: int, buffer: memoryview) -> None:
        file = self.open(name)
        try:
            is_full = os.preadv(file.fd, (buffer,), offset) == buffer.nbytes
        except (OSError, OverflowError):
            is_full = False  # `fill` gets the same error, and converts it
        if not is_full:
            fill(file, file.path, offset, buffer)

    def open(self, name: str) -> OpenFile:
        """Return an open file; keep a reference to it while using its `fd`."""
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
                return file
        path = self._path(name)
        with convert_os_errors("cannot open", path):
            file = OpenFile(path)
        with self._lock:
            self._files[name] = file
            if len(self._files) > _get_max_open():
                self._files.popitem(last=False)
        return file

    def create(self, name: str, *, is_new: bool = False) -> LocalWriter:
        """Start a new file and create its parent folders; `is_new` fails at the end if the name is in use by then."""
        path = self._path(name, follow=False)
        with convert_os_errors("cannot create", path):
            if not os.path.isdir(self._root):
                make_folders(self._root)
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            parts = name.split("/")[:-1]
            folders = [os.path.join(self._root, *parts[:depth]) for depth in range(len(parts), -1, -1)]
            return LocalWriter(path, folders, self.close, is_new=is_new)

    def delete(self, name: str) -> None:
        """Remove a file, or a link but not its target, durably; a missing one is not an error."""
        path = self._path(name, follow=False)
        self.close()
        with convert_os_errors("cannot delete", path), suppress(FileNotFoundError):
            os.unlink(path)
            sync_folder(os.path.dirname(path))

    def delete_files(self, folder: str, names: Collection[str]) -> None:
        """Remove some files in a folder, and the folder if it is empty then; a power failure may bring them back."""
        path = self._path(folder)
        paths = [self._path(f"{folder}/{name}", follow=False) for name in sorted(names)]
        self.close()
        with convert_os_errors("cannot delete", path):
            for each in paths:
                _remove(each)
            try:
                os.rmdir(path)
            except OSError as error:
                if error.errno not in _NOT_EMPTY_OR_GONE:
                    raise

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all its content, without following links; a missing one is not an error."""
        path = self._path(folder)
        self.close()
        with convert_os_errors("cannot delete", path):
            for inner, folders, files in os.walk(path, topdown=False, onerror=_raise_unless_missing):
                for name in (*folders, *files):
                    _remove(os.path.join(inner, name))
            _remove(path)

    def changed_at(self, folder: str) -> float | None:
        """Return when a folder last changed, in seconds since the epoch; None if it does not exist."""
        path = self._path(folder)
        times = [_changed(path)]
        for inner, folders, files in os.walk(path):
            times += [_changed(os.path.join(inner, name)) for name in (*folders, *files)]
        return max((time for time in times if time is not None), default=None)

    def rename(self, source: str, target: str) -> None:
        """Rename a file or folder atomically; an existing file is replaced."""
        old, new = self._path(source, follow=False), self._path(target, follow=False)
        self.close()
        with convert_os_errors("cannot rename", old):
            os.rename(old, new)

    def _shown(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _path(self, name: str, *, follow: bool = True) -> str:
        """Return the path of `name` after checking that it is below the root."""
        check_name(name, self._root)
        path = self._shown(name)
        if self._is_free_of_links(name if follow else os.path.dirname(name)):
            return path
        with convert_os_errors("cannot follow its links", path):  # a link may be removed during the check
            real = os.path.realpath(path if follow else os.path.dirname(path))
            dead = os.readlink(path) if follow and not os.path.exists(real) and os.path.islink(path) else ""
        if not (_is_below(real, self._real) or _is_cached_blob(real, self._real)):
            raise UnsafeError(
                "this file is a link out of the checkpoint's folder",
                where=path,
                found=real,
                expected=f"a file below {self._real}",
                fix="Copy the file into the folder if you trust it.",
            )
        if dead:
            raise UnsafeError(
                "this link leads nowhere", where=path, found=dead, fix="Copy the file it stood for again."
            )
        return path

    def _is_free_of_links(self, name: str) -> bool:
        """Return True if no part of the path is a link and the root is unchanged, so that it is below the root."""
        # One system call for each part; `os.path.realpath` also needs one for each folder above the root.
        if self._root_id is None or _get_folder_id(self._root) != self._root_id:
            return False
        path = self._root
        try:
            for part in filter(None, name.split("/")):
                path = f"{path}/{part}"
                if stat.S_ISLNK(os.lstat(path).st_mode):
                    return False
        except OSError:
            return False
        return True


def _get_max_open() -> int:
    """Return how many files a store may keep open, at least 1."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _OPEN_FILES if limit == resource.RLIM_INFINITY else max(min(limit // _OPEN_SHARE, _OPEN_FILES), 1)


def _get_folder_id(path: str) -> tuple[int, int] | None:
    """Return a folder's device and inode; None if it does not exist."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def consecutive_reads(reads: Sequence[Read]) -> Iterator[list[Read]]:
    """Yield groups of consecutive reads in one file, each for one system call."""
    run: list[Read] = []
    end = 0
    for read in sorted((read for read in reads if read.buffer.nbytes), key=_place):
        if run and (len(run) == _RUN or read.offset != end or read.name != run[0].name):
            yield run
            run = []
        run.append(read)
        end = read.offset + read.buffer.nbytes
    if run:
        yield run


def _place(read: Read) -> tuple[str, int]:
    return read.name, read.offset


class HasDescriptor(Protocol):
    """A file whose descriptor stays open as long as the object exists."""

    fd: int


def fill(file: HasDescriptor, shown: str, offset: int, *buffers: memoryview) -> None:
    """Read a file range into consecutive buffers."""
    left: Sequence[memoryview] = buffers
    end = offset + sum([buffer.nbytes for buffer in buffers])
    try:
        while offset < end:
            count = os.preadv(file.fd, left, offset)
            offset += count
            if offset == end:
                return
            if count == 0:
                raise TruncatedError.from_size(shown, offset, end)
            left = _behind([buffer.cast("B") for buffer in left], count)
    except (OSError, OverflowError) as error:
        cause = error if isinstance(error, OSError) else OSError(errno.EINVAL, "the offset is out of range")
        raise storage_error(cause, "cannot read", shown) from error


def _behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the remaining views after the first `count` bytes are filled."""
    at = 0
    while count >= len(views[at]):
        count -= len(views[at])
        at += 1
    return [views[at][count:], *views[at + 1 :]]


class LocalWriter(ClosingWriter):
    """Writer of a file under a temporary name until `close` has synced and renamed it."""

    def __init__(
        self, path: str, folders: Sequence[str], appeared: Callable[[], None], *, is_new: bool = False
    ) -> None:
        self._path = path
        self._folders = folders
        self._is_new = is_new
        self._appeared = appeared
        self._partial, self._fd = make_partial_file(path)
        self._buffer: memoryview | None = None
        self._written = 0
        self._started = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data).cast("B")
        with convert_os_errors("cannot write", self._path):
            while view:
                count = os.write(self._fd, view)
                self._count(count)
                view = view[count:]

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file in `source`, through a cache-sized buffer."""
        buffer = self._copy_buffer(source, nbytes)
        while nbytes:
            part = buffer[: min(nbytes, len(buffer))]
            source.read([Read(name, offset, part)])
            self.write(part)
            offset, nbytes = offset + len(part), nbytes - len(part)

    def _count(self, nbytes: int) -> None:
        """Count written bytes and start their writeback early."""
        self._written += nbytes
        if self._written - self._started >= STEP_BYTES:
            start_writeback(self._fd, self._started, self._written - self._started)
            self._started = self._written

    def _copy_buffer(self, source: Store, nbytes: int) -> memoryview:
        size = min(nbytes, _BUFFER if source.capabilities.is_local else _REMOTE_BUFFER)
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        return self._buffer

    def close(self) -> None:
        """Sync the file and give it its final name."""
        if self._fd < 0:
            return
        self._buffer = None
        try:
            with convert_os_errors("cannot finish", self._path):
                self._sync()
                self._close_fd()
                if self._is_new:
                    self._link()
                else:
                    os.replace(self._partial, self._path)
                self._appeared()
                for folder in self._folders:
                    sync_folder(folder)
        except BaseException:
            self.abort()
            raise

    def _sync(self) -> None:
        os.fsync(self._fd)

    def _link(self) -> None:
        """Give the file its final name unless another file has it; a rename would replace that."""
        try:
            os.link(self._partial, self._path)
        except FileExistsError as error:
            raise TargetExistsError("another file has this name", where=self._path) from error
        os.unlink(self._partial)

    def abort(self) -> None:
        """Remove the written bytes; never raises."""
        self._buffer = None
        try:
            self._close_fd()
            os.unlink(self._partial)
        except OSError:
            pass  # the file or the disk is gone; the original error says more

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)


def make_folders(path: str) -> None:
    """Make a folder and its missing parents, durably even if they were there."""
    if os.path.isdir(path):
        sync_name(path)
        return
    parent = os.path.dirname(os.path.abspath(path))
    make_folders(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(parent)


def sync_name(path: str) -> None:
    """Sync an existing folder's name: the process that made it may have been killed before it did."""
    with suppress(PermissionError):  # this user may not read the folder above
        sync_folder(os.path.dirname(os.path.abspath(path)))


def sync_folder(path: str) -> None:
    """Sync a folder so that its names survive a power failure, if possible."""
    fd = open_folder(path)
    try:
        sync_open_folder(fd)
    finally:
        release(fd)


def open_folder(path: str) -> int:
    """Return a file descriptor for a folder. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def sync_open_folder(fd: int) -> None:
    """Sync an open folder like `sync_folder`. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems do not support fsync of folders.
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF}:
            raise


def _to_listed(prefix: str, entry: os.DirEntry[str]) -> Listed | None:
    """Return a folder's entry; None if it was removed since the folder was read."""
    try:
        is_folder = entry.is_dir()
        size = 0 if is_folder else entry.stat().st_size
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not entry.is_symlink():
            return None
        is_folder, size = False, 0  # the link's target does not exist
    return Listed(prefix + entry.name, size, is_folder)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _remove(path: str) -> None:
    """Remove a file, link or empty folder; another process may have done so."""
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        else:
            os.unlink(path)


def _changed(path: str) -> float | None:
    with convert_os_errors("cannot look at it", path), suppress(FileNotFoundError):
        return os.lstat(path).st_ctime
    return None


def _is_below(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip("/") + "/")


def _is_cached_blob(real: str, root: str) -> bool:
    """Return True if `root` is a Hugging Face snapshot, and `real` is in its blobs."""
    folder = root
    while os.path.basename(os.path.dirname(folder)) != "snapshots":
        folder, below = os.path.dirname(folder), folder
        if folder == below:
            return False
    blobs = os.path.join(os.path.dirname(os.path.dirname(folder)), "blobs")
    return not os.path.islink(blobs) and _is_below(real, blobs)
