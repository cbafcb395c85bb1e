"""Broadcast reads: one rank reads replicated data and sends it to the other ranks.

Segments are sent while the next segments are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import chain

import torch

from shardckpt.checkpoint.load.tensor_loader import PendingRead, ReadRequest
from shardckpt.errors import RankError
from shardckpt.events.progress import Meter
from shardckpt.plan.layout.read_sharing import BroadcastGroup, FileSegments
from shardckpt.ranks.linked_group import LinkedGroup, Transfer
from shardckpt.storage.store import Read, Store
from shardckpt.storage.thread_pool import ThreadPool

_AHEAD = 4  # number of segments to read ahead; each is kept until all receiving ranks have it

_FINE, _STOPPED = 0, 1


class BroadcastReader:
    """Reads segments of replicated data, each on one rank per group."""

    # All ranks run the same rounds. In each round a rank sends the segments that it has read to the other ranks of its
    # groups, then receives their segments. Ranks cannot deadlock, because the sends of a round depend on earlier rounds
    # only. A failing rank sends a stop marker instead of its segments; every rank that receives one stops too. All
    # ranks then reach the end, where they get the name of the failed rank.

    def __init__(
        self,
        coordinator: LinkedGroup,
        store: Store,
        segments: FileSegments,
        groups: Sequence[BroadcastGroup],
        wanted: Sequence[PendingRead],
        meter: Meter | None = None,
    ) -> None:
        self._meter = meter
        self._coordinator, self._store, self._segments = coordinator, store, segments
        self._groups = groups
        shared = set(chain.from_iterable(group.ids.tolist() for group in groups))
        self._places: dict[int, list[tuple[int, memoryview, PendingRead]]] = {number: [] for number in shared}
        self.own: list[Read] = []  # parts of pending reads that no other rank needs
        self.alone: list[ReadRequest] = []  # requests that share no segment with another rank
        self._with_own_reads: list[PendingRead] = []
        for pending_read in wanted:
            self._divide(pending_read)
        self._silent: set[int] = set()
        self._stopped_peers: set[int] = set()
        self._failure: Exception | None = None
        self._is_over = False
        self._sent: deque[tuple[int, int, Transfer, torch.Tensor]] = deque()

    def _divide(self, pending_read: PendingRead) -> None:
        """Divide a read into shared segments and parts that this rank reads alone."""
        reads, pending_read.reads = pending_read.reads, []
        pieces = [
            (read, [*self._segments.split(read.name, read.offset, read.offset + len(read.buffer))]) for read in reads
        ]
        if not any(number in self._places for _, parts in pieces for number, _, _ in parts):
            self.alone.append(pending_read.request)
            return
        own: list[Read] = []
        for (name, offset, buffer), parts in pieces:
            for number, start, stop in parts:
                place = buffer[start - offset : stop - offset]
                if number in self._places:
                    pending_read.left += 1
                    self._places[number].append((start - self._segments.extent(number).start, place, pending_read))
                else:
                    own.append(Read(name, start, place))
        if own:
            pending_read.left += 1
            self.own += own
            self._with_own_reads.append(pending_read)

    def mark_own_read(self) -> None:
        """Mark the reads in `own` as done."""
        for pending_read in self._with_own_reads:
            pending_read.mark_arrived()

    def run(self, failure: Exception | None = None) -> Exception | None:
        """Read, send and receive segments; return this rank's error. Collective among the broadcast groups."""
        # A rank that failed reports its own error, so the others return None.
        self._failure = failure
        self._is_over = failure is not None
        if self._groups:
            with ThreadPool(_AHEAD, thread_name_prefix="shardckpt-read") as pool:
                self._go_round(pool)
        return self._failure

    @property
    def is_over(self) -> bool:
        """Whether this rank stopped, because it or another rank failed."""
        return self._is_over

    def _go_round(self, pool: ThreadPool) -> None:
        numbers = self._own_numbers()
        ahead: deque[Future[torch.Tensor]] = deque()
        rounds = max(group.rounds for group in self._groups)
        for at in range(rounds):
            for group in self._groups:
                for owner, number in group.turns(at):
                    if owner == self._coordinator.rank:
                        while (
                            len(ahead) < _AHEAD and not self._is_over and (following := next(numbers, None)) is not None
                        ):
                            ahead.append(pool.submit(self._read, following))
                        self._send(group, number, at, ahead)
            for group in self._groups:
                for owner, number in group.turns(at):
                    if owner != self._coordinator.rank:
                        self._recv(owner, number)
            self._settle(at - 1)
        for future in ahead:
            future.cancel()
        self._settle(rounds)

    def _own_numbers(self) -> Iterator[int]:
        """Yield the segment numbers that this rank reads, in order."""
        for at in range(max(group.rounds for group in self._groups)):
            for group in self._groups:
                yield from (number for owner, number in group.turns(at) if owner == self._coordinator.rank)

    def _read(self, number: int) -> torch.Tensor:
        name, start, stop = self._segments.extent(number)
        row = torch.empty(stop - start, dtype=torch.uint8)
        self._store.read([Read(name, start, memoryview(row.numpy()))])  # type: ignore[arg-type]
        return row

    def _send(self, group: BroadcastGroup, number: int, at: int, ahead: deque[Future[torch.Tensor]]) -> None:
        """Wait for a segment's read, send it to the group, and copy it to its place."""
        row = None
        if not self._is_over:
            try:
                row = ahead.popleft().result()
            except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
                self._stop(error)
        for member in group.members:
            if member == self._coordinator.rank or member in self._stopped_peers:
                continue
            if row is None:
                self._stopped_peers.add(member)
            self._start_send(member, at, torch.tensor([_STOPPED if row is None else _FINE], dtype=torch.uint8))
            if row is not None:
                self._start_send(member, at, row)
        if row is not None:
            self._put(number, row)

    def _start_send(self, member: int, at: int, row: torch.Tensor) -> None:
        if member in self._stopped_peers and row.numel() != 1:
            return  # the rank is lost
        try:
            self._sent.append((at, member, self._coordinator.send(row, member), row))
        except RankError as error:
            self._lose(member, error)

    def _recv(self, owner: int, number: int) -> None:
        """Receive a segment from the rank that reads it, unless that rank has stopped."""
        if owner in self._silent:
            return
        word = torch.empty(1, dtype=torch.uint8)
        _, start, stop = self._segments.extent(number)
        row = torch.empty(stop - start, dtype=torch.uint8)
        try:
            self._coordinator.recv(word, owner)
            if word.item() == _FINE:
                self._coordinator.recv(row, owner)
        except RankError as error:
            self._lose(owner, error)
            return
        if word.item() == _FINE:
            self._put(number, row)
        else:
            self._silent.add(owner)
            self._is_over = True

    def _put(self, number: int, row: torch.Tensor) -> None:
        data = memoryview(row.numpy())  # type: ignore[arg-type]
        for at, place, pending_read in self._places.pop(number):
            place[:] = data[at : at + len(place)]
            pending_read.mark_arrived()
            self._count(len(place))

    def _count(self, nbytes: int) -> None:
        """Report arrived bytes; an error that the caller raises stops all ranks."""
        if self._meter is None or self._is_over:
            return
        try:
            self._meter.add(nbytes)
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._is_over = True

    def _lose(self, rank: int, error: RankError) -> None:
        """Stop communication with a lost rank."""
        self._silent.add(rank)
        self._stopped_peers.add(rank)
        self._stop(error)

    def _settle(self, until: int) -> None:
        """Wait for all sends up to a round, and free their segments."""
        while self._sent and self._sent[0][0] <= until:
            _, member, work, _row = self._sent.popleft()
            if member in self._stopped_peers and self._coordinator.has_lost_rank:
                continue
            try:
                self._coordinator.wait(work, member)
            except RankError as error:
                self._lose(member, error)
