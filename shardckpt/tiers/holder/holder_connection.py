"""This process's connection to a run's holder, opened at the first request and shared by all threads."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from shardckpt.errors import ShardckptError, StorageError
from shardckpt.tiers.holder.holder_messages import VERSION, decode_error, receive, send
from shardckpt.tiers.holder.holder_sockets import (
    connect_socket,
    identify_socket,
    open_socket_folder,
    require_sockets,
    socket_folder,
)

TIMEOUT_S = 10.0  # maximum seconds to wait for one answer; the holder answers each request at once
STALL_S = 2.0  # maximum seconds that a training waits for a holder; after that it skips the capture

# After a holder did not answer, requests fail at once for so many seconds: many requests then wait only once.
_PAUSE_S = 10.0


class HolderGoneError(StorageError):
    """No holder of this run answers."""


class HolderBusyError(StorageError):
    """The holder did not answer within `STALL_S` seconds; a check in the background finds out if it hangs."""


class HolderConnection:
    """Connection to a run's holder."""

    def __init__(self, run: str, folder: str) -> None:
        self._run, self._folder = run, folder
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._hung_at: float | None = None
        self.check: HolderCheck | None = None  # set if the holder did not answer a save in time
        self._socket_id: tuple[int, ...] | None = None

    def has_same_socket(self) -> bool:
        """Return True if a new process finds this holder by its socket; sends no message."""
        with open_socket_folder(self._folder, is_made=False) as folder_fd:
            found = None if folder_fd is None else identify_socket(folder_fd, self._run)
        return found is not None and found == self._socket_id

    def request(self, op: str, *, shown: str = "", limit_s: float | None = None, **fields: object) -> dict[str, Any]:
        """Send a request and return its answer."""
        answer, fd = self._exchange({"op": op, **fields}, shown, limit_s)
        if fd is not None:
            os.close(fd)
        return answer

    def request_fd(self, op: str, *, shown: str = "", **fields: object) -> tuple[dict[str, Any], int]:
        """Send a request; return its answer with the file descriptor."""
        answer, fd = self._exchange({"op": op, **fields}, shown)
        if fd is None:
            raise StorageError("the holder sent no memory", where=shown)
        return answer, fd

    def close(self) -> None:
        """Close the connection; the next request opens another, even shortly after the holder did not answer."""
        with self._lock:
            self._drop()
            self._hung_at = None

    def abandon(self) -> None:
        """Close the connection in a forked process, whose parent may hold the lock."""
        if self._connection is not None:
            self._connection.close()

    __del__ = abandon

    def _exchange(
        self, message: dict[str, Any], shown: str, limit_s: float | None = None
    ) -> tuple[dict[str, Any], int | None]:
        if not self._lock.acquire(timeout=-1 if limit_s is None else limit_s):
            error = TimeoutError("another request waits for its answer")
            raise self._gone(error) from error
        try:
            answer, fd = self._ask(message, TIMEOUT_S if limit_s is None else limit_s)
        except OSError as error:
            self._drop()
            if isinstance(error, StorageError):
                raise
            if isinstance(error, TimeoutError) and self._hung_at is None and limit_s is None:
                self._hung_at = time.monotonic()
            raise self._gone(error) from error
        except BaseException:  # the next request would take a late answer for its own
            self._drop()
            raise
        finally:
            self._lock.release()
        refusal = decode_error(answer, shown or self._run)
        if refusal is not None:
            if fd is not None:
                os.close(fd)
            raise refusal
        return answer, fd

    def _ask(self, message: dict[str, Any], limit_s: float) -> tuple[dict[str, Any], int | None]:
        """Send a request; return its answer and descriptor. Raises TimeoutError."""
        self._require_no_pause()
        connection = self._send(message, limit_s)
        connection.settimeout(limit_s)
        try:
            return receive(connection)
        finally:
            connection.settimeout(TIMEOUT_S)

    def _send(self, message: dict[str, Any], limit_s: float) -> socket.socket:
        """Send a request, and return the connection; connect again if the holder has ended: another may listen."""
        if self._connection is not None:
            try:
                send(self._connection, message)
            except (BrokenPipeError, ConnectionResetError):
                if "number" in message:  # a file's number has no meaning for another holder
                    raise
                self._drop()
            else:
                return self._connection
        self._connection = self._connect(limit_s)
        send(self._connection, message)
        return self._connection

    def _require_no_pause(self) -> None:
        """Raise TimeoutError if the same holder did not answer shortly before."""
        if self._hung_at is not None:
            if time.monotonic() - self._hung_at < _PAUSE_S and self.has_same_socket():
                raise TimeoutError(f"timed out in the last {_PAUSE_S:.0f} s")
            self._hung_at = None

    def _connect(self, limit_s: float) -> socket.socket:
        """Return a new connection after checking the holder's version and run."""
        require_sockets()
        with open_socket_folder(self._folder, is_made=False) as folder_fd:
            if folder_fd is None:
                raise FileNotFoundError(self._folder)
            connection = connect_socket(folder_fd, self._run, limit_s)
            self._socket_id = identify_socket(folder_fd, self._run)
        try:
            send(connection, {"op": "hello"})
            answer, _ = receive(connection)
            if answer.get("version") != VERSION or answer.get("run") != self._run:
                raise StorageError(
                    "a holder of another version or run has this name",
                    where=self._run,
                    found=f"version {answer.get('version')}, run {answer.get('run')}",
                    expected=f"version {VERSION}",
                    fix=f"End it with `shardckpt tiers stop {self._run}`.",
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _gone(self, error: OSError) -> HolderGoneError:
        what = "the holder does not answer" if isinstance(error, TimeoutError) else "no holder of this run listens"
        return HolderGoneError(what, where=self._run, found=error)


_CONNECTIONS: dict[tuple[str, str], HolderConnection] = {}
_LOCK = threading.Lock()


def get_holder_connection(run: str) -> HolderConnection:
    """Return this process's connection to a run's holder on this node."""
    key = run, socket_folder()
    with _LOCK:
        if key not in _CONNECTIONS:
            _CONNECTIONS[key] = HolderConnection(*key)
        return _CONNECTIONS[key]


def _forget_connections() -> None:
    """Forget the parent's connections in a forked process."""
    global _LOCK  # noqa: PLW0603
    _LOCK = threading.Lock()
    for connection in _CONNECTIONS.values():
        connection.abandon()
    _CONNECTIONS.clear()


os.register_at_fork(after_in_child=_forget_connections)


class HolderCheck:
    """Check on a separate thread of a holder that did not answer in time."""

    def __init__(self, end_hung: Callable[[], int]) -> None:
        self._end_hung = end_hung  # waits longer for an answer; returns the id of the ended process, 0 if it answers
        self.ended = 0  # process id of the ended holder; 0 if it answers, or while the check runs
        self.error: ShardckptError | None = None  # set if the holder hangs and cannot be ended
        self._is_over = False
        threading.Thread(target=self._run, name="shardckpt-holder-check", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the result is not known yet."""
        return not self._is_over

    def _run(self) -> None:
        try:
            self.ended = self._end_hung()
        except ShardckptError as error:
            self.error = error
        finally:
            self._is_over = True
