"""End the process at the other end of a socket that does not answer, and no other process with its number."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from contextlib import suppress

from shardckpt.errors import StorageError

TERM_S = 2.0  # seconds from SIGTERM to SIGKILL
KILL_S = 5.0  # seconds after SIGKILL in which a process must be gone


def read_peer_pid(connection: socket.socket) -> int:
    """Return the other end's process id, which the kernel knows without asking it; 0 if it is not visible here."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def end_peer(connection: socket.socket, run: str) -> None:
    """End the process at the other end: SIGTERM, which a stopped process gets too, then SIGKILL."""
    pid = read_peer_pid(connection)
    fix = f"End process {pid} yourself." if pid > 0 else "End it on the host, or in the container that started it."
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (OSError, AttributeError) as error:  # in another namespace, or the kernel is older than 5.3
        raise StorageError("the holder does not answer, and is not ended", where=run, found=error, fix=fix) from error
    try:
        if _is_closed(connection):  # the process has ended, and another one may have its number
            return
        for number, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
                signal.pidfd_send_signal(process, signal.SIGCONT)
            if _wait_for(process, seconds):
                return
    except OSError as error:
        raise StorageError("the holder does not answer, and is not ended", where=run, found=error, fix=fix) from error
    finally:
        os.close(process)
    raise StorageError("the holder was killed and has not ended", where=run, found=f"process {pid}")


def _is_closed(connection: socket.socket) -> bool:
    """Return True if the process at the other end has ended."""
    poll = select.poll()
    poll.register(connection, 0)
    return any(found & (select.POLLHUP | select.POLLERR) for _, found in poll.poll(0))


def _wait_for(process: int, seconds: float) -> bool:
    """Return True once a process has ended; False if it takes longer."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
