"""Simulated holders: each runs the real server in its own process, behind simulated sockets."""

from __future__ import annotations

import selectors
import subprocess
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

from shardckpt.tiers.holder.holder_connection import HolderConnection, get_holder_connection
from shardckpt.tiers.holder.holder_ledger import HolderLedger
from shardckpt.tiers.holder.holder_messages import decode_message, encode_message, receive, send
from shardckpt.tiers.holder.holder_process import Holder
from shardckpt.tiers.holder.holder_sockets import (
    connect_socket,
    identify_socket,
    list_runs,
    open_socket_folder,
    require_own_peer,
    require_sockets,
    socket_folder,
)
from shardckpt.tiers.holder.holders import end_peer, read_peer_pid
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.stores.disk import ChangeCount
from tests.simulation.stores.operating_system import OpenMemory, OperatingSystem

_is_ready = attrgetter("is_ready")


class SimulatedSocket:
    """One end of a packet connection; it closes with its process."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        self._scheduler = scheduler
        self.process = process
        self._timeout_s: float | None = None
        self.peer: SimulatedSocket | None = None  # None until it is connected
        # Packets not received yet, each with the memory file whose descriptor came with it.
        self.arrived: deque[tuple[bytes, OpenMemory | None]] = deque()
        self.is_closed = False
        process.at_death.append(self.close)

    @property
    def is_ready(self) -> bool:
        """Whether `recv` returns at once."""
        return bool(self.arrived) or self.peer is None or self.peer.is_closed

    def settimeout(self, seconds: float) -> None:
        """Limit how long `wait` waits."""
        self._timeout_s = seconds

    def setblocking(self, is_blocking: bool) -> None:
        """Do nothing: the holder asks for packets that are there."""

    def send_packet(self, data: bytes, memory: OpenMemory | None) -> None:
        """Send a packet. Raises BrokenPipeError if the other end is closed."""
        if self.is_closed or self.peer is None or self.peer.is_closed:
            raise BrokenPipeError("the other process has closed the connection")
        self.peer.arrived.append((data, memory))
        self._scheduler.notify(self.peer)

    def wait(self) -> tuple[bytes, OpenMemory | None]:
        """Return the next packet, after waiting for it; empty if the other end is closed. Raises TimeoutError."""
        if not self._scheduler.wait(lambda: self.is_ready, "a holder's answer", self._timeout_s, (self,)):
            raise TimeoutError("timed out")
        return self.arrived.popleft() if self.arrived else (b"", None)

    def recv(self, _nbytes: int) -> bytes:
        """Return the next packet; empty if the other end is closed."""
        return self.wait()[0]

    def close(self) -> None:
        """Close this end."""
        self.is_closed = True
        if self.peer is not None:
            self._scheduler.notify(self.peer)

    def __enter__(self) -> SimulatedSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ListeningSocket(SimulatedSocket):
    """A holder's listening socket."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        super().__init__(scheduler, process)
        self.waiting: deque[SimulatedSocket] = deque()  # connections not accepted yet

    @property
    def is_ready(self) -> bool:
        """Whether somebody has connected."""
        return bool(self.waiting)

    def accept(self) -> tuple[SimulatedSocket, None]:
        """Return the next connection."""
        return self.waiting.popleft(), None


