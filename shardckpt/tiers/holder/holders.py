"""Start, list and stop this user's holders on this node."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardckpt.errors import ShardckptError, StorageError, UsageError
from shardckpt.tiers.holder import SCHEME
from shardckpt.tiers.holder.holder_connection import (
    STALL_S,
    TIMEOUT_S,
    HolderBusyError,
    HolderCheck,
    HolderConnection,
    HolderGoneError,
    get_holder_connection,
)
from shardckpt.tiers.holder.holder_messages import receive, send
from shardckpt.tiers.holder.holder_sockets import (
    connect_socket,
    list_runs,
    open_socket_folder,
    require_run,
    require_sockets,
    socket_folder,
)

IDLE_S = 3600.0  # seconds without a client after which a holder ends
SUPERSEDED_S = 300.0  # seconds without a client after which the start of another run's holder ends this one

# Environment variables that a holder gets: without them, the interpreter may not find its own library.
_KEPT = ("LD_LIBRARY_PATH",)

_START_S = 60.0
_STARTS = 3
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(sys.argv[2:])"
_PROCESS = "shardckpt.tiers.holder.holder_process"


@dataclass(frozen=True, slots=True)
class RunningHolder:
    """A holder that answers."""

    run: str  # id
    url: str  # its files, for every command
    pid: int
    started_at: float  # seconds since the epoch
    nbytes: int  # including files that are being written
    max_bytes: int
    clients: int  # connected processes


@dataclass(frozen=True, slots=True)
class HungHolder:
    """A holder that does not answer."""

    run: str  # id
    url: str  # its files
    pid: int  # 0 if unknown


class FoundHolders(NamedTuple):
    """This user's holders on this node, sorted by run."""

    running: tuple[RunningHolder, ...]
    hung: tuple[HungHolder, ...]


def start_holder(run: str, max_bytes: int, *, last: str, idle_s: float = IDLE_S) -> int:
    """Start a run's holder on this node, unless it is there; return the id of a hung one that was replaced, or 0."""
    require_sockets()
    replaced = _take_replaced(require_run(run))
    for attempt in range(_STARTS):
        try:
            connection = get_holder_connection(run)
            connection.request("limit", limit_s=STALL_S, max_bytes=max_bytes)
            if connection.has_same_socket() or is_reachable(run, STALL_S):
                return replaced
            connection.request("stop", limit_s=STALL_S)  # somebody removed its socket: no new process would find it
            connection.close()
        except HolderGoneError as error:
            if isinstance(error.__cause__, TimeoutError):  # it is there, and slow, stopped or hanging
                # The check asks twice more, for `TIMEOUT_S` seconds each. The training does not wait for that.
                _start_check(run)
                raise _busy_error(run) from error
        _start_process([run, str(max_bytes), str(idle_s), last])
        if not attempt:
            stop_holders(idle_s=SUPERSEDED_S)
    raise StorageError("the holder was started and does not answer", where=run)


def _take_replaced(run: str) -> int:
    """Return the process id of a holder that the check in the background has ended; 0 without one."""
    connection = get_holder_connection(run)
    check = connection.check
    if check is None:
        return 0
    if check.is_running:
        raise _busy_error(run)
    connection.check = None
    if check.error is not None:
        _start_check(run)
        raise check.error
    connection.close()
    return check.ended


def _start_check(run: str) -> None:
    """Find out on a thread if a holder hangs, and end it then."""

    def end_hung() -> int:
        is_hung = any(answer is None for *_, answer in ask_holders(run))
        return _end_hung_holder(run) if is_hung else 0

    get_holder_connection(run).check = HolderCheck(end_hung)


def _busy_error(run: str) -> HolderBusyError:
    """Return the error for a capture that needs a holder without an answer yet."""
    return HolderBusyError(
        f"the holder did not answer within {STALL_S:.0f} s",
        where=run,
        fix="It is asked again in the background, and replaced if it hangs: `shardckpt tiers` shows its process.",
    )


