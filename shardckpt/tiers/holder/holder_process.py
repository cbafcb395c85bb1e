"""The holder's process: keeps files in shared memory, and serves them on a Unix socket.

The memory has no name: the kernel frees it with the process, however that ends. A file is sealed when it appears: no
process can change it then. The process imports the standard library only, to stay small.
"""

from __future__ import annotations

import fcntl
import os
import resource
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from shardckpt.errors import NoSpaceError, ShardckptError, StorageError, UnsafeError
from shardckpt.tiers.holder.free_memory import read_available_bytes
from shardckpt.tiers.holder.holder_ledger import HolderLedger
from shardckpt.tiers.holder.holder_messages import (
    MAX_LISTED,
    MAX_MESSAGE_BYTES,
    VERSION,
    decode_message,
    encode_error,
    get_field,
    send,
)
from shardckpt.tiers.holder.holder_sockets import (
    bind_socket,
    connect_socket,
    list_runs,
    open_socket_folder,
    require_own_peer,
    socket_name,
)

MAX_CLIENTS = 4096
_LOCK_S = 20.0
_LOCK = "lock"
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PROBE_S = 2.0
_MAX_WAIT_S = 3600.0  # the system refuses to wait for more than 24 days


class Holder:
    """Server for one run: a loop over its connections, which answers each request at once."""

    def __init__(self, run: str, listening: socket.socket, ledger: HolderLedger, idle_s: float) -> None:
        self._run, self._listening, self._ledger, self._idle_s = run, listening, ledger, idle_s
        self._memory: dict[int, int] = {}
        self._clients: dict[int, socket.socket] = {}
        self._count = 0
        self._started_at = time.time()
        self._idle_since = time.monotonic()
        self._is_over = False
        ledger.release = self._release
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Answer requests until a client stops the holder, or nobody was connected for `idle_s` seconds."""
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ, 0)
        while not self._is_over:
            left = self._idle_s if self._clients else self._idle_since + self._idle_s - time.monotonic()
            if left <= 0:
                return
            for key, _ in self._selector.select(min(left, _MAX_WAIT_S)):
                if key.data:
                    self._answer(key.data)
                else:
                    self._accept()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listening.accept()
            connection.setblocking(False)
            try:
                require_own_peer(connection)
                if len(self._clients) >= MAX_CLIENTS:
                    raise StorageError("too many clients")
            except ShardckptError:
                connection.close()
                return
            self._count += 1
            self._clients[self._count] = connection
            self._selector.register(connection, selectors.EVENT_READ, self._count)

    def _answer(self, client: int) -> None:
        """Answer one request; drop a client that is gone, or sends invalid messages."""
        connection = self._clients[client]
        try:
            request = decode_message(connection.recv(MAX_MESSAGE_BYTES + 1))
        except (OSError, StorageError):
            self._drop(client)
            return
        fd = None
        try:
            answer, fd = self._carry_out(client, request)
        except ShardckptError as error:
            answer = encode_error(error)
        except OSError as error:
            answer = encode_error(NoSpaceError("the system gives the holder no more memory", found=error))
        try:
            send(connection, answer, fd)
        except (OSError, StorageError):
            self._drop(client)

    def _drop(self, client: int) -> None:
        connection = self._clients.pop(client)
        self._selector.unregister(connection)
        connection.close()
        self._ledger.forget(client, self._clients.keys())
        if not self._clients:
            self._idle_since = time.monotonic()

    def _carry_out(self, client: int, request: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Return the answer to a request, and its descriptor."""
        op = get_field(request, "op", str)
        if op == "create":
            return self._create(client, get_field(request, "name", str), is_new=get_field(request, "is_new", bool))
        if op == "open":
            file = self._ledger.find(get_field(request, "name", str))
            return {"nbytes": file.nbytes}, self._memory[file.number]
        answer = getattr(self, f"_op_{op}", None) if op.isidentifier() else None
        if answer is None:
            raise StorageError("the holder does not know this request", found=op[:80])
        return answer(client, request) or {}, None

    def _create(self, client: int, name: str, *, is_new: bool) -> tuple[dict[str, Any], int]:
        number = self._ledger.create(client, name, is_new=is_new)
        try:
            fd = os.memfd_create(f"shardckpt {name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            self._ledger.abort(client, number)
            raise
        self._memory[number] = fd
        return {"number": number}, fd

    def _release(self, number: int) -> None:
        fd = self._memory.pop(number, None)
        if fd is not None:
            os.close(fd)

    def _op_hello(self, _client: int, _request: dict[str, Any]) -> dict[str, Any]:
        return {
            "version": VERSION,
            "run": self._run,
            "pid": os.getpid(),
            "started_at": self._started_at,
            "nbytes": self._ledger.nbytes,
            "max_bytes": self._ledger.max_bytes,
            "clients": len(self._clients) - 1,
            "idle_s": time.monotonic() - self._idle_since,
        }

    def _op_stop(self, _client: int, _request: dict[str, Any]) -> None:
        self._is_over = True

    def _op_limit(self, _client: int, request: dict[str, Any]) -> None:
        self._ledger.max_bytes = get_field(request, "max_bytes", int)

    def _op_reserve(self, client: int, request: dict[str, Any]) -> None:
        number, nbytes = get_field(request, "number", int), get_field(request, "nbytes", int)
        before = self._ledger.reserve(client, number, nbytes)
        available = read_available_bytes(nbytes - before)
        if available is not None and nbytes - before > available:
            self._ledger.reserve(client, number, before)
            raise NoSpaceError("this machine, or its container, has too little free memory", found=f"{available} bytes")

    def _op_close(self, client: int, request: dict[str, Any]) -> None:
        number = get_field(request, "number", int)
        nbytes = os.fstat(self._memory[number]).st_size if number in self._memory else 0
        if number in self._memory:
            with suppress(OSError):  # a process has mapped it: readers verify hashes in any case
                fcntl.fcntl(self._memory[number], fcntl.F_ADD_SEALS, _SEALS)
        self._ledger.close(client, number, nbytes, time.time())

    def _op_abort(self, client: int, request: dict[str, Any]) -> None:
        self._ledger.abort(client, get_field(request, "number", int))

    def _op_find(self, _client: int, request: dict[str, Any]) -> dict[str, Any]:
        name = get_field(request, "name", str)
        if self._ledger.is_folder(name):
            return {"is_folder": True}
        file = self._ledger.find(name)
        return {"is_folder": False, "nbytes": file.nbytes, "written_at": file.written_at, "number": file.number}

    def _op_list(self, _client: int, request: dict[str, Any]) -> dict[str, Any]:
        after = get_field(request, "after", str)
        left = [entry for entry in self._ledger.list(get_field(request, "folder", str)) if entry.name > after]
        chosen, nbytes = [], 0
        for entry in left[:MAX_LISTED]:
            nbytes += 6 * len(entry.name) + 64  # as JSON a character has at most 6 bytes
            if nbytes > MAX_MESSAGE_BYTES // 2:
                break
            chosen.append([*entry])
        return {"entries": chosen, "has_more": len(chosen) < len(left)}

    def _op_changed_at(self, _client: int, request: dict[str, Any]) -> dict[str, Any]:
        return {"time": self._ledger.changed_at(get_field(request, "folder", str))}

    def _op_delete(self, _client: int, request: dict[str, Any]) -> None:
        self._ledger.delete(get_field(request, "name", str))

    def _op_delete_folder(self, _client: int, request: dict[str, Any]) -> None:
        self._ledger.delete_folder(get_field(request, "folder", str))


def main(args: list[str]) -> None:
    """Start a run's holder in a new session, unless one is there; return when it listens."""
    folder, run, max_bytes, idle_s, last = args
    with open_socket_folder(folder, is_made=True) as folder_fd:
        assert folder_fd is not None
        lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
        _lock_in_time(lock)
        if _remove_dead(folder_fd, run):
            return
        listening = bind_socket(folder_fd, run)
        if _fork():
            listening.close()
            _wait_for(folder_fd, run)
            return
        os.close(lock)
        listening.listen(socket.SOMAXCONN)  # if a holder hangs, connections wait even after their clients are gone
        try:
            _detach()
            Holder(run, listening, HolderLedger(int(max_bytes), last), float(idle_s)).serve()
        finally:
            with suppress(OSError):
                os.unlink(socket_name(run), dir_fd=folder_fd)


def _lock_in_time(lock: int) -> None:
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _remove_dead(folder_fd: int, run: str) -> bool:
    """Remove killed holders' sockets; return True if the run has a living holder."""
    for other in list_runs(folder_fd):
        try:
            connect_socket(folder_fd, other, _PROBE_S).close()
        except ConnectionRefusedError:
            with suppress(FileNotFoundError):
                os.unlink(socket_name(other), dir_fd=folder_fd)
        except OSError:  # busy or stopped, but alive
            if other == run:
                return True
        else:
            if other == run:
                return True
    return False


def _fork() -> bool:
    """Return True in the parent."""
    return os.fork() > 0


def _wait_for(folder_fd: int, run: str) -> None:
    deadline = time.monotonic() + _LOCK_S
    while time.monotonic() < deadline:
        with suppress(OSError, UnsafeError):
            connect_socket(folder_fd, run, _PROBE_S).close()
            return
        time.sleep(0.002)


def _detach() -> None:
    """Keep nothing from the process that started this one; be the first to go if memory runs out."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
