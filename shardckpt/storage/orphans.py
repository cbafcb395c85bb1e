"""Find and remove temporary files of killed processes; locks show owners.

A temporary folder belongs to the process that holds a flock on it: the kernel releases the lock when the process
ends. Process ids are not used, since containers share them and systems reuse them. A forked child would share the lock
and keep it after its parent ends, so it closes inherited descriptors. On file systems without locks, orphans must be
removed by hand.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress

PARTIAL = "partial"
"""Unfinished content; worthless without its owner."""

OLD = "old"
"""Old content, moved aside; the only copy if its owner died before the new content was in place."""

_PARTIAL_NAME = re.compile(rf"\..+\.{PARTIAL}-[0-9a-f]{{12}}")

_ATTEMPTS = 2
"""Attempts of a removal, since some errors are temporary."""

_IDS = {PARTIAL: r"\w+", OLD: r"[0-9a-f]{8,}"}
"""Patterns of the ids in names of orphans. That of old content is strict, since users may own similar names."""


def sibling_path(target: str, kind: str) -> str:
    """Return a new path beside `target` for an orphan kind."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{kind}-{os.urandom(6).hex()}")


def is_partial(name: str) -> bool:
    """Return True if a file name is a temporary name of an unfinished file."""
    return _PARTIAL_NAME.fullmatch(name.rpartition("/")[2]) is not None


_held: set[int] = set()
"""Descriptors whose locks this process holds."""


def _give_up_inherited() -> None:
    """Close the descriptors inherited from the parent. Runs in forked children."""
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_give_up_inherited)


def make_partial(target: str) -> tuple[str, int]:
    """Create a temporary folder beside `target` and lock it.

    Returns:
        Path of the folder, and the descriptor that holds its lock; closing it releases the lock.

    Raises:
        OSError: The folder cannot be created.
    """
    while True:
        path, fd = sibling_path(target, PARTIAL), -1
        try:
            os.mkdir(path)
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                hold(fd)
                # Another process may have removed the folder before it was locked.
                if is_at(fd, path):
                    return path, fd
        except FileExistsError:
            raise  # the name belongs to another process
        except BaseException:  # a signal may come before the caller knows of the folder
            remove(path)
            if fd >= 0:
                release(fd)
            raise
        if fd >= 0:
            release(fd)


def hold(fd: int) -> None:
    """Lock an open file or folder until it is closed, if locks are supported."""
    _held.add(fd)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)


def close(fd: int) -> None:
    """Close a descriptor and release its lock. Raises OSError."""
    _held.discard(fd)
    os.close(fd)


def release(fd: int) -> None:
    """Close a descriptor that was not written to and release its lock; never raises."""
    with suppress(OSError):
        close(fd)


def take(path: str) -> int | None:
    """Lock an existing orphan and return the descriptor.

    Returns None if another process holds the lock or locking fails.
    """
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
    """Return the unlocked orphans of a kind beside `target`, oldest first."""
    return sorted((path for path in _list_siblings(target, kind) if _is_free(path)), key=_changed)


def _list_siblings(target: str, kind: str) -> list[str]:
    folder, name = os.path.split(target)
    pattern = re.compile(rf"\.{re.escape(name)}\.{kind}-{_IDS[kind]}")
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:
        return []


def list_owned(target: str, kind: str) -> list[str]:
    """Return the paths of a kind beside `target` that another process may own: they are locked, or have no locks."""
    return [path for path in _list_siblings(target, kind) if not _is_free(path)]


def _is_free(path: str) -> bool:
    fd = take(path)
    if fd is None:
        return False
    release(fd)
    return True


def _changed(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_ctime_ns
    except OSError:
        return 0


def sweep(target: str, kind: str) -> None:
    """Remove the unlocked orphans of a kind beside `target`; never raises."""
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
    """Remove a file, or a folder with its content; never raises OSError."""
    for _ in range(_ATTEMPTS):
        with suppress(OSError):  # rmtree raises errors of closing a folder
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        if not os.path.lexists(path):
            return
