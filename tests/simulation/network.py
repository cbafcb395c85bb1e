"""Simulated messages between ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf

import torch

from shardckpt.errors import RankError
from shardckpt.ranks.linked_group import RankLink, Transfer
from tests.simulation.scheduler import Process, Scheduler

LATE_FRACTION = 1.5  # delay of a late message, as a fraction of the ranks' timeout


@dataclass(eq=False)
class Meeting:
    """Messages and notes on one link."""

    # Messages that arrived but were not received, by sender, receiver and kind.
    messages: dict[tuple[int, int, str], deque[bytes]] = field(default_factory=dict)
    # Earliest arrival by sender, receiver and kind: messages on a connection keep their order.
    ready: dict[tuple[int, int, str], float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)  # ranks that called `renew`


class SimulatedRanks:
    """The ranks of a simulated job."""

    def __init__(self, scheduler: Scheduler, processes: Sequence[Process], timeout_s: float) -> None:
        self.scheduler, self.processes, self.timeout_s = scheduler, processes, timeout_s
        self._meetings: dict[int, Meeting] = {}
        self.renewals = [0] * len(processes)  # links that each rank has made

    def link(self, rank: int) -> SimulatedLink:
        """Return a rank's link, to pass as `process_group`."""
        return SimulatedLink(self, rank, 0)

    def meet(self, number: int) -> Meeting:
        """Return a link's state by its number."""
        if number not in self._meetings:
            self._meetings[number] = Meeting()
        return self._meetings[number]


class SimulatedLink(RankLink):
    """A rank's link, whose messages may be lost, late or doubled."""

    def __init__(self, ranks: SimulatedRanks, rank: int, number: int) -> None:
        super().__init__(rank, len(ranks.processes), timedelta(seconds=ranks.timeout_s))
        self._ranks, self._meeting = ranks, ranks.meet(number)
        self._scheduler = ranks.scheduler
        self._broken: set[int] = set()

    def send_message(self, data: bytes, dst: int) -> None:
        """Send bytes; the network may lose, delay or repeat them."""
        self._send(data, dst, "message")

    def recv_message(self, src: int, deadline: float) -> bytes:
        """Return the next message from a rank."""
        return self._recv(src, "message", deadline - self._scheduler.now)

    def start_send(self, tensor: torch.Tensor, dst: int) -> Transfer:
        """Send a tensor's bytes."""
        self._send(tensor.numpy().tobytes(), dst, "data")
        return _Sent()

    def start_recv(self, tensor: torch.Tensor, src: int) -> Transfer:
        """Return a transfer that fills a tensor when somebody waits for it."""
        return _Arriving(self, tensor, src)

    def fill(self, tensor: torch.Tensor, src: int) -> None:
        """Fill a tensor with the next bytes from a rank."""
        data = self._recv(src, "data", self._ranks.timeout_s)
        if len(data) != tensor.numel() * tensor.element_size():
            raise RuntimeError(f"{len(data)} bytes came for {tensor.numel()}")
        if data:
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def leave_note(self, key: str, text: str) -> None:
        """Leave a note, unless rank 0 is dead."""
        self._scheduler.step("note", f"{self.rank}: {text}")
        if not self._ranks.processes[0].is_dead:
            self._meeting.notes[key] = text
            self._scheduler.notify(self._meeting)

    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        """Find a note, unless rank 0 is dead."""
        self._scheduler.step("find", f"{self.rank}: {key}")
        notes, host = self._meeting.notes, self._ranks.processes[0]
        self._scheduler.wait(lambda: key in notes and not host.is_dead, f"note {key}", wait_s, (self._meeting, host))
        return "" if host.is_dead else notes.get(key, "")

    def renew(self, *, has_low_priority: bool = False) -> RankLink:
        """Return a link with the next number, after all ranks have come."""
        del has_low_priority
        self._ranks.renewals[self.rank] += 1
        number, size = self._ranks.renewals[self.rank], self.size
        self._scheduler.step("meet", f"{self.rank}: link {number}")
        meeting = self._ranks.meet(number)
        arrived = meeting.arrived
        arrived.add(self.rank)
        if len(arrived) == size:
            self._scheduler.notify(meeting)
        if not self._scheduler.wait(lambda: len(arrived) == size, "all ranks", self._ranks.timeout_s, (meeting,)):
            self._ranks.renewals[self.rank] -= 1
            arrived.discard(self.rank)
            missing = min(set(range(size)) - arrived - {self.rank}, default=-1)
            raise RankError(f"rank {missing} of {size} did not come in time", rank=missing)
        return SimulatedLink(self._ranks, self.rank, number)

    def _send(self, data: bytes, dst: int, kind: str) -> None:
        fault = self._scheduler.step("send", f"{self.rank} -> {dst}, {kind} of {len(data)} B")
        if dst in self._broken:
            raise RuntimeError(f"the connection to rank {dst} is broken")
        peer = self._ranks.processes[dst]
        if peer.is_dead and not peer.is_silent:
            raise RuntimeError(f"the connection to rank {dst} was closed")
        way, now = (self.rank, dst, kind), self._scheduler.now
        arrived = self._meeting.messages.setdefault(way, deque())
        ready = self._meeting.ready.get(way, now)
        if fault == "lost":
            ready = inf
        if fault == "late":
            ready = now + self._ranks.timeout_s * LATE_FRACTION * self._scheduler.random.random()
        self._meeting.ready[way] = ready

        def arrive() -> None:
            arrived.append(data)
            self._scheduler.notify((self._meeting, way))

        for _ in range(2 if fault == "doubled" and kind == "message" else 1):
            if ready <= now:
                arrive()
            elif ready < inf:
                self._scheduler.call_at(ready, arrive)

    def _recv(self, src: int, kind: str, seconds: float) -> bytes:
        self._scheduler.step("recv", f"{self.rank} <- {src}, {kind}")
        if src in self._broken:
            raise RuntimeError(f"the connection to rank {src} is broken")
        way = (src, self.rank, kind)
        arrived = self._meeting.messages.setdefault(way, deque())
        peer = self._ranks.processes[src]
        self._scheduler.wait(
            lambda: bool(arrived) or (peer.is_dead and not peer.is_silent),
            f"a {kind} of rank {src}",
            seconds,
            ((self._meeting, way), peer),
        )
        if arrived:
            return arrived.popleft()
        self._broken.add(src)
        why = "was closed" if peer.is_dead and not peer.is_silent else "timed out"
        raise RuntimeError(f"the connection to rank {src} {why}")


class _Sent:
    """A tensor that was sent."""

    def wait(self, timeout: timedelta = timedelta(0)) -> object:
        """Return at once."""
        del timeout
        return True


class _Arriving:
    """A tensor that is received."""

    def __init__(self, link: SimulatedLink, tensor: torch.Tensor, src: int) -> None:
        self._link, self._tensor, self._src = link, tensor, src

    def wait(self, timeout: timedelta = timedelta(0)) -> object:
        """Wait until the bytes are there."""
        del timeout
        self._link.fill(self._tensor, self._src)
        return True
