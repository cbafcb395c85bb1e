"""Leases of folders: each process that uses one holds a shared lock, which the kernel releases at its end."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from shardckpt.errors import StorageError
from shardckpt.storage.orphans import is_at
from shardckpt.storage.store import convert_os_errors
from shardckpt.tiers.memory.run_folders import make_run_folder

__all__ = ["IDLE_S", "LEASE", "Lease", "hold_lease", "lock_unused", "open_lease", "read_lease", "write_lease"]

LEASE = ".shardckpt-lease"  # name of the file in the run's folder
IDLE_S = 3600.0  # default seconds without a process after which captures are removed

_BYTES = 128  # of a lease: all have one size, so that each write replaces the last one
_LOCK_S = 2.0  # maximum seconds to wait for a process that looks at the lease, or removes the folder
_LOOK_S = 0.01


class Lease(NamedTuple):
    """When a process used a folder last, and how long it stays after that."""

    # `time.monotonic` is the same for all processes of a machine, and no clock that somebody sets.
    used_at: float
    idle_s: float = IDLE_S
    max_bytes: int = 0

    def encode(self) -> bytes:
        """Return the lease as bytes."""
        return json.dumps(self).encode("ascii").ljust(_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> Lease:
        """Return a lease from what `encode` returned; a damaged one starts now."""
        try:
            used_at, idle_s, max_bytes = json.loads(data)
            return cls(float(used_at), float(idle_s), int(max_bytes))
        except (ValueError, TypeError, OverflowError, RecursionError):
            return cls(time.monotonic())


def open_lease(folder: str) -> int:
    """Return the descriptor of a folder's lease, and make the lease if it is missing. Raises OSError."""
    return os.open(os.path.join(folder, LEASE), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def read_lease(fd: int) -> Lease:
    """Return an open lease. Raises OSError."""
    return Lease.decode(os.pread(fd, _BYTES, 0))


def write_lease(fd: int, lease: Lease) -> None:
    """Replace an open lease, if there is space."""
    # The lock alone keeps the folder. Captures in a full file system can still be read, and removed.
    with suppress(OSError):
        os.pwrite(fd, lease.encode(), 0)


def lock_unused(fd: int) -> bool:
    """Lock a lease until it is closed; return False if a process uses the folder."""
    return _lock(fd, fcntl.LOCK_EX)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


HELD: dict[str, int] = {}  # descriptors of the leases that this process holds, by folder


def _give_up_inherited() -> None:
    """Close the parent's leases, which would stay locked after its end. Runs in forked children."""
    for fd in HELD.values():
        with suppress(OSError):
            os.close(fd)
    HELD.clear()


os.register_at_fork(after_in_child=_give_up_inherited)


def hold_lease(folder: str, idle_s: float, max_bytes: int, on_unused: Callable[[str], object]) -> None:
    """Make a run's folder unless it is there, and keep it as long as this process lives. Raises StorageError."""
    # `on_unused` is called if no other process uses the folder, and none can begin to until it returns.
    path = os.path.join(folder, LEASE)
    with convert_os_errors("cannot hold the lease of captures", path):
        fd = HELD.get(folder, -1)
        if fd < 0 or not is_at(fd, path):
            if HELD.pop(folder, -1) >= 0:
                os.close(fd)
            fd = HELD[folder] = _take(folder, on_unused)
        write_lease(fd, Lease(time.monotonic(), idle_s, max_bytes))


def _take(folder: str, on_unused: Callable[[str], object]) -> int:
    """Return the descriptor of a lease that this process shares from now on."""
    deadline = time.monotonic() + _LOCK_S
    while time.monotonic() < deadline:
        make_run_folder(folder)
        with suppress(FileNotFoundError):  # somebody has just removed the folder
            fd = open_lease(folder)
            try:
                if lock_unused(fd) and is_at(fd, os.path.join(folder, LEASE)):
                    on_unused(folder)
                if _lock(fd, fcntl.LOCK_SH) and is_at(fd, os.path.join(folder, LEASE)):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        time.sleep(_LOOK_S)
    raise StorageError(
        "another process locks the lease of captures", where=folder, fix="End it: `fuser` shows which one it is."
    )
