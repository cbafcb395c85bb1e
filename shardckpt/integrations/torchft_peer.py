"""Connections for the torchft transport, whose operations end before a deadline."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any

__all__ = ["Peer", "connect", "time_left"]

_MAX_LINE = 512


def time_left(deadline: float) -> float:
    """Return the seconds until a deadline on the monotonic clock. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the host's first address that answers."""
    last: OSError | None = None
    for family, kind, protocol, _, address in _resolve(host, port, deadline):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(time_left(deadline))
            connection.connect(address)
        except OSError as error:
            connection.close()
            last = error
        else:
            return connection
    raise last or OSError(f"{host} has no address")


def _resolve(host: str, port: int, deadline: float) -> list[Any]:
    """Return a host's addresses; the resolver, which has no time limit, stays in a thread."""
    found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.put(error)

    threading.Thread(target=resolve, name="shardckpt-resolve", daemon=True).start()
    try:
        result = found.get(timeout=time_left(deadline))
    except queue.Empty:
        raise TimeoutError(f"the name {host} was not resolved in time") from None
    if isinstance(result, OSError):
        raise result
    return result


class Peer:
    """Connection to a peer; its operations together end before a deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline

    def check(self) -> None:
        """Raise TimeoutError if the deadline has passed."""
        time_left(self._deadline)

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes. Raises OSError."""
        self._connection.settimeout(time_left(self._deadline))
        self._connection.sendall(data)

    def read(self, buffer: memoryview) -> None:
        """Fill a buffer. Raises OSError."""
        while len(buffer):
            self._connection.settimeout(time_left(self._deadline))
            count = self._connection.recv_into(buffer)
            if not count:
                raise ConnectionError(f"it ended the connection {len(buffer)} bytes early")
            buffer = buffer[count:]

    def read_line(self) -> bytes:
        """Return a line with its end; if it is too long or does not end, the bytes so far. Raises OSError."""
        line, byte = bytearray(), memoryview(bytearray(1))
        while not line.endswith(b"\n") and len(line) < _MAX_LINE:
            self._connection.settimeout(time_left(self._deadline))
            if not self._connection.recv_into(byte):
                break
            line += byte
        return bytes(line)
