"""A group whose ranks send messages through a torch store, without a process group.

A process group's collective ignores signals until it ends, has one time limit however long the others work, and
exchanges addresses under torch's own keys. Here each wait ends when the other rank has left or sends no heartbeat.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from shardckpt.errors import RankError, ShardckptError
from shardckpt.groups import Group

T = TypeVar("T")

TOKENS = "tokens"  # key under which a meeting lists its ranks; removed with the last message
SILENCE_S = 60.0  # seconds without a heartbeat after which a rank counts as dead, and a store as lost
_HEARTBEAT_S = 2.0  # seconds between a rank's heartbeats

# Maximum seconds that rank 0, which may host the store, waits for ranks to read the last message.
_END_S = 10.0

_LEAVE_S = 1.0  # maximum seconds for a store call by a rank that leaves with an error

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.1
_PART_BYTES = 4 << 20  # per message; stores refuse values above 8 MiB
_SIZE = struct.Struct("<Q")
_LEFT = "left"
_RANK_FIX = "Its own log says why; nothing was written."


class RankStore:
    """A torch store whose calls have a time limit and leave signals to the main thread."""

    def __init__(self, store: Any, limit_s: float = SILENCE_S) -> None:
        self._store, self._limit_s = store, limit_s

    def has(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set. Raises RuntimeError, TimeoutError."""
        return self._call(lambda: bool(self._store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set. Raises RuntimeError, TimeoutError."""
        return self._call(lambda: bytes(self._store.get(key)))

    def find(self, keys: Iterable[str]) -> list[bytes | None]:
        """Return the keys' values; None for keys that are not set. Raises RuntimeError, TimeoutError."""
        return self._call(lambda: [bytes(self._store.get(key)) if self._store.check([key]) else None for key in keys])

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key. Raises RuntimeError, TimeoutError."""
        self._call(lambda: self._store.set(key, value))

    def remove(self, keys: Iterable[str]) -> None:
        """Remove keys if the store answers; never raises."""
        with suppress(RuntimeError, TimeoutError, NotImplementedError):
            self._call(lambda: [self._store.delete_key(key) for key in keys])

    def with_short_limit(self) -> RankStore:
        """Return the same store with the short limit for a rank that leaves."""
        return RankStore(self._store, min(self._limit_s, _LEAVE_S))

    def _call(self, work: Callable[[], T]) -> T:
        return run_within(self._limit_s, work)


class StoreGroup(Group):
    """Ranks that met through a store; rank 0 forwards their messages."""

    def __init__(self, store: RankStore, rank: int, size: int, silence_s: float = SILENCE_S) -> None:
        self._store, self._rank, self._size, self._silence_s = store, rank, size, silence_s
        self._number = 0
        self._is_over = threading.Event()
        others = range(1, size) if rank == 0 else [0]
        self._heartbeats: dict[int, tuple[bytes | None, float]] = {each: (None, time.monotonic()) for each in others}
        self._next_look = 0.0

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def all_gather(self, data: bytes) -> list[bytes]:
        """Send the bytes to rank 0, and receive all ranks' bytes from it."""
        self._number += 1
        with self._named():
            if self._rank != 0:
                self._send(self._key(self._rank), data)
                return _split(self._recv(self._key(0)))
            gathered = [data, *(self._recv(self._key(each)) for each in range(1, self._size))]
            self._send(self._key(0), b"".join(_SIZE.pack(len(each)) + each for each in gathered))
            if self._number > 1:  # the others have read the earlier message, since they have sent another
                self._remove(self._key(0, self._number - 1))
            for each in range(1, self._size):
                self._remove(self._key(each))
            return gathered

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the source rank's bytes."""
        return self.all_gather(data if data is not None and self._rank == source else b"")[source]

    @contextmanager
    def live(self) -> Iterator[None]:
        """Send heartbeats during a block, and notify the others if an exception ends it."""
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()
        try:
            yield
            self._confirm_end(self._store)
        except BaseException as error:
            store = self._store.with_short_limit()
            self._leave(store, error)
            if self._rank != 0 or isinstance(error, Exception):  # an interrupted rank waits for no other rank
                self._confirm_end(store)
            raise
        finally:
            self._is_over.set()

    def _send_heartbeats(self) -> None:
        number = 0
        while not self._is_over.is_set():
            number += 1
            with suppress(RuntimeError, TimeoutError):
                self._store.set(_heartbeat_key(self._rank), str(number))
            self._is_over.wait(min(_HEARTBEAT_S, self._silence_s / 4))

    def _leave(self, store: RankStore, error: BaseException) -> None:
        text = str(error) if isinstance(error, ShardckptError) else f"{type(error).__name__} {error}".rstrip()
        with suppress(RuntimeError, TimeoutError):
            if not store.has([_LEFT]):  # the rank that left earlier has the reason
                store.set(_LEFT, f"{self._rank} {text[:500]}")

    def _confirm_end(self, store: RankStore) -> None:
        """Confirm that this rank needs nothing more; rank 0 waits for that, then removes all keys."""
        keys = [f"done/{each}" for each in range(1, self._size)]
        with suppress(RuntimeError, TimeoutError):
            if self._rank != 0:
                store.set(keys[self._rank - 1], "1")
                return
            end = time.monotonic() + _END_S
            while not store.has(keys):
                if time.monotonic() > end:
                    return
                time.sleep(_FIRST_POLL_S)
            self._remove(self._key(0))
            store.remove([*keys, *map(_heartbeat_key, range(self._size)), TOKENS])

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
        what = f"{named} of {self._size} sent no heartbeat for {self._silence_s:g} s"
        return RankError(what, rank=silent[0], fix=_RANK_FIX)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the lost store in errors that its calls raise."""
        try:
            yield
        except RankError:
            raise
        except (RuntimeError, TimeoutError) as error:
            what = f"the store that the {self._size} ranks send messages through is lost: {_first_line(error)}"
            fix = "Rank 0, or the launcher, hosts it and has ended or stopped; its own log says why."
            raise RankError(what, rank=0, fix=fix) from error


def _heartbeat_key(rank: int) -> str:
    """Return the key whose value changes while the rank lives."""
    return f"heartbeat/{rank}"


def _split(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(data):
        size = _SIZE.unpack_from(data, at)[0]
        parts.append(data[at + _SIZE.size : at + _SIZE.size + size])
        at += _SIZE.size + size
    return parts


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Return a function's result, or raise its exception or TimeoutError, within a time limit."""
    ended: SimpleQueue[Callable[[], T]] = SimpleQueue()

    # The main thread can handle signals while another thread, abandoned at the limit, runs the call.
    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001  (raised by whoever waits)
            ended.put(_raiser(error))
        else:
            ended.put(lambda: value)

    threading.Thread(target=run, name="time limit", daemon=True).start()
    try:
        result = ended.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer after {seconds:g} s") from None
    return result()


def _raiser(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
