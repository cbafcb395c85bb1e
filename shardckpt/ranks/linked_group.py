"""Ranks that send rank 0 a message over a link and get an answer; if a rank is lost, all others name it."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from shardckpt.errors import RankError
from shardckpt.events.recorder import Call, get_current_call
from shardckpt.ranks.group import FAILED, Group, frame_message, join_parts, split_parts
from shardckpt.ranks.wait_notice import WaitBoard, announce_wait

if TYPE_CHECKING:
    import torch

__all__ = ["ALONE", "LOST_RANK_FIX", "LinkedGroup", "RankLink", "Transfer"]

LOST_RANK_FIX = "Its own log says why; the others have stopped. Saves and loads are calls that every rank makes."

_ROUND_BYTES = 8  # bytes of the round's number, which precedes each message
_IS_GONE = "is gone or did not"  # answer in time, or come to a call in time
_MAX_CALL = 1000  # maximum characters of a call that a message names
_NOTICE_S = 2.0  # seconds in which a lost rank becomes known
_FIRST = "shardckpt/lost/first"  # key for the note that all ranks believe
_UNSURE = "unsure: "  # begins a note while its rank looks for the notes of others


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

    @property
    def named_size(self) -> int:
        """Number of ranks that messages give."""
        return self.size

    def name_rank(self, rank: int) -> int:
        """Return the number that messages give a rank."""
        return rank

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

    @abstractmethod
    def leave_note(self, key: str, text: str) -> None:
        """Leave a note for the other ranks if possible; never raises."""

    @abstractmethod
    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        """Return a note, waiting for it up to `wait_s` seconds; empty without one."""

    def find_host(self, rank: int) -> str:  # noqa: ARG002
        """Return the name of a rank's machine; empty if it is unknown."""
        return ""

    @abstractmethod
    def renew(self, *, has_low_priority: bool = False) -> RankLink:
        """Return a new link between the same ranks, with separate messages. Collective.

        Args:
            has_low_priority: Whether the threads of the new link run in the background.

        Raises:
            RankError: A rank did not call it in time.
        """


