"""Find and remove temporary files of killed processes; locks show owners.

A temporary folder belongs to the process that holds a flock on it; the kernel releases the lock when the process ends.
Process ids would not do: containers share them, and systems reuse them. A forked child would share the lock and keep it
after its parent ends, so it closes inherited descriptors. On file systems without locks, orphans must be removed by
hand.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache

PARTIAL = "partial"  # unfinished content; worthless without its owner
OLD = "old"  # old content, moved aside; the only copy if its owner died before the new content was in place

# Minimum age, in seconds, before a save removes files of another save, which may be running elsewhere.
DEAD_S = 24 * 3600.0

_MOUNT_CHARACTERS = _RANDOM_CHARACTERS = 6

# Pattern for ids in names of orphans; users may own similar names.
_ID = f"[0-9a-f]{{{_MOUNT_CHARACTERS + _RANDOM_CHARACTERS}}}"

_PARTIAL_NAME = re.compile(rf"\..+\.{PARTIAL}-{_ID}")

_ATTEMPTS = 2  # to remove an orphan, since some errors are temporary

# Names to try for a temporary file or folder; other users who may read the folder can lock each before its maker.
_NAMES = 16

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def sibling_path(target: str, kind: str) -> str:
    """Return a new path next to `target` for a kind of orphan."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{kind}-{_find_mount(folder)}{os.urandom(_RANDOM_CHARACTERS // 2).hex()}")


def _find_mount(folder: str) -> str:
    """Return an id for this machine and a folder's mount: processes with the same id see each other's locks."""
    # Network file systems lock folders on one machine alone. What another mount made is removed only after `DEAD_S`.
    seen = f"{os.stat(folder or os.curdir).st_dev} {read_boot_id()}"
    return f"{zlib.crc32(seen.encode()):08x}"[:_MOUNT_CHARACTERS]


@cache
def read_boot_id() -> str:
    """Return an id that this machine has until it restarts; its name where the system has none."""
    with suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()
    return os.uname().nodename


# Environment variable with the node's name: processes with different names on one machine do not share captures.
NODE = "SHARDCKPT_NODE"


def find_machine_id() -> str:
    """Return this machine's id, which its containers share."""
    return f"{read_boot_id()} {os.environ.get(NODE, '')}"


def is_partial(name: str) -> bool:
    """Return True if a name is temporary, for an unfinished file."""
    return _PARTIAL_NAME.fullmatch(name.rpartition("/")[2]) is not None


_held: set[int] = set()  # descriptors whose locks this process holds


def _give_up_inherited() -> None:
    """Close the descriptors inherited from the parent. Runs in forked children."""
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_give_up_inherited)


def make_partial(target: str) -> tuple[str, int]:
    """Create a temporary folder next to `target`; return its path and the descriptor that holds its lock."""
    return _make(target, _make_folder)


def make_partial_file(target: str) -> tuple[str, int]:
    """Create a temporary file next to `target`; return its path and the descriptor that holds its lock."""
    return _make(target, _make_file)


def _make(target: str, make: Callable[[str], int]) -> tuple[str, int]:
    """Create and lock a file or folder; try another if a process locks or removes it first."""
    for left in reversed(range(_NAMES)):  # the last is used even if another process locks it: so far nobody removes it
        path, fd = sibling_path(target, PARTIAL), -1
        try:
            fd = make(path)
            if fd >= 0 and (hold(fd) or not left) and is_at(fd, path):
                return path, fd
        except FileExistsError:
            raise  # the name belongs to another process
        except BaseException:  # a signal may come before the caller knows the file
            remove(path)
            release(fd)
            raise
        remove(path)
        release(fd)
    raise OSError(errno.ESTALE, "another process removes each new file", path)


def _make_folder(path: str) -> int:
    """Create a folder; return its descriptor, or -1 if another process removed it."""
    os.mkdir(path)
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return -1


def _make_file(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def hold(fd: int) -> bool:
    """Lock an open file or folder until it is closed, if possible; return False if another process holds the lock."""
    _held.add(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    return True


def close(fd: int) -> None:
    """Close a descriptor and release its lock. Raises OSError."""
    _held.discard(fd)
    with suppress(InterruptedError):  # the descriptor is closed in any case
        os.close(fd)


def release(fd: int) -> None:
    """Close a descriptor that was not written to and release its lock; never raises."""
    with suppress(OSError):
        close(fd)


def take(path: str) -> int | None:
    """Lock an existing orphan and return the descriptor; None if another process holds the lock, or locking fails."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    _held.add(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        release(fd)
        return None
    return fd


def is_at(fd: int, path: str) -> bool:
    """Return True if `path` still names this open file or folder."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def find_orphans(target: str, kind: str) -> list[str]:
    """Return orphans next to `target` that no process owns, oldest first."""
    return sorted((path for path in _list_siblings(target, kind) if _is_free(path, target, kind)), key=_changed)


def find_moved_aside(path: str) -> str:
    """Return a missing folder's old content; empty without any. A process may have been killed between two renames."""
    if os.path.lexists(path):
        return ""
    return max(filter(is_folder, _list_siblings(os.path.abspath(path), OLD)), key=_changed, default="")


def is_folder(path: str) -> bool:
    """Return True if a path is a folder and not a link: only folders are moved aside."""
    return os.path.isdir(path) and not os.path.islink(path)


def _list_siblings(target: str, kind: str) -> list[str]:
    folder, name = os.path.split(target)
    pattern = re.compile(rf"\.{re.escape(name)}\.{kind}-{_ID}")
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:
        return []


def list_owned(target: str, kind: str) -> list[str]:
    """Return paths next to `target` that another process may own."""
    return [path for path in _list_siblings(target, kind) if not _is_free(path, target, kind)]


def _is_free(path: str, target: str, kind: str) -> bool:
    """Return True if an orphan is not locked, and no process on another machine can still be writing it."""
    fd = take(path)
    if fd is None:
        return False
    release(fd)
    with suppress(OSError):  # a folder that takes no file has no clock
        return kind == OLD or _is_made_here(path) or _is_dead(path, target)
    return False


def _is_made_here(path: str) -> bool:
    return path[:-_RANDOM_CHARACTERS].endswith(f"-{_find_mount(os.path.dirname(path))}")


def _is_dead(path: str, target: str) -> bool:
    """Return True if nothing has changed in a folder for `DEAD_S`, by this machine's and the file system's clock."""
    inside = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    changed = max(map(_changed, (path, *inside))) / 1e9
    return time.time() - changed > DEAD_S and _read_clock(target) - changed > DEAD_S


def _read_clock(target: str) -> float:
    """Return a file system's time by writing an empty file next to `target`. Raises OSError."""
    path, fd = make_partial_file(target)
    try:
        return os.fstat(fd).st_ctime
    finally:
        remove(path)
        release(fd)


def _changed(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_ctime_ns
    except OSError:
        return 0


def sweep(target: str, kind: str) -> None:
    """Remove unlocked orphans next to `target`; never raises."""
    for path in find_orphans(target, kind):
        remove_orphan(path)


def remove_orphan(path: str) -> bool:
    """Remove an orphan unless it is locked; return True if it no longer exists."""
    fd = take(path)
    if fd is None:
        return False
    try:
        remove(path)
    finally:
        release(fd)
    return not os.path.lexists(path)


def remove(path: str) -> None:
    """Remove a file, or a folder with all its content; never raises OSError."""
    for _ in range(_ATTEMPTS):
        with suppress(OSError):  # rmtree raises errors of closing a folder
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        if not os.path.lexists(path):
            return
