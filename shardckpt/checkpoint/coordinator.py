"""Agreement between ranks: each rank sends rank 0 a message and gets an answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardckpt import errors
from shardckpt.checkpoint.rank_link import LOST_RANK_FIX, RankLink, Transfer, link_ranks
from shardckpt.errors import MismatchError, RankError, ShardckptError, UsageError, describe_with_class

ProcessGroup: TypeAlias = "dist.ProcessGroup | RankLink"  # ranks of a save or a load


class Coordinator:
    """Sends each rank's message to rank 0, which decides and answers."""

    # If a rank is lost, the errors on all other ranks name it. Messages are point-to-point, so rank 0 knows whose
    # connection broke or whose message is late. Rank 0 also writes that rank to the group's store, because a backend
    # cannot send after a timeout.

    # Fraction of the timeout: rank 0 has to find the late rank before the others stop waiting for rank 0.
    _FIRST_WAITS = 0.75

    _FINDS_S = 2.0

    def __init__(self, link: RankLink | None) -> None:
        self._given = link
        self._round = 0
        self.has_lost_rank = False  # whether a rank is lost; no more messages may be sent then
        self.rank = link.rank if link is not None else 0  # index of this rank
        self.size = link.size if link is not None else 1  # number of ranks

    @property
    def timeout_s(self) -> float:
        """Maximum seconds that ranks wait for each other; 0 for a single rank."""
        return 0.0 if self._given is None else self._given.timeout.total_seconds()

    def coordinate(
        self, step: str, message: bytes | Exception, decide: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Return rank 0's answer to this rank's message. Collective."""
        # All ranks raise an error of `decide`; this rank raises its own exception unchanged.
        self._round += 1
        with self.in_step():
            answer = self._exchange(step, message, decide)
        if isinstance(message, Exception):
            raise message
        if answer[:1] == _FAILED:
            failure = _decode_failure(answer[1:])
            self.has_lost_rank = _IS_GONE in failure.what
            raise failure
        return answer[1:]

    def _exchange(
        self, step: str, message: bytes | Exception, decide: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        self.expect_messages()
        if self.rank == 0:
            return self._gather_and_answer(step, message, decide)
        known = message if isinstance(message, RankError) and self.has_lost_rank else None
        with self._report_lost_rank(known):
            self._send_bytes(_frame(message), 0)
            return self._recv_bytes(0, time.monotonic() + self._link.timeout.total_seconds())

    def expect_messages(self) -> None:
        """Accept messages for the next `coordinate`, so that no rank waits until this one has time."""
        # `coordinate` does this too; call this before long work that precedes it.
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
        # The bytes must not change until the work is done. Both ranks call it between the same two `coordinate`.
        with self._detect_lost_rank(dst):
            return self._link.start_send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receive bytes that a rank sends."""
        with self._detect_lost_rank(src):
            self._link.recv(tensor, src)

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
        # Other ranks may have started the next round, which this rank does not reach.
        try:
            yield
        except RuntimeError as error:
            self.has_lost_rank = True
            lost = self._give_up({peer: error})
            self._link.leave_note(self._build_key(self._round + 1), lost.what)
            raise lost from error

    def _gather_and_answer(
        self, step: str, message: bytes | Exception, decide: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Gather, decide and answer; send an error to all remaining ranks, then raise it."""
        try:
            if isinstance(message, RankError) and self.has_lost_rank:  # no other messages can be received
                self._link.leave_note(self._key, message.what)
                raise message
            messages = [_frame(message), *self._gather_messages()]
            _raise_failed(step, messages)
            answers = _frame_answers(decide([data[1:] for data in messages]))
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            failure = message if isinstance(message, Exception) else error
            self._send_all([_FAILED + _encode_failure(step, failure)] * self.size, suppressed=True)
            raise failure from failure.__cause__  # keeps its own cause
        self._send_all(answers)
        return answers[0]

    def _gather_messages(self) -> list[bytes]:
        if self.size == 1:
            return []
        deadline = time.monotonic() + self._link.timeout.total_seconds() * self._FIRST_WAITS
        messages, lost = [], {}
        for rank in range(1, self.size):
            try:
                messages.append(self._recv_bytes(rank, deadline))
            except RuntimeError as error:
                lost[rank] = error
                deadline = min(deadline, time.monotonic() + self._FINDS_S)  # the other ranks have sent theirs by now
        if lost:
            raise self._give_up(lost)
        return messages

    def _send_all(self, answers: Sequence[bytes], *, suppressed: bool = False) -> None:
        lost = {}
        for rank in range(1, self.size):
            try:
                self._send_bytes(answers[rank], rank)
            except RuntimeError as error:
                lost[rank] = error
        if lost and not suppressed:
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

    def _give_up(self, lost: dict[int, RuntimeError]) -> RankError:
        """Write the lost rank to the store, unless another rank did; stop receiving."""
        self.has_lost_rank = True
        known = self._link.find_note(self._key)
        if known:
            return self._lost_rank_error(known)
        rank, error = next(iter(lost.items()))
        text = f"rank {rank} of {self.size} {_IS_GONE}: {' '.join(str(error).split())[:200]}"
        self._link.leave_note(self._key, text)
        return _build_lost_error(text, rank)

    @contextmanager
    def _report_lost_rank(self, known: RankError | None) -> Iterator[None]:
        """Convert a broken connection to rank 0 to the error that rank 0 found, if any."""
        try:
            yield
        except RuntimeError as error:
            self.has_lost_rank = True
            if known is not None:
                raise known from error
            text = self._link.find_note(self._key, wait_s=self._FINDS_S) or f"rank 0 of {self.size} {_IS_GONE}: {error}"
            raise self._lost_rank_error(text) from error

    def _lost_rank_error(self, text: str) -> RankError:
        """Return the error for a lost rank in the store; a rank never names itself."""
        match = re.match(r"rank (\d+) of \d+ ", text)
        if match is None or int(match[1]) != self.rank:
            return _build_lost_error(text, int(match[1]) if match else -1)
        return _build_lost_error(f"another rank of {self.size} is gone, or has stopped waiting for this one", -1)

    @property
    def _link(self) -> RankLink:
        assert self._given is not None, "a single rank sends nothing"
        return self._given

    @property
    def _key(self) -> str:
        return self._build_key(self._round)

    def _build_key(self, number: int) -> str:
        return f"shardckpt/lost/{number}"


_ROUND_BYTES = 8  # bytes of the round's number, which precedes each message

_DONE, _FAILED = b"\0", b"\1"
_IS_GONE = "is gone or did not answer in time"


def _frame(message: bytes | Exception) -> bytes:
    return _DONE + message if isinstance(message, bytes) else _FAILED + _encode_error(message)


def _frame_answers(answers: Sequence[bytes]) -> list[bytes]:
    """Return answers as they are sent; equal ones share memory: there may be thousands, each many megabytes."""
    framed: dict[int, bytes] = {}
    return [framed.get(id(each)) or framed.setdefault(id(each), _DONE + each) for each in answers]


def _encode_error(error: BaseException) -> bytes:
    text = str(error) if isinstance(error, ShardckptError) else describe_with_class(error)
    kind = next((base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__), "")
    return f"{kind}\n{text[:50_000]}".encode("utf-8", "replace")


def _encode_failure(step: str, failure: Exception) -> bytes:
    """Return rank 0's failure as bytes, for the other ranks to raise."""
    if isinstance(failure, RankError):
        return f"{failure.rank}\n{_encode_error(failure).decode()}".encode()
    kind, text = _encode_error(failure).decode().split("\n", 1)
    named = text if text.startswith(f"{step} failed on rank ") else f"{step} failed on rank 0: {text}"
    return f"0\n{kind}\n{named}".encode()


def _raise_failed(step: str, messages: Sequence[bytes]) -> None:
    failed = {rank: data[1:].decode("utf-8", "replace") for rank, data in enumerate(messages) if data[:1] == _FAILED}
    if failed:
        rank = next(iter(failed))
        kind, text = failed[rank].split("\n", 1)
        more = f"; ranks {', '.join(map(str, failed))} failed" if len(failed) > 1 else ""
        raise _build_error(kind, f"{step} failed on rank {rank}: {text}{more}", rank)


def _decode_failure(data: bytes) -> ShardckptError:
    rank, kind, text = data.decode("utf-8", "replace").split("\n", 2)
    return _build_error(kind, text, int(rank))


def _build_error(kind: str, text: str, rank: int) -> ShardckptError:
    """Return a usage error in its own type, and any other error as a RankError."""
    # In a usage error every rank made the wrong call.
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, UsageError):
        return known.on_other_rank(text) if issubclass(known, MismatchError) else known(text)
    return RankError(text, rank=rank)


def _build_lost_error(text: str, rank: int) -> RankError:
    return RankError(text, rank=rank, fix=LOST_RANK_FIX)


def new_coordinator(group: ProcessGroup | None = None, *, has_low_priority: bool = False) -> Coordinator:
    """Create a coordinator with a new link between the same ranks. Collective."""
    if isinstance(group, RankLink):
        return Coordinator(group.renew() if group.size > 1 else None)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return Coordinator(None)
    return Coordinator(link_ranks(group, has_low_priority=has_low_priority))


class Channels:
    """A process group's coordinators, for the main and for background threads."""

    def __init__(self, main: Coordinator) -> None:
        self.main = main  # for calls from the training loop
        self._background: dict[str, Coordinator] = {}

    @property
    def has_lost_rank(self) -> bool:
        """Whether a rank is lost; no more messages may be sent then."""
        return any(each.has_lost_rank for each in (self.main, *self._background.values()))

    def background_coordinator(
        self, group: ProcessGroup | None, name: str = "", *, has_low_priority: bool = False
    ) -> Coordinator:
        """Return the coordinator for a background thread. Collective at the first call."""
        if name not in self._background:
            self._background[name] = new_coordinator(group, has_low_priority=has_low_priority)
        return self._background[name]


CHANNELS: WeakKeyDictionary[ProcessGroup, Channels] = WeakKeyDictionary()  # channels of this process, by process group
ALONE = Channels(Coordinator(None))  # channels of a single process


def resolve_process_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return a process group, by default all ranks; None for a single process."""
    if isinstance(group, RankLink):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        return None
    given = dist.group.WORLD if group is None else group
    if not isinstance(given, dist.ProcessGroup):
        raise UsageError("`process_group` must be a process group", found=repr(group))
    return given


def has_lost_rank(group: ProcessGroup | None) -> bool:
    """Return True if a process group has lost a rank. Unlike `get_channels`, this creates no channels."""
    key = resolve_process_group(group)
    known = None if key is None else CHANNELS.get(key)
    return known is not None and known.has_lost_rank


def get_channels(group: ProcessGroup | None, refusal: Exception | None = None) -> Channels:
    """Return a process group's channels. Collective if they have to be created."""
    # The first call for a group creates the channels; so does the first call after the group has lost a rank.
    key = resolve_process_group(group)
    if key is None:
        return ALONE
    known = CHANNELS.get(key)
    if known is not None and known.has_lost_rank and refusal is not None:
        raise refusal
    if known is None or known.has_lost_rank:
        known = CHANNELS[key] = Channels(new_coordinator(group))
    return known
