"""Files beside a target: who owns them, and how those of killed processes are found and removed.

A partial belongs to whoever holds a flock on it: the kernel drops the lock with the process, and process ids, which
containers share and systems reuse, play no part. A child that is forked meanwhile would share the lock and keep it when
its parent is gone, so it closes what it has inherited. Where a file system knows no locks, orphans stay until removed
by hand.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import suppress

PARTIAL = "partial"
"""Being written; worthless without its owner."""

OLD = "old"
"""The former content, moved aside; the only copy if its owner died before the new one was in place."""

_ATTEMPTS = 2
"""Times that a removal is tried: what fails once may pass."""

_IDS = {PARTIAL: r"\w+", OLD: r"[0-9a-f]{8,}"}
"""What is taken for ours: of old content, which may be precious, only what nobody would name by hand."""


def sibling_path(target: str, kind: str) -> str:
    """Return a new path beside `target` for a file of this kind."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{kind}-{os.urandom(6).hex()}")


def is_partial(name: str) -> bool:
    """Return whether a file name is one that something has while it is being written."""
    return re.fullmatch(rf"\..+\.{PARTIAL}-[0-9a-f]{{12}}", name.rpartition("/")[2]) is not None


_held: set[int] = set()
"""Descriptors through which this process owns something."""


def _give_up_inherited() -> None:
    """Close what the parent owns. In a forked child."""
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_give_up_inherited)


def make_partial(target: str) -> tuple[str, int]:
    """Make a folder beside `target` and own it.

    Returns:
        Its path, and the descriptor whose lock makes it ours; closing it gives it up.

    Raises:
        OSError: It cannot be made.
    """
    while True:
        path, fd = sibling_path(target, PARTIAL), -1
        try:
            os.mkdir(path)
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                hold(fd)
                # Another run's sweep may have come between making the folder and holding it.
                if is_at(fd, path):
                    return path, fd
        except FileExistsError:
            raise  # somebody else's
        except BaseException:  # a signal may come before anybody knows of the folder
            remove(path)
            if fd >= 0:
                release(fd)
            raise
        if fd >= 0:
            release(fd)


def hold(fd: int) -> None:
    """Own an open file or folder until it is closed; does nothing on a file system without locks."""
    _held.add(fd)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)


def close(fd: int) -> None:
    """Close a descriptor and give up what is owned through it. Raises OSError."""
    _held.discard(fd)
    os.close(fd)


def release(fd: int) -> None:
    """Close a descriptor through which nothing was written; never raises, since nothing can be lost by it."""
    with suppress(OSError):
        close(fd)


def take(path: str) -> int | None:
    """Own an existing orphan; return the descriptor that does, None where somebody else owns it or nobody can."""
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
    """Return True if an open file or folder is the one at `path` now."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def find_orphans(target: str, kind: str) -> list[str]:
    """Return orphans of this kind beside `target` that no process owns, oldest first."""
    folder, name = os.path.split(target)
    pattern = re.compile(rf"\.{re.escape(name)}\.{kind}-{_IDS[kind]}")
    try:
        with os.scandir(folder) as entries:
            paths = [entry.path for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:
        return []
    return sorted((path for path in paths if _is_free(path)), key=_changed)


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
    """Remove orphans of this kind beside `target` that no process owns; never raises for those that resist."""
    for path in find_orphans(target, kind):
        remove_orphan(path)


def remove_orphan(path: str) -> bool:
    """Remove an orphan, unless a process owns it; return True if it is gone."""
    fd = take(path)
    if fd is None:
        return False
    try:
        remove(path)
    finally:
        release(fd)
    return not os.path.lexists(path)


def remove(path: str) -> None:
    """Remove a file or a folder with all it holds, as far as that goes; never raises OSError."""
    for _ in range(_ATTEMPTS):
        with suppress(OSError):  # rmtree lets errors of closing a folder through
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
        if not os.path.lexists(path):
            return
