"""Start, list and stop the holders of this user on this node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardckpt.errors import ShardckptError, StorageError, UsageError
from shardckpt.storage.holder import SCHEME
from shardckpt.storage.holder.holder_connection import (
    TIMEOUT_S,
    HolderConnection,
    HolderGoneError,
    get_holder_connection,
)
from shardckpt.storage.holder.holder_messages import receive, send
from shardckpt.storage.holder.holder_sockets import (
    connect_socket,
    list_runs,
    open_socket_folder,
    require_run,
    require_sockets,
    socket_folder,
)

IDLE_S = 3600.0
"""Seconds without a client after which a holder ends."""

SUPERSEDED_S = 300.0
"""Seconds without a client after which the start of another run's holder ends a holder."""

_START_S = 60.0
_STARTS = 3
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(sys.argv[2:])"
_PROCESS = "shardckpt.storage.holder.holder_process"


@dataclass(frozen=True, slots=True)
class RunningHolder:
    """A holder of this user.

    Attributes:
        run: Id of the run.
        url: URL of its files, for every command.
        pid: Process id.
        started_at: Time of its start, in seconds since the epoch.
        nbytes: Bytes of its files, including those being written.
        max_bytes: Maximum of these bytes.
        clients: Number of connected processes.
    """

    run: str
    url: str
    pid: int
    started_at: float
    nbytes: int
    max_bytes: int
    clients: int


def start_holder(run: str, max_bytes: int, *, last: str, idle_s: float = IDLE_S) -> None:
    """Start the holder of a run on this node, unless it is there; it survives this process.

    One whose socket was removed is ended: no new process would find it. Holders of other runs without a client for
    `SUPERSEDED_S` seconds are ended too.

    Args:
        run: Id of the run.
        max_bytes: Maximum bytes that it keeps; a holder that is there gets this maximum.
        last: Name of the file that makes a folder complete.
        idle_s: Seconds without a client after which it ends.

    Raises:
        StorageError: It cannot be started, or does not answer.
        UnsafeError: The folder of sockets is not this user's alone.
    """
    require_sockets()
    for attempt in range(_STARTS):
        try:
            connection = get_holder_connection(require_run(run))
            connection.request("limit", max_bytes=max_bytes)
            if connection.has_same_socket() or is_reachable(run):
                return
            connection.request("stop")
            connection.close()
        except HolderGoneError as error:
            if isinstance(error.__cause__, TimeoutError):  # it is there, and stopped or hanging
                raise
        _start_process([run, str(max_bytes), str(idle_s), last])
        if not attempt:
            stop_holders(idle_s=SUPERSEDED_S)
    raise StorageError("the holder was started and does not answer", where=run)


def is_reachable(run: str) -> bool:
    """Return True if a new process would find the holder that this process is connected to.

    Otherwise somebody removed the socket, for example the system at the end of a session of the user.

    Args:
        run: Id of the run.

    Raises:
        StorageError: The holder does not answer.
        UnsafeError: The folder of sockets is not this user's alone.
    """
    connection = get_holder_connection(run)
    known = connection.request("hello")
    if connection.has_same_socket():
        return True
    new = HolderConnection(run, socket_folder())
    try:
        found = new.request("hello")
    except HolderGoneError as error:
        if isinstance(error.__cause__, TimeoutError):
            raise
        return False
    finally:
        new.close()
    return (known["pid"], known["started_at"]) == (found["pid"], found["started_at"])


def _start_process(args: list[str]) -> None:
    """Run the process that starts a holder, isolated from the environment of this one."""
    root = str(Path(__file__).resolve().parents[3])
    kept = {name: os.environ[name] for name in ("XDG_RUNTIME_DIR", "TMPDIR", "SHARDCKPT_NODE") if name in os.environ}
    command = [sys.executable, "-I", "-S", "-c", _CODE.format(_PROCESS), root, *args]
    try:
        done = subprocess.run(  # noqa: S603  (this interpreter)
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S, env=kept, cwd="/", check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StorageError("the holder cannot be started", where=args[0], found=error) from error
    if done.returncode:
        last_line = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise StorageError("the holder cannot be started", where=args[0], found=last_line)


def find_holders() -> list[RunningHolder]:
    """Return the holders of this user on this node, in the order of their runs.

    A holder that does not answer is left out.

    Raises:
        UnsafeError: The folder of sockets is not this user's alone.
        StorageError: It cannot be opened.
    """
    found = []
    for run, connection in _connect_all():
        with connection, suppress(OSError, ShardckptError):
            send(connection, {"op": "hello"})
            found.append(_to_info(run, receive(connection)[0]))
    return found


def stop_holders(run: str | None = None, *, idle_s: float = 0.0) -> list[str]:
    """End holders of this user on this node; the files that they have are lost. Return their runs.

    Args:
        run: Id of the run; None for all.
        idle_s: End only those without a client for this many seconds; 0 for all.

    Raises:
        UsageError: No holder has this run.
        UnsafeError: The folder of sockets is not this user's alone.
        StorageError: It cannot be opened.
    """
    stopped = []
    for each, connection in _connect_all():
        if run not in (None, each):
            connection.close()
            continue
        with connection, suppress(OSError, ShardckptError):
            send(connection, {"op": "hello"})
            answer, _ = receive(connection)
            if idle_s and (answer.get("clients") or float(answer.get("idle_s", 0.0)) < idle_s):
                continue
            send(connection, {"op": "stop"})
            receive(connection)
            stopped.append(each)
            _wait_for_end(connection)
    if run is not None and not stopped:
        raise UsageError("no holder of this run answers", where=run, fix="`shardckpt tiers` lists the holders.")
    return stopped


def _wait_for_end(connection: socket.socket) -> None:
    """Wait until the process at the other end has closed the connection, within its time limit."""
    deadline = time.monotonic() + TIMEOUT_S
    while connection.recv(1) and time.monotonic() < deadline:
        pass


def _connect_all() -> Iterator[tuple[str, socket.socket]]:
    """Yield a connection to each holder that accepts one."""
    require_sockets()
    with open_socket_folder(socket_folder(), is_made=False) as folder_fd:
        for run in [] if folder_fd is None else list_runs(folder_fd):
            with suppress(OSError, ShardckptError):
                connection = connect_socket(folder_fd or 0, run, TIMEOUT_S)
                yield run, connection


def _to_info(run: str, answer: dict[str, object]) -> RunningHolder:
    numbers = {name: answer.get(name) for name in ("pid", "started_at", "nbytes", "max_bytes", "clients")}
    return RunningHolder(run, f"{SCHEME}://{run}", **numbers)  # type: ignore[arg-type]  # shown only