def is_reachable(run: str, limit_s: float | None = None) -> bool:
    """Return True if a new process would find this process's holder."""
    # The system may remove the socket, for example when a user's session ends.
    connection = get_holder_connection(run)
    known = connection.request("hello", limit_s=limit_s)
    if connection.has_same_socket():
        return True
    new = HolderConnection(run, socket_folder())
    try:
        found = new.request("hello", limit_s=limit_s)
    except HolderGoneError as error:
        if isinstance(error.__cause__, TimeoutError):
            raise
        return False
    finally:
        new.close()
    return (known["pid"], known["started_at"]) == (found["pid"], found["started_at"])


def _start_process(args: list[str]) -> None:
    """Run the process that starts a holder, isolated from this process's environment."""
    root = str(Path(__file__).resolve().parents[3])
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    command = [sys.executable, "-I", "-S", "-c", _CODE.format(_PROCESS), root, socket_folder(), *args]
    try:
        done = subprocess.run(  # noqa: S603  (this interpreter)
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_S, env=kept, cwd="/", check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StorageError("the holder cannot be started", where=args[0], found=error) from error
    if done.returncode:
        last_line = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise StorageError("the holder cannot be started", where=args[0], found=last_line)


def find_holders() -> FoundHolders:
    """Return this user's holders on this node."""
    running, hung = [], []
    for run, connection, answer in ask_holders():
        if answer is None:
            hung.append(HungHolder(run, _url(run), 0 if connection is None else read_peer_pid(connection)))
        else:
            running.append(_to_info(run, answer))
    return FoundHolders(tuple(running), tuple(hung))


def stop_holders(run: str | None = None, *, idle_s: float = 0.0) -> list[str]:
    """End this user's holders on this node; their files are lost. Return their runs."""
    stopped, fault = [], None
    for each, connection, answer in ask_holders(run, STALL_S if idle_s else None):
        if idle_s and (answer is None or answer.get("clients") or float(answer.get("idle_s", 0.0)) < idle_s):
            continue
        try:
            _stop_holder(each, connection, is_hung=answer is None)
        except StorageError as error:
            fault = fault or error
        else:
            stopped.append(each)
    if fault is not None and not idle_s:
        raise fault
    if run is not None and not stopped:
        raise UsageError("no holder of this run is there", where=run, fix="`shardckpt tiers` lists the holders.")
    return stopped


def _stop_holder(run: str, connection: socket.socket | None, *, is_hung: bool) -> None:
    """End a holder. Raises StorageError if it does not answer and cannot be ended."""
    if connection is None:
        raise StorageError(
            "the holder does not answer, and is not ended",
            where=run,
            found="too many connections wait for it: its process is unknown",
            fix=f"Find it with `ss -xlp | grep {run}`, and end it yourself.",
        )
    try:
        if not is_hung:
            send(connection, {"op": "stop"})
            receive(connection)
            _wait_for_end(connection)
            return
    except TimeoutError:
        pass
    except (OSError, ShardckptError):  # it has ended meanwhile
        return
    end_peer(connection, run)


def _end_hung_holder(run: str) -> int:
    """End a run's holder if it does not answer this time either; return its process id, or 0 if it answers."""
    ended = 0
    for _, connection, answer in ask_holders(run):
        if answer is None:
            _stop_holder(run, connection, is_hung=True)
            ended = 0 if connection is None else read_peer_pid(connection)
    return ended


def _wait_for_end(connection: socket.socket) -> None:
    """Wait until the other process closes the connection, within its time limit."""
    deadline = time.monotonic() + TIMEOUT_S
    while connection.recv(1) and time.monotonic() < deadline:
        pass


def _url(run: str) -> str:
    return f"{SCHEME}://{run}"


def _to_info(run: str, answer: dict[str, Any]) -> RunningHolder:
    numbers = {name: answer.get(name) for name in ("pid", "started_at", "nbytes", "max_bytes", "clients")}
    return RunningHolder(run, _url(run), **numbers)  # type: ignore[arg-type]  # shown only


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
