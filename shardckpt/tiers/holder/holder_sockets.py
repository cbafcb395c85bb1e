"""Sockets of holders: one for each run, in a folder that only this user can use."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from shardckpt.errors import StorageError, UnsafeError, UsageError
from shardckpt.storage.store import convert_os_errors

# Environment variable with the node's name: processes with different names on one machine do not share holders.
NODE = "SHARDCKPT_NODE"

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_BOOT_CHARACTERS = 8
_NAMES = 64  # folder names to try if other users have folders with these names
_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RUN_NAME = re.compile(r"[0-9a-z]{1,32}")
_SUFFIX = ".sock"


def require_run(run: str) -> str:
    """Return a run's id. Raises UnsafeError unless it has 1 to 32 lowercase letters and digits."""
    if not _RUN_NAME.fullmatch(run):
        raise UnsafeError("a run's id must have 1 to 32 lowercase letters and digits", found=run)
    return run


def socket_folder() -> str:
    """Return the folder for this user's sockets on this node; it may not exist yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        base = os.path.join(runtime, "shardckpt")
    else:  # machines may share this folder: without an id, each would remove another's sockets as dead
        base = os.path.join(_find_temporary(), f"shardckpt-{os.geteuid()}-{_read_boot_id(_BOOT_ID)[:_BOOT_CHARACTERS]}")
    node = os.environ.get(NODE, "")
    if node and (not _NODE_NAME.fullmatch(node) or set(node) == {"."}):
        raise UsageError(f"{NODE} must have letters, digits, '.', '_' and '-' only", found=node)
    first = f"{base}-{node}" if node else base
    missing = ""
    for name in (first, *(f"{first}+{number}" for number in range(1, _NAMES))):
        owner = _find_owner(name)
        if owner == os.geteuid():
            return name
        if owner is None:
            missing = missing or name
    return missing or first


def _find_owner(path: str) -> int | None:
    """Return the id of the user who owns a file, folder or link; None if it does not exist."""
    try:
        return os.stat(path, follow_symlinks=False).st_uid
    except OSError:
        return None


def _find_temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:  # a container may have no writable folder
        fix = "Set TMPDIR to a folder of this machine."
        raise StorageError("no folder can be used for the sockets of holders", found=error, fix=fix) from error


@cache
def _read_boot_id(path: str) -> str:
    """Return an id that this machine has until it restarts; empty if unknown."""
    with suppress(OSError), open(path, encoding="ascii") as file:
        return file.read().strip()
    return ""


@contextmanager
def open_socket_folder(folder: str, *, is_made: bool) -> Iterator[int | None]:
    """Open the socket folder after checking that nobody else can use it; yield its descriptor, None if missing."""
    with convert_os_errors("cannot open the folder of sockets", folder):
        if is_made:
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1
    if fd < 0:
        yield None
        return
    try:
        _require_own(os.fstat(fd), folder)
        yield fd
    finally:
        os.close(fd)


def _require_own(status: os.stat_result, folder: str) -> None:
    is_own = status.st_uid == os.geteuid()
    if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
        raise UnsafeError(
            "the folder of sockets must belong to this user, who alone may use it",
            where=folder,
            found=f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}",
            expected=f"owner {os.geteuid()}, mode 700",
            fix=f"{'Remove it, or set' if is_own else 'Set'} XDG_RUNTIME_DIR to a folder of your own.",
        )


def list_runs(folder_fd: int) -> list[str]:
    """Return the ids of runs with a socket in the folder, in alphabetical order."""
    names = [name.removesuffix(_SUFFIX) for name in os.listdir(folder_fd) if name.endswith(_SUFFIX)]
    return sorted(name for name in names if _RUN_NAME.fullmatch(name))


def socket_name(run: str) -> str:
    """Return the file name for a run's socket."""
    return f"{require_run(run)}{_SUFFIX}"


def identify_socket(folder_fd: int, run: str) -> tuple[int, ...] | None:
    """Return numbers that identify a run's socket among later ones; None without a socket."""
    try:
        status = os.stat(socket_name(run), dir_fd=folder_fd, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns


def bind_socket(folder_fd: int, run: str) -> socket.socket:
    """Return a bound socket for a run. Raises OSError."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:  # through the folder's descriptor, since addresses have at most 107 bytes
        bound.bind(f"/proc/self/fd/{folder_fd}/{socket_name(run)}")
    except BaseException:
        bound.close()
        raise
    return bound


def connect_socket(folder_fd: int, run: str, timeout_s: float) -> socket.socket:
    """Return a connection to a run's holder after checking that this user runs it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        try:
            connection.connect(f"/proc/self/fd/{folder_fd}/{socket_name(run)}")
        except BlockingIOError as error:
            raise TimeoutError("it accepts no connections, and too many wait") from error
        require_own_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def require_own_peer(connection: socket.socket) -> None:
    """Raise UnsafeError if the process at the other end belongs to another user."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise UnsafeError("the other process belongs to another user", found=f"user {uid}", expected=os.geteuid())


def require_sockets() -> None:
    """Raise StorageError unless the system has shared memory without names and packets between processes."""
    if not (hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED") and os.path.isdir("/proc/self/fd")):
        raise StorageError("captures in shared memory need Linux", fix="Leave `PeerMemory` out of `tiers`.")
