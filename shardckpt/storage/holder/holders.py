"""Start, list and stop this user's holders on this node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardckpt.errors import ShardckptError, StorageError, UsageError
from shardckpt.storage.holder import SCHEME
from shardckpt.storage.holder.ask_holders import ask_holders
from shardckpt.storage.holder.holder_check import HolderCheck
from shardckpt.storage.holder.holder_connection import (
    STALL_S,
    TIMEOUT_S,
    HolderBusyError,
    HolderConnection,
    HolderGoneError,
    get_holder_connection,
)
from shardckpt.storage.holder.holder_messages import receive, send
from shardckpt.storage.holder.holder_sockets import require_run, require_sockets, socket_folder
from shardckpt.storage.holder.hung_holder import end_peer, read_peer_pid

IDLE_S = 3600.0  # seconds without a client after which a holder ends
SUPERSEDED_S = 300.0  # seconds without a client after which the start of another run's holder ends this one

# Environment variables that a holder gets: without them, the interpreter may not find its own library.
_KEPT = ("LD_LIBRARY_PATH",)

_START_S = 60.0
_STARTS = 3
_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from {} import main; main(sys.argv[2:])"
_PROCESS = "shardckpt.storage.holder.holder_process"


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
