"""Wait for other ranks through their group's store, with time limits.

A store on a rank (a TCPStore; with `env://` on rank 0) does not answer while that rank is stopped. Most of its calls
have no timeout: torch's `check`, `set` and `add` wait forever. Therefore each call runs on its own thread, which is
abandoned if it does not end in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardckpt.errors import RankError
from shardckpt.shared_store.time_limit import run_within
from shardckpt.torch_features import get_group_store

ASK_S = 2.0  # maximum seconds for one call to a store after a rank is known to be gone
_GRACE_S = 0.5  # seconds after the ranks' timeout in which a store that answers can still name the missing rank

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05


class BoundedStore:
    """A process group's store, for messages that must not block for long."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def leave(self, key: str, text: str) -> None:
        """Set a key unless the store does not answer; never raises."""
        with suppress(RuntimeError, TimeoutError):
            run_within(ASK_S, lambda: self._store.set(key, text))

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
            return run_within(max(wait_s + _GRACE_S, ASK_S), ask)
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
            run_within(ASK_S, lambda: store.delete_key(own))
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
            silent = run_within(ASK_S * 2, lambda: _missing(store, keys[rank], keys, ASK_S))
        except (RuntimeError, TimeoutError):
            silent = [0]
        named = f"; no word from {', '.join(f'rank {each}' for each in silent)}" if silent else ""
        text = f"the ranks could not connect to each other{named}: {' '.join(str(error).split())[:300]}"
        raise RankError(text, rank=silent[0] if silent else -1, fix=LOST_RANK_FIX) from error
