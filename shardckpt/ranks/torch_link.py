"""A link over a torch process group for CPU tensors, which its ranks make after they have met."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardckpt.errors import RankError
from shardckpt.events.recorder import get_current_call
from shardckpt.ranks.bounded_store import ASK_S, GRACE_S, BoundedStore, run_within
from shardckpt.ranks.linked_group import LOST_RANK_FIX, RankLink
from shardckpt.ranks.wait_notice import WaitBoard, announce_wait, name_ranks
from shardckpt.storage.linux_syscalls import lower_priority
from shardckpt.torch_features import get_group_store

__all__ = ["TorchLink", "link_ranks", "make_group", "meet"]

_DATA = 1  # tag of tensors, whose order among messages does not matter

_SIZE_BYTES, _FIRST_BYTES = 8, 1016
# Bytes that begin each message: most messages are one packet, since each packet waits for the other rank.
_PACKET_BYTES = _SIZE_BYTES + _FIRST_BYTES

_SILENT = (
    "rank 0 of {size} is gone or did not answer in time: the store that the ranks meet through, which rank 0 hosts "
    "unless a launcher does, does not answer ({error})"
)


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
        BoundedStore(get_group_store(self._group)).leave_note(key, text)

    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        """Return a key's text from the group's store, unless it does not answer."""
        return BoundedStore(get_group_store(self._group)).find_note(key, wait_s=wait_s)

    def find_host(self, rank: int) -> str:
        """Return the name that the rank gave when the ranks met."""
        given = dist.group.WORLD if self._ranks is None else self._ranks
        return "" if given is None else _find_host(given, rank)

    def renew(self, *, has_low_priority: bool = False) -> RankLink:
        """Create another process group with the same ranks."""
        return link_ranks(self._ranks, has_low_priority=has_low_priority)


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


# Number of times that the ranks of a group have met.
_CALLS: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def meet(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Wait until every rank arrives, to name a missing one."""
    # Creating a group when a rank is missing would not name that rank.
    store, size, seconds = get_group_store(group), group.size(), timeout.total_seconds()
    number = _CALLS.get(group, 0) + 1
    keys = [_build_key(number, each) for each in range(size)]
    own, call = keys[group.rank()], get_current_call().name
    try:
        with announce_wait(_MeetingBoard(store, keys), group.rank(), size, "the first save"):
            missing = BoundedStore(store, seconds + GRACE_S).find_missing(own, keys, seconds)
    except (TimeoutError, RuntimeError) as error:
        raise RankError(_SILENT.format(size=size, error=error), rank=0, fix=LOST_RANK_FIX) from error
    if missing:
        BoundedStore(store).remove([own])  # ranks that arrive later must see that this rank no longer waits
        what = f"{name_ranks(missing)} of {size} did not come to {f'`{call}`' if call else 'the first save'} in time"
        raise RankError(what, rank=missing[0], fix=LOST_RANK_FIX)
    _CALLS[group] = number


class _MeetingBoard(WaitBoard):
    """The keys by which ranks meet: a rank that has set its key waits."""

    def __init__(self, store: Any, keys: Sequence[str]) -> None:
        self._store, self._keys = BoundedStore(store), keys

    def note_wait(self, rank: int, *, is_waiting: bool) -> None:
        """Note nothing: the key is set already."""

    def is_waiting(self, rank: int) -> bool:
        return bool(self._store.find_note(self._keys[rank]))


def _build_key(number: int, rank: int) -> str:
    return f"shardckpt/here/{number}/{rank}"


def _find_host(group: dist.ProcessGroup, rank: int) -> str:
    """Return the host name that a rank gave when the ranks of a group met last."""
    return BoundedStore(get_group_store(group)).find_note(_build_key(_CALLS.get(group, 0), rank))


def make_group(
    group: dist.ProcessGroup, make: Callable[[], dist.ProcessGroup | None], timeout: timedelta
) -> dist.ProcessGroup | None:
    """Return a new process group with another group's ranks, after all have met."""
    try:
        return run_within(timeout.total_seconds() + GRACE_S, make)
    except (RuntimeError, TimeoutError) as error:
        keys = [f"shardckpt/unconnected/{_CALLS[group]}/{each}" for each in range(group.size())]
        try:
            store = BoundedStore(get_group_store(group), ASK_S * 2)
            silent = store.find_missing(keys[group.rank()], keys, ASK_S)
        except (RuntimeError, TimeoutError):
            silent = [0]
        named = f"; no word from {name_ranks(silent)}" if silent else ""
        text = f"the ranks could not connect to each other{named}: {' '.join(str(error).split())[:300]}"
        raise RankError(text, rank=silent[0] if silent else -1, fix=LOST_RANK_FIX) from error
