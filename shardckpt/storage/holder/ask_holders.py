"""Ask this user's holders on this node whether they are there."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from shardckpt.errors import ShardckptError
from shardckpt.storage.holder.holder_connection import TIMEOUT_S
from shardckpt.storage.holder.holder_messages import receive, send
from shardckpt.storage.holder.holder_sockets import (
    connect_socket,
    list_runs,
    open_socket_folder,
    require_sockets,
    socket_folder,
)


class AskedHolder(NamedTuple):
    """A holder, and its answer."""

    run: str  # id
    connection: socket.socket | None  # None if too many others wait
    answer: dict[str, Any] | None  # None without one


def ask_holders(run: str | None = None, limit_s: float | None = None) -> Iterator[AskedHolder]:
    """Yield the holders that listen, with their answers; together they have `TIMEOUT_S` seconds."""
    require_sockets()
    asked: list[tuple[str, socket.socket | None]] = []
    with ExitStack() as stack:  # keeps the connections open until all have been yielded
        folder_fd = stack.enter_context(open_socket_folder(socket_folder(), is_made=False))
        for each in [] if folder_fd is None else list_runs(folder_fd):
            if run in (None, each):
                with suppress(OSError, ShardckptError):
                    connection = _connect(folder_fd or 0, each)
                    if connection is not None:
                        stack.enter_context(connection)
                        send(connection, {"op": "hello"})
                    asked.append((each, connection))
        deadline = time.monotonic() + (TIMEOUT_S if limit_s is None else limit_s)
        for each, connection in asked:
            try:
                answer = None if connection is None else _receive_until(connection, deadline)
            except (OSError, ShardckptError):  # it has ended meanwhile
                continue
            yield AskedHolder(each, connection, answer)


def _connect(folder_fd: int, run: str) -> socket.socket | None:
    """Return a connection to a run's holder; None if too many others wait. Raises OSError or UnsafeError."""
    try:
        return connect_socket(folder_fd, run, TIMEOUT_S)
    except TimeoutError:
        return None


def _receive_until(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """Return the answer that arrives before a deadline; None without one."""
    connection.settimeout(max(deadline - time.monotonic(), 0.01))
    try:
        return receive(connection)[0]
    except TimeoutError:
        return None
    finally:
        connection.settimeout(TIMEOUT_S)
