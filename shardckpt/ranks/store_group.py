"""A group whose ranks send messages through a torch store, without a process group.

A process group's collective ignores signals until it ends, has one time limit however long the others work, and
exchanges addresses under torch's own keys. Here each wait ends when the other rank has left or sends no heartbeat.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardckpt.errors import RankError, ShardckptError
from shardckpt.ranks.bounded_store import BoundedStore
from shardckpt.ranks.group import Group, join_parts, split_parts
from shardckpt.ranks.wait_notice import StoreBoard, announce_wait

__all__ = ["LEAVE_S", "SILENCE_S", "TOKENS", "StoreGroup"]

TOKENS = "tokens"  # key under which a meeting lists its ranks; removed with the last message
SILENCE_S = 60.0  # seconds without a heartbeat after which a rank counts as dead, and a store as lost
_HEARTBEAT_S = 2.0  # seconds between a rank's heartbeats

# Maximum seconds that rank 0, which may host the store, waits for ranks to read the last message.
_END_S = 10.0

LEAVE_S = 1.0  # maximum seconds for a store call by a rank that leaves with an error

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1
_PART_BYTES = 4 << 20  # per message; stores refuse values above 8 MiB
_SIZE = struct.Struct("<Q")
_LEFT = "left"
_RANK_FIX = "Its own log says why; nothing was written."


class StoreGroup(Group):
    """Ranks that met through a store; rank 0 forwards their messages."""

    def __init__(self, store: BoundedStore, rank: int, size: int, silence_s: float = SILENCE_S) -> None:
        self._store, self.rank, self.size, self._silence_s = store, rank, size, silence_s
        self._number = 0
        self._is_over = threading.Event()
        others = range(1, size) if rank == 0 else [0]
        self._heartbeats: dict[int, tuple[bytes | None, float]] = {each: (None, time.monotonic()) for each in others}
        self._next_look = 0.0

    def all_gather(self, data: bytes) -> list[bytes]:
        """Send the bytes to rank 0, and receive all ranks' bytes from it."""
        self._number += 1
        with self._named(), announce_wait(StoreBoard(self._store), self.rank, self.size, "the call"):
            if self.rank != 0:
                self._send(self._key(self.rank), data)
                return split_parts(self._recv(self._key(0)))
            gathered = [data, *(self._recv(self._key(each)) for each in range(1, self.size))]
            self._send(self._key(0), join_parts(gathered))
            if self._number > 1:  # the others have read the earlier message, since they have sent another
                self._remove(self._key(0, self._number - 1))
            for each in range(1, self.size):
                self._remove(self._key(each))
            return gathered

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Gather the bytes as any others."""
        return self.all_gather(data)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Send heartbeats during a block, and notify the others if an exception ends it."""
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()
        try:
            yield
            self._confirm_end(self._store)
        except BaseException as error:
            store = self._store.with_limit(LEAVE_S)
            self._leave(store, error)
            if self.rank != 0 or isinstance(error, Exception):  # an interrupted rank waits for no other rank
                self._confirm_end(store)
            raise
        finally:
            self._is_over.set()

    def _send_heartbeats(self) -> None:
        number = 0
        while not self._is_over.is_set():
            number += 1
            with suppress(RuntimeError, TimeoutError):
                self._store.set(_heartbeat_key(self.rank), str(number))
            self._is_over.wait(min(_HEARTBEAT_S, self._silence_s / 4))

    def _leave(self, store: BoundedStore, error: BaseException) -> None:
        text = str(error) if isinstance(error, ShardckptError) else f"{type(error).__name__} {error}".rstrip()
        with suppress(RuntimeError, TimeoutError):
            if not store.has([_LEFT]):  # the rank that left earlier has the reason
                store.set(_LEFT, f"{self.rank} {text[:500]}")

    def _confirm_end(self, store: BoundedStore) -> None:
        """Confirm that this rank needs nothing more; rank 0 waits for that, then removes all keys."""
        keys = [f"done/{each}" for each in range(1, self.size)]
        with suppress(RuntimeError, TimeoutError):
            if self.rank != 0:
                store.set(keys[self.rank - 1], "1")
                return
            end = time.monotonic() + _END_S
            while not store.has(keys):
                if time.monotonic() > end:
                    return
                time.sleep(_FIRST_POLL_S)
            self._remove(self._key(0))
            store.remove([*keys, *map(_heartbeat_key, range(self.size)), TOKENS])

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"{self._number if number is None else number}/{rank}"

    def _send(self, key: str, data: bytes) -> None:
        parts = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
        for at, part in enumerate(parts[1:], 1):
            self._store.set(f"{key}/{at}", part)
        self._store.set(key, _SIZE.pack(max(1, len(parts))) + b"".join(parts[:1]))

    def _recv(self, key: str) -> bytes:
        poll_s = _FIRST_POLL_S
        while not self._store.has([key]):
            gone = self._find_gone()
            if gone is not None:
                if self._store.has([key]):  # set after the first look, and before the sender left
                    break
                raise gone
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.5, _LAST_POLL_S)
        first = self._store.get(key)
        count = _SIZE.unpack_from(first)[0]
        return first[_SIZE.size :] + b"".join(self._store.get(f"{key}/{at}") for at in range(1, count))

    def _remove(self, key: str) -> None:
        with suppress(RuntimeError, TimeoutError):
            if self._store.has([key]):
                count = _SIZE.unpack_from(self._store.get(key))[0]
                self._store.remove([key, *(f"{key}/{at}" for at in range(1, count))])

    def _find_gone(self) -> RankError | None:
        """Return an error if a rank has left, or if an awaited rank sends no heartbeat."""
        if self._store.has([_LEFT]):
            left, _, text = self._store.get(_LEFT).decode("utf-8", "replace").partition(" ")
            return RankError(f"rank {left} left: {text}", rank=int(left), fix=_RANK_FIX)
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + min(_HEARTBEAT_S, self._silence_s / 4)
        for rank, sign in zip(self._heartbeats, self._store.find(map(_heartbeat_key, self._heartbeats)), strict=True):
            if sign != self._heartbeats[rank][0]:
                self._heartbeats[rank] = sign, now
        silent = [rank for rank, (_, since) in self._heartbeats.items() if now - since > self._silence_s]
        if not silent:
            return None
        named = ", ".join(f"rank {rank}" for rank in silent)
        what = f"{named} of {self.size} sent no heartbeat for {self._silence_s:g} s"
        return RankError(what, rank=silent[0], fix=_RANK_FIX)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the lost store in errors that its calls raise."""
        try:
            yield
        except RankError:
            raise
        except (RuntimeError, TimeoutError) as error:
            text = str(error).partition("\n")[0]
            what = f"the store that the {self.size} ranks send messages through is lost: {text}"
            fix = "Rank 0, or the launcher, hosts it and has ended or stopped; its own log says why."
            raise RankError(what, rank=0, fix=fix) from error


def _heartbeat_key(rank: int) -> str:
    """Return the key whose value changes while the rank lives."""
    return f"heartbeat/{rank}"
