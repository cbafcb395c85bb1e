"""Find a call's other ranks through the launcher's store, with time limits.

The store may belong to a training: all keys have this package's prefix, and no other key is read. Ranks meet once per
call, and a store may still hold keys from dead calls. Therefore rank 0 starts each meeting under a new random name. A
rank joins the meeting whose list has the random token that the rank wrote.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch lists neither

from shardckpt.errors import RankError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.ranks.bounded_store import BoundedStore, run_within
from shardckpt.ranks.group import Group
from shardckpt.ranks.linked_group import ALONE
from shardckpt.ranks.store_group import LEAVE_S, SILENCE_S, TOKENS, StoreGroup
from shardckpt.ranks.torch_group import current_group
from shardckpt.ranks.wait_notice import name_ranks

__all__ = ["MEETING_S", "NOTICE_S", "Place", "join_ranks", "read_place"]

MEETING_S = 300.0  # seconds that ranks wait for each other to come
NOTICE_S = 10.0  # seconds after which a waiting rank names the ranks it waits for

_POLL_S = 0.05
_ASK_S = 10.0  # maximum seconds for a store call before the ranks have met; then another connection is tried

_PREFIX = "shardckpt/ranks"
_CURRENT, _NO_MEETING = "current", "-"
_FIX = (
    "Every rank has to make the same call with the same arguments, as under torchrun; for one process alone pass"
    " parallel=False (--no-parallel)."
)
# Stores that this process hosts. They stay: a later process group shares their port.
_HOSTED: dict[tuple[str, int], Any] = {}


@dataclass(frozen=True)
class Place:
    """Address at which the ranks meet, from the launcher's environment variables."""

    rank: int
    size: int
    host: str  # store's host
    port: int
    is_host: bool  # whether this process hosts the store unless another process does


def read_place() -> Place:
    """Return the place that the environment describes."""
    rank, size, port = (_read_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < size:
        raise _wrong(f"RANK must be below WORLD_SIZE, {size}, got {rank}")
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, size, _read("MASTER_ADDR"), port, is_host=rank == 0 and not has_agent)


