"""Links between a group's ranks: messages, notes that reach ranks when messages do not, and a first meeting.

A store on a rank (a TCPStore; with `env://` on rank 0) does not answer while that rank is stopped. Most of its calls
have no timeout: torch's `check`, `set` and `add` wait forever. Therefore each call runs on its own thread, which is
abandoned if it does not end in time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardckpt.errors import RankError
from shardckpt.shared_store.store_group import run_within
from shardckpt.storage.linux_syscalls import lower_priority
from shardckpt.torch_features import get_group_store

_DATA = 1  # tag of tensors, whose order among messages does not matter

_SIZE_BYTES, _FIRST_BYTES = 8, 1016
# Bytes that begin each message: most messages are one packet, since each packet waits for the other rank.
_PACKET_BYTES = _SIZE_BYTES + _FIRST_BYTES

_ASK_S = 2.0  # maximum seconds for one call to a store after a rank is known to be gone
_GRACE_S = 0.5  # seconds after the ranks' timeout in which a store that answers can still name the missing rank

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05


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


class BoundedStore:
    """A process group's store, for messages that must not block for long."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def leave(self, key: str, text: str) -> None:
        """Set a key unless the store does not answer; never raises."""
        with suppress(RuntimeError, TimeoutError):
            run_within(_ASK_S, lambda: self._store.set(key, text))

    def find(self, key: str, *, wait_s: float = 0.0) -> str:
        """Return a key's text; empty if it is not set or the store does not answer."""
        end = time.monotonic() + wait_s

        def ask() -> str:
            while not self._store.check([key]):
                if time.monotonic() >= end:
                    return ""
                time.sleep(0.05)
            return bytes(self._store.get(key)).decode("utf-8", "replace")

        with suppress(RuntimeError, TimeoutError):  # the rank that hosts the store is gone
            return run_within(max(wait_s + _GRACE_S, _ASK_S), ask)
        return ""


# Number of times that the ranks of a group have met.
_CALLS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def meet(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Wait until every rank arrives, to name a missing one."""
    # Creating a group when a rank is missing would not name that rank.
    store, size = get_group_store(group), group.size()
    number = _CALLS.get(group, 0) + 1
    keys = [f"shardckpt/here/{number}/{each}" for each in range(size)]
    own = keys[group.rank()]
    seconds = timeout.total_seconds()
    try:
        missing = run_within(seconds + _GRACE_S, lambda: _missing(store, own, keys, seconds))
    except (TimeoutError, RuntimeError) as error:
        raise RankError(_SILENT.format(size=size, error=error), rank=0, fix=LOST_RANK_FIX) from error
    if missing:
        # Ranks that arrive later must see that this rank no longer waits.
        with suppress(RuntimeError, TimeoutError):
            run_within(_ASK_S, lambda: store.delete_key(own))
        named = ", ".join(f"rank {each}" for each in missing)
        raise RankError(f"{named} of {size} did not come to the first save in time", rank=missing[0], fix=LOST_RANK_FIX)
    _CALLS[group] = number


def _missing(store: Any, own: str, keys: Sequence[str], seconds: float) -> list[int]:
    """Announce this rank; return the ranks that have not arrived in time."""
    # One request asks for all ranks: all of them ask one server.
    end, poll_s = time.monotonic() + seconds, _FIRST_POLL_S
    store.set(own, "1")
    while not store.check([*keys]):
        if time.monotonic() > end:
            return [each for each, key in enumerate(keys) if not store.check([key])]
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.5, _LAST_POLL_S)
    return []


_SILENT = (
    "rank 0 of {size} is gone or did not answer in time: the store that the ranks meet through, which rank 0 hosts "
    "unless a launcher does, does not answer ({error})"
)
LOST_RANK_FIX = "Its own log says why; the others have stopped. Saves and loads are calls that every rank makes."


def make_group(
    group: dist.ProcessGroup, make: Callable[[], dist.ProcessGroup | None], timeout: timedelta
) -> dist.ProcessGroup | None:
    """Return a new process group with another group's ranks, after all have met."""
    store, rank, size = get_group_store(group), group.rank(), group.size()
    keys = [f"shardckpt/unconnected/{_CALLS[group]}/{each}" for each in range(size)]
    try:
        return run_within(timeout.total_seconds() + _GRACE_S, make)
    except (RuntimeError, TimeoutError) as error:
        try:
            silent = run_within(_ASK_S * 2, lambda: _missing(store, keys[rank], keys, _ASK_S))
        except (RuntimeError, TimeoutError):
            silent = [0]
        named = f"; no word from {', '.join(f'rank {each}' for each in silent)}" if silent else ""
        text = f"the ranks could not connect to each other{named}: {' '.join(str(error).split())[:300]}"
        raise RankError(text, rank=silent[0] if silent else -1, fix=LOST_RANK_FIX) from error
