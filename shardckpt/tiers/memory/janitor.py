"""The janitor: a process that removes a run's captures once no process has used them for the idle time.

It has no socket, and nothing depends on it: if it is killed, captures stay until the next capture starts another.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardckpt.storage.orphans import is_at
from shardckpt.tiers.memory.lease import LEASE, lock_unused, open_lease, read_lease, write_lease
from shardckpt.tiers.memory.run_folders import list_run_folders, remove_left, remove_run_folder

__all__ = ["keep_janitor", "look_at", "main", "watch"]

SUPERSEDED_S = 300.0  # seconds without a process after which the start of another run removes captures

_LOG = logging.getLogger("shardckpt")

_LOCK = ".janitor"  # file that a running janitor locks
LOOKS = 240  # in the shortest idle time
_LEAST_S, _MOST_S = 0.05, 60.0  # between two looks
_START_S = 60.0

# Environment variables that the janitor gets: without them, the interpreter may not find its own library.
_KEPT = ("LD_LIBRARY_PATH",)
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(sys.argv[2])"


def keep_janitor(base: str) -> None:
    """Start this user's janitor unless it runs. If it cannot be started, captures stay until somebody removes them."""
    try:
        lock = _open_lock(base)
        try:
            if not lock_unused(lock):
                return
        finally:
            os.close(lock)
        root = str(Path(__file__).resolve().parents[3])
        command = [sys.executable, "-I", "-S", "-c", _CODE.format(__name__), root, base]
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        subprocess.run(  # noqa: S603  (this interpreter)
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S, env=env, cwd="/", check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.warning("no process removes the captures in %s after their idle time: %s", base, error)


def _open_lock(base: str) -> int:
    return os.open(os.path.join(base, _LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def main(base: str) -> None:
    """Watch the folders in a process of its own session, which keeps nothing from the one that started it."""
    if os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(base)


class _Unused(NamedTuple):
    """Captures that no process uses."""

    used_at: float  # in the lease: another process may have come and gone since the last look
    since: float  # when this janitor saw them first; an earlier one may have been killed


def watch(base: str) -> None:
    """Look at all runs' folders until none is left, unless another janitor does."""
    lock, seen = _open_lock(base), dict[str, _Unused | None]()
    try:
        if lock_unused(lock):
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)  # for people who look for the process
        while lock_unused(lock) and is_at(lock, os.path.join(base, _LOCK)):
            folders = [*list_run_folders(base).values()]
            if not folders:
                return
            remove_left(base)
            most_s = SUPERSEDED_S if seen and not seen.keys() >= {*folders} else float("inf")
            idle_s = min(look_at(folder, seen, most_s) for folder in folders)
            time.sleep(min(max(idle_s / LOOKS, _LEAST_S), _MOST_S))
    finally:
        os.close(lock)


def look_at(folder: str, seen: dict[str, _Unused | None], most_s: float = float("inf")) -> float:
    """Remove a run's folder if it is idle; return its idle time in seconds."""
    with suppress(OSError):  # somebody has removed it
        fd = open_lease(folder)
        try:
            is_used = not lock_unused(fd)  # before the time: a process may just have released it
            now, lease, before = time.monotonic(), read_lease(fd), seen.get(folder)
            seen[folder] = None
            if is_used:
                write_lease(fd, lease._replace(used_at=now))
            elif before is None or before.used_at != lease.used_at:
                write_lease(fd, lease)  # it may have been missing or damaged
                seen[folder] = _Unused(lease.used_at, now)
            elif now - before.since < min(lease.idle_s, most_s):
                seen[folder] = before
            elif is_at(fd, os.path.join(folder, LEASE)):
                remove_run_folder(folder)  # with the lease locked: a process that comes now makes another folder
            return lease.idle_s
        finally:
            os.close(fd)
    return SUPERSEDED_S
