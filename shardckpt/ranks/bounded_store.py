"""A torch store whose calls end in time.

A store on a rank (a TCPStore; with `env://` on rank 0) does not answer while that rank is stopped. Most of its calls
have no timeout: torch's `check`, `set` and `add` wait forever. Therefore each call runs on its own thread, which is
abandoned if it does not end in time; the main thread can handle signals meanwhile.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

__all__ = ["ASK_S", "GRACE_S", "BoundedStore", "run_within"]

T = TypeVar("T")

ASK_S = 2.0  # maximum seconds for one call to a store after a rank is known to be gone
GRACE_S = 0.5  # seconds after the ranks' timeout in which a store that answers can still name the missing rank

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05


class BoundedStore:
    """A torch store whose calls raise RuntimeError if it is lost, and TimeoutError at a time limit."""

    def __init__(self, store: Any, limit_s: float = ASK_S) -> None:
        self._store, self._limit_s = store, limit_s

    def has(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        return self._call(lambda: bool(self._store.check(list(keys))))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is set."""
        return self._call(lambda: bytes(self._store.get(key)))

    def find(self, keys: Iterable[str]) -> list[bytes | None]:
        """Return the keys' values; None for keys that are not set."""
        return self._call(lambda: [bytes(self._store.get(key)) if self._store.check([key]) else None for key in keys])

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._call(lambda: self._store.set(key, value))

    def remove(self, keys: Iterable[str]) -> None:
        """Remove keys if the store answers; never raises."""
        with suppress(RuntimeError, TimeoutError, NotImplementedError):
            self._call(lambda: [self._store.delete_key(key) for key in keys])

    def with_limit(self, limit_s: float) -> BoundedStore:
        """Return the same store with this limit, if it is shorter."""
        return BoundedStore(self._store, min(self._limit_s, limit_s))

    def leave_note(self, key: str, text: str) -> None:
        """Set a key if the store answers; never raises."""
        with suppress(RuntimeError, TimeoutError):
            self.set(key, text)

    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        """Return a key's text, waiting for it; empty if it is not set or the store does not answer."""

        def ask() -> str:
            end = time.monotonic() + wait_s
            while not self._store.check([key]):
                if time.monotonic() >= end:
                    return ""
                time.sleep(_LAST_POLL_S)
            return bytes(self._store.get(key)).decode("utf-8", "replace")

        with suppress(RuntimeError, TimeoutError):  # the rank that hosts the store is gone
            return run_within(max(wait_s + GRACE_S, self._limit_s), ask)
        return ""

    def find_missing(self, own: str, keys: Sequence[str], wait_s: float) -> list[int]:
        """Set the own key to this machine's name; return the indices of keys that are not set in time."""

        # One request asks for all ranks: all of them ask one server. One thread waits for all requests.
        def wait() -> list[int]:
            end, poll_s = time.monotonic() + wait_s, _FIRST_POLL_S
            self._store.set(own, socket.gethostname() or "1")
            while not self._store.check([*keys]):
                if time.monotonic() > end:
                    return [each for each, key in enumerate(keys) if not self._store.check([key])]
                time.sleep(poll_s)
                poll_s = min(poll_s * 1.5, _LAST_POLL_S)
            return []

        return self._call(wait)

    def _call(self, work: Callable[[], T]) -> T:
        return run_within(self._limit_s, work)


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """Return a function's result, or raise its exception or TimeoutError, within a time limit."""
    ended: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            ended.put((work(), None))
        except BaseException as error:  # noqa: BLE001  (raised by whoever waits)
            ended.put((None, error))

    threading.Thread(target=run, name="time limit", daemon=True).start()
    try:
        value, error = ended.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer after {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None alone if the work returned None