class _LinkBoard(WaitBoard):
    """Notes over a link."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def note_wait(self, rank: int, *, is_waiting: bool) -> None:
        self._link.leave_note(f"shardckpt/waits/{self.name_rank(rank)}", "1" if is_waiting else "")

    def is_waiting(self, rank: int) -> bool:
        return bool(self._link.find_note(f"shardckpt/waits/{self.name_rank(rank)}"))

    def name_rank(self, rank: int) -> int:
        return self._link.name_rank(rank)

    def find_host(self, rank: int) -> str:
        return self._link.find_host(rank)


class LinkedGroup(Group):
    """Ranks with a link between them; a single rank needs none."""

    # If a rank is lost, the errors on all other ranks name it. Messages are point-to-point, so rank 0 knows whose
    # connection broke or whose message is late. After a timeout a backend closes all its connections and cannot send.
    # Therefore a rank that loses another one leaves a note in the group's store. If a lost rank has left a note, other
    # ranks name the rank in that note.

    # Fraction of the timeout: rank 0 has to find the late rank before the others stop waiting for rank 0.
    _FIRST_WAITS = 0.75

    def __init__(self, link: RankLink | None = None) -> None:
        self._given = link
        self._round = 0
        self._round_start = time.monotonic()
        self._loss = ""  # which rank is lost, once this rank has lost one itself
        self._background: dict[str, LinkedGroup] = {}
        self._call = Call()  # the last one in which this rank sent a message
        self._is_first = False  # whether this round is the first one in its call
        self.has_lost_rank = False  # whether a rank is lost; no more messages may be sent then
        self.rank = link.rank if link is not None else 0
        self.size = link.size if link is not None else 1
        self._needed = self.size  # ranks from here on may leave before they have their answer

    def global_rank(self, rank: int) -> int:
        """Return the number that messages give a rank."""
        return rank if self._given is None else self._given.name_rank(rank)

    @property
    def timeout_s(self) -> float:
        """Maximum seconds that ranks wait for each other; 0 for a single rank."""
        return 0.0 if self._given is None else self._given.timeout.total_seconds()

    @property
    def is_broken(self) -> bool:
        """Whether a rank is lost here or in the background; all ranks need another group then."""
        return self.has_lost_rank or any(each.is_broken for each in self._background.values())

    def background(self, name: str = "", *, has_low_priority: bool = False) -> LinkedGroup:
        """Return the same ranks for a background thread. Collective at the first call."""
        if self.size > 1 and name not in self._background:
            self._background[name] = LinkedGroup(self._link.renew(has_low_priority=has_low_priority))
        return self._background.get(name, self)

    def derive(self, name: str, change: Callable[[RankLink], RankLink], *, needed: int) -> LinkedGroup:
        """Return the ranks of a changed link, of which only the first `needed` wait for each other's answers."""
        if name not in self._background:
            self._background[name] = LinkedGroup(change(self._link))
            self._background[name]._needed = needed
        return self._background[name]

    def all_gather(self, data: bytes) -> list[bytes]:
        """Send the bytes to rank 0, and receive all ranks' bytes from it."""
        return split_parts(self.ask_rank0("an all-gather", data, lambda each: [join_parts(each)] * len(each)))

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Gather the bytes as any others."""
        return self.all_gather(data)

    def _exchange(
        self, what: str, message: bytes | Exception, answer_all: Callable[[Callable[[], list[bytes]]], Sequence[bytes]]
    ) -> bytes:
        self._round += 1
        self._round_start = time.monotonic()
        call = get_current_call()
        # Without the function for events, which may refer to this group.
        self._is_first, self._call = call.number != self._call.number, call._replace(on_event=None)
        # No other messages can be received if this rank has lost one.
        lost = message if isinstance(message, RankError) and self.has_lost_rank else None
        is_alone = self._given is None
        waiting = nullcontext() if is_alone else announce_wait(_LinkBoard(self._link), self.rank, self.size, what)
        with waiting, self.in_step():
            self.expect_messages()
            if self.rank == 0:
                answers = answer_all(lambda: [frame_message(message), *self._gather_messages(lost)])
                self._send_all(answers)
                return answers[0]
            with self._report_lost_rank(lost):
                self._send_bytes(_frame_call(call) + frame_message(message), 0)
                answer = self._recv_bytes(0, time.monotonic() + self.timeout_s)
        if answer[:1] == FAILED and not isinstance(message, Exception):
            self.has_lost_rank = _IS_GONE.encode() in answer
        return answer

    def expect_messages(self) -> None:
        """Accept messages for the next `ask_rank0`, so that no rank waits until this one has time."""
        # `ask_rank0` does this too; call this before long work that precedes it.
        if self.has_lost_rank:
            return
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            with suppress(RuntimeError):  # raised again when the message is received
                self._link.expect_message(rank)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run an operation with several messages; if a signal ends it, ranks count as lost."""
        # The other ranks wait for the operation's next message. They would take this rank's next message for it, and
        # this rank would get an answer to another message.
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Mark ranks as lost: this rank leaves an operation before its last message."""
        self.has_lost_rank = self.size > 1

    def send(self, tensor: torch.Tensor, dst: int) -> Transfer:
        """Start to send bytes to a rank, which calls `recv`."""
        # The bytes must not change until the work is done. Both ranks call it between the same two `ask_rank0`.
        with self._detect_lost_rank(dst):
            return self._link.start_send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receive bytes that a rank sends."""
        self.wait(self.start_recv(tensor, src), src)

    def start_recv(self, tensor: torch.Tensor, src: int) -> Transfer:
        """Start to receive the next bytes that a rank sends; `wait` for them in this order."""
        with self._detect_lost_rank(src):
            return self._link.start_recv(tensor, src)

    def wait(self, work: Transfer, peer: int) -> None:
        """Wait until sent bytes have been received."""
        with self._detect_lost_rank(peer):
            work.wait(self._link.timeout)

    @contextmanager
    def _detect_lost_rank(self, peer: int) -> Iterator[None]:
        """Convert a broken connection to a RankError for the first lost rank, or the peer."""
        try:
            yield
        except RuntimeError as error:
            # After so long a rank may have closed its connections at a timeout.
            may_be_late = time.monotonic() - self._round_start >= self.timeout_s * self._FIRST_WAITS
            raise self._give_up({peer: error}, _NOTICE_S if may_be_late else 0.0) from error

    def _gather_messages(self, known: RankError | None) -> list[bytes]:
        if known is not None:
            raise known
        deadline = time.monotonic() + self.timeout_s * self._FIRST_WAITS
        messages, lost, others, own = [], {}, {}, _describe_call(self._call)
        for rank in range(1, self.size):
            try:
                name, data = _split_call(self._recv_bytes(rank, deadline))
            except RuntimeError as error:
                lost[rank] = error
                deadline = min(deadline, time.monotonic() + _NOTICE_S)  # the other ranks have sent theirs by now
                continue
            messages.append(data)
            if name and own not in ("", name) and data[:1] != FAILED:
                others[rank] = name
        if lost:
            raise self._give_up(lost)
        if others:
            rank, name = next(iter(others.items()))
            raise _build_mismatch(self.size, own, self.global_rank(rank), name)
        return messages

    def _send_all(self, answers: Sequence[bytes]) -> None:
        lost = {}
        for rank in range(1, self.size):
            try:
                self._send_bytes(answers[rank], rank)
            except RuntimeError as error:
                if rank < self._needed:
                    lost[rank] = error
        if lost and answers[0][:1] != FAILED:  # otherwise rank 0 raises why it failed
            raise self._give_up(lost)

    def _send_bytes(self, data: bytes, dst: int) -> None:
        self._link.send_message(self._round.to_bytes(_ROUND_BYTES, "little") + data, dst)

    def _recv_bytes(self, src: int, deadline: float) -> bytes:
        """Return a rank's message for this round; one for an earlier round came twice."""
        while True:
            data = self._link.recv_message(src, deadline)
            number = int.from_bytes(data[:_ROUND_BYTES], "little")
            if number > self._round:
                raise RuntimeError(f"rank {src} sent a message for round {number}, expected {self._round}")
            if number == self._round:
                return data[_ROUND_BYTES:]

    def _give_up(self, lost: dict[int, RuntimeError], wait_s: float = 0.0) -> RankError:
        """Return the error for the rank that was lost first, and leave a note of it; stop receiving.

        Args:
            lost: Error of each rank that this one has lost.
            wait_s: Maximum seconds to wait for a note of a lost rank: it may only have lost another one.
        """
        self.has_lost_rank = True
        if not self._loss:
            verb = "come to" if self._is_first and self.rank == 0 else "answer in"
            rank, error = next(iter(lost.items()))
            text = _describe_loss(self._link, rank, error, self._call, verb)
            own = _build_key(self.global_rank(self.rank))
            if wait_s:  # others wait for this note meanwhile
                self._link.leave_note(own, _UNSURE + text)
            self._loss = self._link.find_note(_FIRST) or self._follow_notes(text, wait_s)
            for key in (own, _FIRST):
                self._link.leave_note(key, self._loss)
        return _build_lost_error(self._link, self._loss)

    def _follow_notes(self, text: str, wait_s: float) -> str:
        """Return the text for the rank that was lost first: a lost rank's note names the rank that it has lost."""
        passed = {own := self.global_rank(self.rank), -1}
        while (rank := _read_rank(text)) not in passed:
            passed.add(rank)
            note = self._link.find_note(_build_key(rank), wait_s=wait_s)
            is_sure, found = not note.startswith(_UNSURE), note.removeprefix(_UNSURE)
            if not note or (not is_sure and _read_rank(found) == own):  # both ranks gave the other one up
                break
            text = found
            if is_sure:
                break
        return text

    @contextmanager
    def _report_lost_rank(self, known: RankError | None) -> Iterator[None]:
        """Convert a broken connection to rank 0 to the error that rank 0 found, if any."""
        try:
            yield
        except RuntimeError as error:
            self.has_lost_rank = True
            if known is not None:
                raise known from error
            text = self._follow_notes(_describe_loss(self._link, 0, error, self._call), _NOTICE_S)
            raise _build_lost_error(self._link, text) from error

    @property
    def _link(self) -> RankLink:
        assert self._given is not None, "a single rank sends nothing"
        return self._given