def _read(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise _wrong(f"environment variable {name} expected, but not set")
    return value


def _read_number(name: str) -> int:
    value = _read(name)
    if not value.isdecimal():
        raise _wrong(f"{name} must be a number, got {value}")
    return int(value)


def _wrong(what: str) -> UsageError:
    fix = "Start them with torchrun; for one process that does all the work pass parallel=False (--no-parallel)."
    return UsageError(f"the environment does not describe the ranks: {what}", fix=fix)


@contextmanager
def join_ranks(
    call: str, *, place: Place | None = None, meeting_s: float | None = None, silence_s: float = SILENCE_S
) -> Iterator[Group]:
    """Yield the group with all ranks: torch's if it is initialized, else one from a meeting."""
    if dist.is_initialized():
        yield current_group()
        return
    place = place or read_place()
    if place.size == 1:
        yield ALONE
        return
    # Seconds without a heartbeat after which a rank counts as dead: `silence_s`.
    group = _Meeting(place, call, MEETING_S if meeting_s is None else meeting_s).hold(silence_s)
    with group.live():
        yield group


class _Meeting:
    """One attempt to meet the other ranks."""

    def __init__(self, place: Place, call: str, limit_s: float) -> None:
        self._place, self._limit_s = place, limit_s
        self._prefix = f"{_PREFIX}/{place.size}/{hashlib.blake2b(call.encode(), digest_size=8).hexdigest()}"
        self._start = time.monotonic()
        self._token = uuid.uuid4().hex
        self._name = _NO_MEETING
        self._missing = list(range(1, place.size)) if place.rank == 0 else [0]
        self._has_warned = False
        self._trouble = ""

    def hold(self, silence_s: float) -> StoreGroup:
        """Return the group once all ranks have come. Raises RankError."""
        store: Any = None
        try:
            while True:
                try:
                    store = _connect(self._place)
                    while not self._look(BoundedStore(PrefixStore(self._prefix, store), _ASK_S)):
                        self._wait()
                # Refused, lost, or too slow: the store may belong to a call that ends.
                except (OSError, RuntimeError) as error:
                    if isinstance(error, RankError):
                        raise
                    self._trouble = str(error).partition("\n")[0]
                    self._wait()
                else:
                    break
        except BaseException:
            self._leave(store)
            raise
        own = PrefixStore(f"{self._prefix}/{self._name}", store)
        return StoreGroup(BoundedStore(own, silence_s), self._place.rank, self._place.size, silence_s)

    def _look(self, store: BoundedStore) -> bool:
        """Return True if all ranks have come; else note the missing ones. Raises RuntimeError, TimeoutError."""
        self._trouble = ""
        return self._look_for_others(store) if self._place.rank == 0 else self._look_for_first(store)

    def _look_for_others(self, store: BoundedStore) -> bool:
        if self._name == _NO_MEETING:
            self._name = self._token
        if store.find([_CURRENT]) != [self._name.encode()]:
            store.set(_CURRENT, self._name)
        others = range(1, self._place.size)
        tokens = store.find(self._here(each) for each in others)
        self._missing = [rank for rank, token in zip(others, tokens, strict=True) if token is None]
        if self._missing:
            return False
        store.set(self._tokens_key, b" ".join(token for token in tokens if token is not None))
        store.set(_CURRENT, _NO_MEETING)
        store.remove(self._here(each) for each in others)
        return True

    def _look_for_first(self, store: BoundedStore) -> bool:
        current = (store.find([_CURRENT])[0] or _NO_MEETING.encode()).decode()
        if current not in (_NO_MEETING, self._name):
            self._name = current
            store.set(self._here(self._place.rank), self._token)
        if self._name == _NO_MEETING:
            return False
        tokens = store.find([self._tokens_key])[0]
        if tokens is not None and self._token in tokens.decode().split():
            return True
        others = [each for each in range(1, self._place.size) if each != self._place.rank]
        here = store.find(self._here(each) for each in others) if current == self._name else []
        self._missing = [each for each, token in zip(others, here, strict=False) if token is None] or [0]
        return False

    def _here(self, rank: int) -> str:
        return f"{self._name}/here/{rank}"

    @property
    def _tokens_key(self) -> str:
        return f"{self._name}/{TOKENS}"

    def _wait(self) -> None:
        """Wait a moment, warn about missing ranks, and raise RankError at the limit."""
        waited_s = time.monotonic() - self._start
        if waited_s > self._limit_s:
            what = f"{self._describe()} did not come within {self._limit_s:g} s"
            raise RankError(what, rank=self._missing[0], fix=_FIX)
        if waited_s > NOTICE_S and not self._has_warned:
            self._has_warned = True
            warn_user(f"rank {self._place.rank} waits for {self._describe()}, for {self._limit_s:g} s at most. {_FIX}")
        time.sleep(_POLL_S)

    def _describe(self) -> str:
        place = self._place
        where = f" ({place.host}:{place.port}: {self._trouble})" if self._trouble else f" ({place.host}:{place.port})"
        return f"{name_ranks(self._missing)} of {place.size}{where}"

    def _leave(self, store: Any) -> None:
        """Remove this rank's keys, so that no rank counts on it."""
        if store is None or self._name == _NO_MEETING:
            return
        rank = self._place.rank
        own = _CURRENT if rank == 0 else self._here(rank)
        BoundedStore(PrefixStore(self._prefix, store)).with_limit(LEAVE_S).remove([own])


def _connect(place: Place) -> Any:
    """Return a connection to the store; this process hosts it if it should and no other does."""
    if place.is_host:
        known = _HOSTED.get((place.host, place.port))
        if known is not None:
            return known
        try:
            store = _open_store(place, is_host=True)
        except RuntimeError:  # the address is in use by another process for this rank, whose store we can share
            pass
        else:
            _HOSTED[place.host, place.port] = store
            return store
    # torch logs pages about each refused attempt
    socket.create_connection((place.host, place.port), timeout=2.0).close()
    return run_within(_ASK_S, lambda: _open_store(place, is_host=False))


def _open_store(place: Place, *, is_host: bool) -> Any:
    return TCPStore(
        place.host,
        place.port,
        is_master=is_host,
        timeout=timedelta(seconds=_ASK_S),
        wait_for_workers=False,
        multi_tenant=True,
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )
