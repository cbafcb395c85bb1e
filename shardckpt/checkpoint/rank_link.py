"""Links between a group's ranks: messages, and notes that reach ranks when messages do not."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardckpt.checkpoint.rendezvous import BoundedStore, make_group, meet
from shardckpt.storage.linux_syscalls import lower_priority
from shardckpt.torch_features import get_group_store

_DATA = 1  # tag of tensors, whose order among messages does not matter

_SIZE_BYTES, _FIRST_BYTES = 8, 1016
# Bytes that begin each message: most messages are one packet, since each packet waits for the other rank.
_PACKET_BYTES = _SIZE_BYTES + _FIRST_BYTES


class Transfer(Protocol):
    """A tensor that is being sent or received."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait until the receiving rank has it. Raises RuntimeError."""


class RankLink(ABC):
    """Link between the ranks in one group.

    A broken connection and a late rank are RuntimeErrors. Functions that save and load take a link as `process_group`.

    Args:
        rank: This rank's index.
        size: How many ranks there are.
        timeout: Maximum time that ranks wait for each other.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout

    @abstractmethod
    def send_message(self, data: bytes, dst: int) -> None:
        """Send any number of bytes to a rank, and wait until it has them. Raises RuntimeError."""

    @abstractmethod
    def recv_message(self, src: int, deadline: float) -> bytes:
        """Return the next message from a rank.

        Args:
            src: Rank index.
            deadline: When to stop waiting, in seconds on the `time.monotonic` clock.

        Raises:
            RuntimeError: The connection broke, or the rank did not send in time.
        """

    def expect_message(self, src: int) -> None:  # noqa: B027  (on most links a send does not wait)
        """Accept the next message from a rank, which can send it before `recv_message` is called. Raises RuntimeError.

        Args:
            src: Rank index.
        """

    @abstractmethod
    def start_send(self, tensor: torch.Tensor, dst: int) -> Transfer:
        """Start to send a tensor's bytes to a rank. Raises RuntimeError."""

    @abstractmethod
    def start_recv(self, tensor: torch.Tensor, src: int) -> Transfer:
        """Start to fill a tensor with the next bytes that a rank sends. Raises RuntimeError."""

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Fill a tensor with the bytes that a rank sends. Raises RuntimeError."""
        self.start_recv(tensor, src).wait(self.timeout)

    @abstractmethod
    def leave_note(self, key: str, text: str) -> None:
        """Leave a note for the other ranks if possible; never raises."""

    @abstractmethod
    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        """Return a note, waiting for it up to `wait_s` seconds; empty without one."""

    @abstractmethod
    def renew(self) -> RankLink:
        """Return a new link between the same ranks, with separate messages. Collective.

        Raises:
            RankError: A rank did not call it in time.
        """


class _ArrivingPacket(NamedTuple):
    """A message's bytes that are being received."""

    row: torch.Tensor  # the bytes
    work: dist.Work  # the transfer

    def recv(self, deadline: float) -> bytes:
        """Return the bytes when they have come, before a `time.monotonic` time. Raises RuntimeError."""
        self.work.wait(timedelta(seconds=max(0.05, deadline - time.monotonic())))
        return self.row.numpy().tobytes()


class TorchLink(RankLink):
    """Link over a torch process group for CPU tensors."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, ranks: dist.ProcessGroup | None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), timeout)
        self._group, self._ranks = group, ranks
        self._expected: dict[int, _ArrivingPacket] = {}

    def send_message(self, data: bytes, dst: int) -> None:
        """Send a packet with the length and the first bytes, then the rest if there is one."""
        packet = (len(data).to_bytes(_SIZE_BYTES, "little") + data[:_FIRST_BYTES]).ljust(_PACKET_BYTES, b"\0")
        for part in (packet, data[_FIRST_BYTES:]) if len(data) > _FIRST_BYTES else (packet,):
            work = dist.isend(torch.frombuffer(bytearray(part), dtype=torch.uint8), group=self._group, group_dst=dst)
            assert work is not None
            work.wait(self.timeout)

    def recv_message(self, src: int, deadline: float) -> bytes:
        """Receive the packet, then the rest."""
        expected = self._expected.pop(src, None) or self._start_packet(_PACKET_BYTES, src)
        packet = expected.recv(deadline)
        nbytes, first = int.from_bytes(packet[:_SIZE_BYTES], "little"), packet[_SIZE_BYTES:]
        if nbytes <= _FIRST_BYTES:
            return first[:nbytes]
        return first + self._start_packet(nbytes - _FIRST_BYTES, src).recv(deadline)

    def expect_message(self, src: int) -> None:
        """Start to receive the next packet, unless that has been done."""
        if src not in self._expected:
            self._expected[src] = self._start_packet(_PACKET_BYTES, src)

    def _start_packet(self, nbytes: int, src: int) -> _ArrivingPacket:
        row = torch.empty(nbytes, dtype=torch.uint8)
        work = dist.irecv(row, group=self._group, group_src=src)
        assert work is not None
        return _ArrivingPacket(row, work)

    def start_send(self, tensor: torch.Tensor, dst: int) -> dist.Work:
        """Send with a tag that messages do not have."""
        work = dist.isend(tensor, group=self._group, group_dst=dst, tag=_DATA)
        assert work is not None
        return work

    def start_recv(self, tensor: torch.Tensor, src: int) -> dist.Work:
        """Receive with a tag that messages do not have."""
        work = dist.irecv(tensor, group=self._group, group_src=src, tag=_DATA)
        assert work is not None
        return work

    def leave_note(self, key: str, text: str) -> None:
        """Set a key in the group's store, unless it does not answer."""
        BoundedStore(get_group_store(self._group)).leave(key, text)

    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        """Return a key's text from the group's store, unless it does not answer."""
        return BoundedStore(get_group_store(self._group)).find(key, wait_s=wait_s)

    def renew(self) -> RankLink:
        """Create another process group with the same ranks."""
        return link_ranks(self._ranks)


def link_ranks(group: dist.ProcessGroup | None, *, has_low_priority: bool = False) -> RankLink:
    """Create a link with a new process group for the same ranks. Collective."""
    given = dist.group.WORLD if group is None else group
    assert given is not None
    timeout = _get_timeout(given)
    meet(given, timeout)
    ranks = None if group is None else dist.get_process_group_ranks(given)

    def make() -> dist.ProcessGroup | None:
        if has_low_priority:
            lower_priority()  # of this thread, which ends soon, and of those that the group starts
        local = group is not None
        created: dist.ProcessGroup | None
        created = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=local)
        return created

    created = make_group(given, make, timeout)
    assert created is not None
    return TorchLink(created, timeout, group)


def _get_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return a group's timeout, which is private to torch, or else its default."""
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)