ALONE = LinkedGroup()  # a single process


def _build_key(rank: int) -> str:
    """Return the key for a rank's note."""
    return f"shardckpt/lost/{rank}"


def _describe_loss(link: RankLink, rank: int, error: RuntimeError, call: Call, verb: str = "answer in") -> str:
    """Return which rank is lost, in which call, and why."""
    called = f"{verb} `{call.name}`" if call.name else "answer"
    named = f"rank {link.name_rank(rank)} of {link.named_size}"
    return f"{named} {_IS_GONE} {called} in time: {' '.join(str(error).split())[:200]}"


def _build_lost_error(link: RankLink, text: str) -> RankError:
    """Return the error for a lost rank in the store; a rank never names itself."""
    rank = _read_rank(text)
    if rank == link.name_rank(link.rank):
        rank, text = -1, f"another rank of {link.named_size} is gone, or has stopped waiting for this one"
    return RankError(text, rank=rank, fix=LOST_RANK_FIX)


def _frame_call(call: Call) -> bytes:
    """Return a call as it precedes a message to rank 0."""
    text = _describe_call(call).encode("utf-8", "replace")
    return len(text).to_bytes(2, "little") + text


def _split_call(data: bytes) -> tuple[str, bytes]:
    """Return the sender's call, and its message."""
    end = 2 + int.from_bytes(data[:2], "little")
    return data[2:end].decode("utf-8", "replace"), data[end:]


def _describe_call(call: Call) -> str:
    return str(call)[:_MAX_CALL] if call.name else ""


def _build_mismatch(size: int, own: str, rank: int, other: str) -> RankError:
    """Return the error for a rank that made another call than rank 0."""
    what = f"rank {rank} of {size} called {other} while rank 0 called {own}"
    return RankError(what, rank=rank, fix="All ranks have to make the same calls in the same order.")


def _read_rank(text: str) -> int:
    """Return the rank that a text about a lost rank names; -1 without one."""
    match = re.match(r"rank (\d+) of \d+ ", text)
    return int(match[1]) if match else -1