class SimulatedSelector:
    """Watches simulated sockets, with the interface of `selectors.DefaultSelector`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._watched: dict[SimulatedSocket, int] = {}

    def register(self, watched: SimulatedSocket, _events: int, data: int) -> None:
        """Watch a socket."""
        self._watched[watched] = data

    def unregister(self, watched: SimulatedSocket) -> None:
        """Stop to watch a socket."""
        del self._watched[watched]

    def select(self, timeout: float) -> list[tuple[SimpleNamespace, int]]:
        """Return the sockets that are ready, after waiting for one."""
        watched = (*self._watched,)
        self._scheduler.wait(lambda: any(map(_is_ready, watched)), "requests", timeout, watched)
        return [(SimpleNamespace(data=data), 1) for each, data in self._watched.items() if each.is_ready]


class SimulatedHolders:
    """The holders on all nodes."""

    def __init__(
        self,
        scheduler: Scheduler,
        system: OperatingSystem,
        make_process: Callable[[str, str], Process],
        changes: ChangeCount | None = None,
    ) -> None:
        self._scheduler, self._system, self._make_process = scheduler, system, make_process
        self.listening: dict[tuple[str, str], ListeningSocket] = {}  # newest holder's socket by node and run
        self._ledgers: dict[Process, _CountingLedger] = {}
        self._changes = ChangeCount() if changes is None else changes
        self.version = 0  # counts removed files
        self._memory: dict[tuple[Process, object], OpenMemory] = {}

    def find_living(self) -> dict[str, Process]:
        """Return the run's living holders by node name."""
        return {node: each.process for (node, _), each in self.listening.items() if not each.is_closed}

    def list_files(self, holder: Process) -> dict[str, bytearray]:
        """Return a holder's files by name, for the harness to check and damage."""
        ledger = self._ledgers.get(holder)
        if ledger is None:
            return {}
        return {name: self._memory[holder, number].node.data for name, number in ledger.list_numbers()}

    def kill(self, nodes: Collection[str], *, silently: bool = False) -> None:
        """Kill the holders on some nodes, and lose their captures."""
        for node, process in self.find_living().items():
            if node in nodes:
                process.die(silently=silently)

    def twins(self, twin_of: Callable[..., object]) -> list[tuple[object, object]]:
        """Return pairs: a value that modules refer to, and its simulated twin."""
        connections: dict[tuple[int, str], HolderConnection] = {}

        def get_connection(run: str) -> HolderConnection:
            key = self._system.getpid(), run
            if key not in connections:
                connections[key] = HolderConnection(run, socket_folder())
            return connections[key]

        modules: dict[ModuleType, dict[str, object]] = {
            subprocess: {"run": self._run_process},
            selectors: {"DefaultSelector": lambda: SimulatedSelector(self._scheduler)},
        }
        return [
            *((module, twin_of(module, **functions)) for module, functions in modules.items()),
            (get_holder_connection, get_connection),
            (connect_socket, self._connect),
            (list_runs, self._list_runs),
            (identify_socket, self._identify_socket),
            (open_socket_folder, _open_folder),
            (require_own_peer, lambda _connection: None),
            (read_peer_pid, _read_peer_pid),
            (end_peer, self._end_peer),
            (require_sockets, lambda: None),
            (send, self._send),
            (receive, self._receive),
        ]

    def _find_node(self) -> str:
        assert self._scheduler.current is not None
        return self._scheduler.current.process.node

    def _identify_socket(self, _folder: int, run: str) -> tuple[int, ...] | None:
        """Return the number of the holder that listens on the running process's node; None without one."""
        listening = self.listening.get((self._find_node(), run))
        return None if listening is None or listening.is_closed else (listening.process.number,)

    def _list_runs(self, _folder: int) -> list[str]:
        """Return the runs that have a holder on the running process's node."""
        own = self._find_node()
        return sorted(run for (node, run), each in self.listening.items() if node == own and not each.is_closed)

    def _run_process(self, command: Sequence[str], **_options: object) -> subprocess.CompletedProcess[bytes]:
        """Start the holder that a command names, unless one listens."""
        run, max_bytes, idle_s, last = command[-4:]
        self._scheduler.step("start", f"holder of {max_bytes} B")
        node = self._find_node()
        if (node, run) not in self.listening or self.listening[node, run].is_closed:
            process = self._make_process(f"holder {node}".rstrip(), node)
            listening = self.listening[node, run] = ListeningSocket(self._scheduler, process)

            def serve() -> None:
                bound: Any = listening
                ledger = self._ledgers[process] = _CountingLedger(int(max_bytes), last)
                ledger.note_removal = self._note_removal
                Holder(run, bound, ledger, float(idle_s)).serve()
                process.die()

            self._scheduler.spawn(process, process.name, serve)
        return subprocess.CompletedProcess([*command], 0, b"", b"")

    def _note_removal(self) -> None:
        self.version += 1
        self._changes.number += 1

    def _connect(self, _folder: int, run: str, timeout_s: float) -> SimulatedSocket:
        self._scheduler.step("connect", run)
        listening = self.listening.get((self._find_node(), run))
        if listening is None or listening.is_closed:
            raise ConnectionRefusedError("nobody listens")
        assert self._scheduler.current is not None
        own = SimulatedSocket(self._scheduler, self._scheduler.current.process)
        own.settimeout(timeout_s)
        own.peer = SimulatedSocket(self._scheduler, listening.process)
        own.peer.peer = own
        listening.waiting.append(own.peer)
        self._scheduler.notify(listening)
        return own

    def _end_peer(self, connection: SimulatedSocket, run: str) -> None:
        """End a holder that does not answer."""
        self._scheduler.step("end", f"holder of {run}")
        if connection.peer is not None:
            connection.peer.process.die()

    def _send(self, connection: SimulatedSocket, message: Mapping[str, Any], fd: int | None = None) -> None:
        data = encode_message(message)
        is_request = "op" in message
        subject = f"{message['op']} {message.get('name', message.get('folder', ''))}" if is_request else ""
        self._scheduler.step("ask" if is_request else "answer", subject or f"{len(data)} B")
        memory = None if fd is None else self._system.find_memory(fd)
        if memory is not None and "number" in message and self._scheduler.current is not None:
            self._memory[self._scheduler.current.process, message["number"]] = memory
        connection.send_packet(data, memory)

    def _receive(self, connection: SimulatedSocket) -> tuple[dict[str, Any], int | None]:
        data, memory = connection.wait()
        if not data:
            raise ConnectionResetError("the other process has closed the connection")
        return decode_message(data), None if memory is None else self._system.open_memory(memory)


class _CountingLedger(HolderLedger):
    """A holder's files, with a callback for removals."""

    note_removal: Callable[[], None]

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        super().delete(name)
        self.note_removal()

    def list_numbers(self) -> Iterator[tuple[str, int]]:
        """Yield each file's name and number in a folder, sorted by folder and name."""
        for name in sorted(self._files, key=lambda name: name.rpartition("/")):
            if "/" in name:
                yield name, self._files[name].number


def _read_peer_pid(connection: SimulatedSocket) -> int:
    """Return the peer process's id."""
    return 0 if connection.peer is None else connection.peer.process.number


@contextmanager
def _open_folder(_folder: str, *, is_made: bool) -> Iterator[int]:
    """Yield an unused descriptor, instead of the socket folder's."""
    del is_made
    yield 0
