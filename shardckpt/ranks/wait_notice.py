"""Report who waits for whom: one line after 10 s, after 60 s, then every 5 minutes."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count

from shardckpt import events  # its names are loaded on first use, and few waits last long
from shardckpt.events.recorder import get_current_call, send_event
from shardckpt.ranks.bounded_store import BoundedStore

__all__ = ["NOTICES_S", "StoreBoard", "WaitBoard", "announce_wait", "name_ranks"]

_LOG = logging.getLogger("shardckpt")

NOTICES_S = (10.0, 60.0)  # seconds after which a wait is reported
_EVERY_S = 300.0  # seconds between later notices
_SHOWN = 20  # maximum number of ranks that a line names


class WaitBoard(ABC):
    """Where ranks note that they wait."""

    @abstractmethod
    def note_wait(self, rank: int, *, is_waiting: bool) -> None:
        """Note whether this rank waits; never raises."""

    @abstractmethod
    def is_waiting(self, rank: int) -> bool:
        """Return True if a rank waits; False if that is unknown."""

    def find_host(self, rank: int) -> str:  # noqa: ARG002
        """Return the name of a rank's machine; empty if it is unknown."""
        return ""

    def name_rank(self, rank: int) -> int:
        """Return the number that messages give a rank."""
        return rank


class StoreBoard(WaitBoard):
    """Notes in the store that the ranks share."""

    def __init__(self, store: BoundedStore) -> None:
        self._store = store

    def note_wait(self, rank: int, *, is_waiting: bool) -> None:
        """Set or clear the rank's key."""
        self._store.leave_note(f"shardckpt/waits/{rank}", "1" if is_waiting else "")

    def is_waiting(self, rank: int) -> bool:
        """Look at the rank's key."""
        return bool(self._store.find_note(f"shardckpt/waits/{rank}"))


class _Wait:
    """This rank's wait in one collective."""

    def __init__(self, board: WaitBoard, rank: int, size: int, what: str) -> None:
        self._board, self._rank, self._size = board, rank, size
        self._call, self._what = get_current_call(), what
        self._start = time.monotonic()
        self._notices = chain(NOTICES_S, count(NOTICES_S[-1] + _EVERY_S, _EVERY_S))
        self._due_s = next(self._notices)
        self.has_note = False
        # Other ranks may have started to wait a few seconds later, and must have noted it by then.
        self.next_time = self._start + self._due_s / 2

    def act(self) -> None:
        """Note the wait at first, then report it."""
        is_first, seconds = not self.has_note, self._due_s
        if not is_first:
            self._due_s = next(self._notices)
        self.has_note, self.next_time = True, self._start + self._due_s  # also if the rest fails
        if is_first:
            self._board.note_wait(self._rank, is_waiting=True)
        else:
            self._report(seconds)

    def end(self) -> None:
        """Remove the note."""
        self._board.note_wait(self._rank, is_waiting=False)

    def _report(self, seconds: float) -> None:
        """Name the ranks that do not wait, on the lowest rank that does."""
        if any(self._board.is_waiting(rank) for rank in range(self._rank)):
            return
        later = range(self._rank + 1, self._size)
        missing = [*range(self._rank), *(rank for rank in later if not self._board.is_waiting(rank))]
        named = self._name(missing) if missing else "the other ranks, which wait too"
        call, rank = self._call.name or self._what, self._board.name_rank(self._rank)
        _LOG.warning("rank %d waits in %s for %s, %.0f s", rank, call, named, seconds)
        waits_for = tuple(map(self._board.name_rank, missing))
        event = events.WaitEvent(self._call.path, seconds, rank=rank, call=call, waits_for=waits_for)
        send_event(event, self._call.on_event)

    def _name(self, ranks: Sequence[int]) -> str:
        host = self._board.find_host(ranks[0]) if len(ranks) == 1 else ""
        return name_ranks([*map(self._board.name_rank, ranks)]) + (f" (host {host})" if host else "")


class _Watch:
    """A thread that acts for waits that last long; it ends when nothing waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: list[_Wait] = []
        self._ended: list[_Wait] = []  # whose notes are to be removed
        self._is_running = False

    def add(self, wait: _Wait) -> None:
        """Watch a wait."""
        with self._changed:
            self._waits.append(wait)
            if self._is_running:  # it wakes before a later wait has to act
                return
            try:
                threading.Thread(target=self._run, name="wait notices", daemon=True).start()
                self._is_running = True
            except RuntimeError:  # the process ends, and starts no more threads
                self._waits.remove(wait)

    def remove(self, wait: _Wait) -> None:
        """Stop to watch a wait, which has ended."""
        with self._changed:
            if wait in self._waits:
                self._waits.remove(wait)
            if wait.has_note:
                self._ended.append(wait)
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waits and not self._ended:
                    self._is_running = False
                    return
                due = min((wait.next_time for wait in self._waits), default=0.0)
                if not self._ended:
                    self._changed.wait(max(0.0, due - time.monotonic()))
                ended, self._ended = self._ended, []
                now = time.monotonic()
                waits = [wait for wait in self._waits if wait.next_time <= now]
            for wait in waits:
                with suppress(Exception):  # a notice that fails must not end the thread
                    wait.act()
                if wait not in self._waits and wait not in ended:  # it ended meanwhile
                    ended.append(wait)
            for wait in ended:
                with suppress(Exception):
                    wait.end()


_WATCH = _Watch()


def _forget_waits() -> None:
    """Forget the waits in a forked process, which has no thread for them."""
    global _WATCH  # noqa: PLW0603
    _WATCH = _Watch()


os.register_at_fork(after_in_child=_forget_waits)


@contextmanager
def announce_wait(board: WaitBoard, rank: int, size: int, what: str) -> Iterator[None]:
    """Report that this rank waits for others, if the block lasts long.

    Args:
        board: Where the ranks note that they wait.
        rank: This rank.
        size: How many ranks there are.
        what: What the ranks do, for reports outside of a named call.
    """
    wait, watch = _Wait(board, rank, size, what), _WATCH
    watch.add(wait)
    try:
        yield
    finally:
        watch.remove(wait)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, at most 20."""
    named = ", ".join(f"rank {rank}" for rank in ranks[:_SHOWN])
    return named + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
