"""Folders for captures in memory: `/dev/shm/shardckpt-UID/RUN`, or the same on another mount."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import zlib
from contextlib import suppress

from shardckpt.errors import StorageError, UnsafeError, UsageError
from shardckpt.storage.orphans import NODE, read_boot_id
from shardckpt.storage.store import convert_os_errors

__all__ = [
    "find_base",
    "find_first_mount",
    "find_run_folder",
    "find_temporary",
    "list_run_folders",
    "make_run_folder",
    "remove_left",
    "remove_run_folder",
    "require_run",
]

SHARED_MEMORY = "/dev/shm"  # noqa: S108  (each user has a folder of their own)

_BOOT_CHARACTERS = 8
_NAMES = 64  # names to try if other users have taken some
_LINK = "at-"  # start of a link in the first mount's folder to a folder on another mount
_REMOVED = ".removed-"
_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RUN_NAME = re.compile(r"[0-9a-z]{1,32}")


def require_run(run: str) -> str:
    """Return a run's id. Raises UnsafeError unless it has 1 to 32 lowercase letters and digits."""
    if not _RUN_NAME.fullmatch(run):
        raise UnsafeError("a run's id must have 1 to 32 lowercase letters and digits", found=run)
    return run


def find_first_mount() -> str:
    """Return the mount that is tried first: `/dev/shm`, or the temporary folder if this user cannot write there."""
    is_there = os.path.isdir(SHARED_MEMORY) and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return SHARED_MEMORY if is_there else find_temporary()


def find_temporary() -> str:
    """Return the folder for temporary files."""
    try:
        return tempfile.gettempdir()
    except OSError as error:  # a container may have no writable folder
        fix = "Set TMPDIR to a folder of this machine."
        raise StorageError("no folder can be used for captures in memory", found=error, fix=fix) from error


def find_base(mount: str) -> str:
    """Return this user's folder on a mount; it may not exist yet. Names that another user has taken are passed over."""
    first = os.path.join(mount, f"shardckpt-{os.geteuid()}")
    if mount != SHARED_MEMORY:  # machines may share it, and it may survive a restart
        first += f"-{read_boot_id()[:_BOOT_CHARACTERS]}"
    node = os.environ.get(NODE, "")
    if node and (not _NODE_NAME.fullmatch(node) or set(node) == {"."}):
        raise UsageError(f"{NODE} must have letters, digits, '.', '_' and '-' only", found=node)
    first += f"-{node}" if node else ""
    missing = ""
    for name in (first, *(f"{first}+{number}" for number in range(1, _NAMES))):
        if _is_own(name):
            return name
        if not missing and not os.path.lexists(name):
            missing = name
    return missing or first


def _is_own(path: str) -> bool:
    """Return True for a folder that this user owns and nobody else may use."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not stat.S_IMODE(status.st_mode) & 0o077


def make_run_folder(folder: str) -> None:
    """Make a run's folder, which this user alone may use, and let every process of this user find it."""
    base, first = os.path.dirname(folder), find_base(find_first_mount())
    for each in dict.fromkeys((first, base, folder)):
        _make_own(each)
    if base != first:
        with convert_os_errors("cannot make a link to the folder for captures", base), suppress(FileExistsError):
            os.symlink(base, os.path.join(first, f"{_LINK}{zlib.crc32(os.fsencode(base)):08x}"))


def _make_own(path: str) -> None:
    with convert_os_errors("cannot make the folder for captures", path, is_target=True), suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if not _is_own(path):
        raise UnsafeError(
            "the folder for captures must belong to this user, who alone may use it",
            where=path,
            expected=f"owner {os.geteuid()}, mode 700",
            fix="Remove it, or pass `path=` with a folder of your own to PeerMemory.",
        )


def find_run_folder(run: str, mount: str = "") -> str | None:
    """Return a run's folder on a mount, or on any mount that is known; None if it does not exist."""
    require_run(run)
    bases = [find_base(mount)] if mount else _list_bases()
    folders = (os.path.join(base, run) for base in bases if _is_own(base))
    return next((folder for folder in folders if os.path.isdir(folder)), None)


def list_run_folders(base: str = "") -> dict[str, str]:
    """Return the folders of this user's runs by run id; `base` is the folder on the first mount, if known."""
    found: dict[str, str] = {}
    for each in _list_bases(base):
        for name in sorted(_list_names(each)):
            folder = os.path.join(each, name)
            if _RUN_NAME.fullmatch(name) and os.path.isdir(folder) and not os.path.islink(folder):
                found.setdefault(name, folder)
    return found


def _list_bases(first: str = "") -> list[str]:
    """Return this user's folders on all mounts, the first mount's first."""
    first = first or find_base(find_first_mount())
    links = [os.path.join(first, name) for name in _list_names(first) if name.startswith(_LINK)]
    linked = [os.readlink(link) for link in links if os.path.islink(link)]
    return [first, *(base for base in linked if _is_own(base))]


def _list_names(base: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(base) if _is_own(base) else []
    return []


def remove_run_folder(folder: str) -> None:
    """Remove a run's folder at once: a process that needs it makes another. Raises StorageError."""
    base, run = os.path.split(folder)
    removed = os.path.join(base, f"{_REMOVED}{run}-{os.urandom(4).hex()}")
    with convert_os_errors("cannot remove captures", folder), suppress(FileNotFoundError):
        os.rename(folder, removed)
        shutil.rmtree(removed, ignore_errors=True)


def remove_left(base: str) -> None:
    """Remove what a process was removing when it was killed."""
    for each in _list_bases(base):
        for name in _list_names(each):
            if name.startswith(_REMOVED):
                shutil.rmtree(os.path.join(each, name), ignore_errors=True)
