"""Ranks agree through rank 0: each sends it a message, it decides and answers. Coordinators of each process group."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardckpt import errors
from shardckpt.errors import RankError, ShardckptError, UsageError
from shardckpt.rendezvous import BoundedStore, make_group, meet
from shardckpt.torch_features import get_group_store


class Coordinator:
    """Send each rank's message to rank 0, which decides and answers; a rank that is lost is named on all others.

    Messages go from rank to rank, so rank 0 sees whose connection broke or whose message is late. It writes that rank
    to the group's store too, since a backend that ran out of time sends nothing any more.

    Args:
        group: A group that nobody else uses, whose backend moves CPU tensors; None for a world of one.
        timeout: How long ranks wait for each other.

    Attributes:
        rank: This process's number.
        size: How many there are.
        has_lost_rank: Whether a rank is gone: nothing may be sent any more.
    """

    _FIRST_WAITS = 0.75
    """Of the timeout: rank 0 has to find which rank is late before the others give up on rank 0."""

    _FINDS_S = 2.0

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._group = group
        self._timeout = timeout
        self._round = 0
        self.has_lost_rank = False
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def coordinate(
        self, step: str, message: bytes | Exception, decide: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Return rank 0's answer to this rank. Collective: a message from every rank, and one back.

        Args:
            step: The work, for error messages.
            message: This rank's message, or why it failed.
            decide: Turns all messages into an answer for each rank, on rank 0; its error is raised on all ranks.

        Raises:
            RankError: Another rank failed, is gone or did not answer in time; this rank's own exception comes as it is,
                one that blames the call comes in its own type on every rank.
        """
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
        if self.rank == 0:
            return self._gather_and_answer(step, message, decide)
        known = message if isinstance(message, RankError) and self.has_lost_rank else None
        with self._report_lost_rank(known):
            self._send_bytes(_frame(message), 0)
            return self._recv_bytes(0, time.monotonic() + self._timeout.total_seconds())

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run work of several messages; where a signal ends it before its end, the ranks count as lost.

        The others go on to the next message of that work. The next message of this rank would be taken for that one,
        and the answer to it for the answer to this one.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Count the ranks as lost: this one leaves work of several messages before its end."""
        self.has_lost_rank = self.size > 1

    def send(self, tensor: torch.Tensor, dst: int) -> dist.Work:
        """Start to send bytes to a rank that receives them; the tensor must not change until the work is done.

        Between two calls of `coordinate`, in an order that both ranks know; it does not mix with their messages.

        Args:
            tensor: The bytes.
            dst: The rank.
        """
        with self._detect_lost_rank(dst):
            work = dist.isend(tensor, group=self._group, group_dst=dst, tag=_DATA)
        assert work is not None
        return work

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receive bytes that a rank sends.

        Args:
            tensor: Where they go.
            src: The rank.

        Raises:
            RankError: It is gone or did not send them in time.
        """
        with self._detect_lost_rank(src):
            work = dist.irecv(tensor, group=self._group, group_src=src, tag=_DATA)
            assert work is not None
            work.wait(self._timeout)

    def wait(self, work: dist.Work, dst: int) -> None:
        """Wait until a rank has received the bytes that were sent to it.

        Args:
            work: As `send` returned it.
            dst: The rank.

        Raises:
            RankError: It is gone or did not receive them in time.
        """
        with self._detect_lost_rank(dst):
            work.wait(self._timeout)

    @contextmanager
    def _detect_lost_rank(self, peer: int) -> Iterator[None]:
        """Turn a broken connection into the loss of a rank: the one that was found first, else the peer."""
        try:
            yield
        except RuntimeError as error:
            self.has_lost_rank = True
            raise self._give_up({peer: error}) from error

    def _gather_and_answer(
        self, step: str, message: bytes | Exception, decide: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Gather, decide, answer; an error is sent to all ranks that are left, then raised."""
        try:
            if isinstance(message, RankError) and self.has_lost_rank:  # the others cannot be received from either
                self._store.leave(self._key, message.what)
                raise message
            messages = [_frame(message), *self._gather_messages()]
            _raise_failed(step, messages)
            answers = [_DONE + answer for answer in decide([data[1:] for data in messages])]
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            failure = message if isinstance(message, Exception) else error
            self._send_all([_FAILED + _encode_failure(step, failure)] * self.size, suppressed=True)
            raise failure from failure.__cause__  # its own, not that it was sent
        self._send_all(answers)
        return answers[0]

    def _gather_messages(self) -> list[bytes]:
        deadline = time.monotonic() + self._timeout.total_seconds() * self._FIRST_WAITS
        messages, lost = [], {}
        for rank in range(1, self.size):
            try:
                messages.append(self._recv_bytes(rank, deadline))
            except RuntimeError as error:
                lost[rank] = error
                deadline = min(deadline, time.monotonic() + self._FINDS_S)  # the others have sent theirs by now
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
        for part in (len(data).to_bytes(8, "little"), data):
            work = dist.isend(torch.frombuffer(bytearray(part), dtype=torch.uint8), group=self._group, group_dst=dst)
            assert work is not None
            work.wait(self._timeout)

    def _recv_bytes(self, src: int, deadline: float) -> bytes:
        return self._recv_exactly(int.from_bytes(self._recv_exactly(8, src, deadline), "little"), src, deadline)

    def _recv_exactly(self, nbytes: int, src: int, deadline: float) -> bytes:
        row = torch.empty(nbytes, dtype=torch.uint8)
        work = dist.irecv(row, group=self._group, group_src=src)
        assert work is not None
        work.wait(timedelta(seconds=max(0.05, deadline - time.monotonic())))
        return row.numpy().tobytes()

    def _give_up(self, lost: dict[int, RuntimeError]) -> RankError:
        """Write which rank is gone to the store, unless another rank has; nothing can be received any more."""
        self.has_lost_rank = True
        known = self._store.find(self._key)
        if known:
            return self._lost_rank_error(known)
        rank, error = next(iter(lost.items()))
        text = f"rank {rank} of {self.size} {_IS_GONE}: {' '.join(str(error).split())[:200]}"
        self._store.leave(self._key, text)
        return _build_lost_error(text, rank)

    @contextmanager
    def _report_lost_rank(self, known: RankError | None) -> Iterator[None]:
        """Turn a broken connection to rank 0 into the loss that rank 0 found, if it found one.

        Args:
            known: The loss that was found before.
        """
        try:
            yield
        except RuntimeError as error:
            self.has_lost_rank = True
            if known is not None:
                raise known from error
            text = self._store.find(self._key, wait_s=self._FINDS_S) or f"rank 0 of {self.size} {_IS_GONE}: {error}"
            raise self._lost_rank_error(text) from error

    def _lost_rank_error(self, text: str) -> RankError:
        """Return the error for a loss that a rank has written to the store; no rank names itself."""
        match = re.match(r"rank (\d+) of \d+ ", text)
        if match is None or int(match[1]) != self.rank:
            return _build_lost_error(text, int(match[1]) if match else -1)
        return _build_lost_error(f"another rank of {self.size} is gone, or has stopped waiting for this one", -1)

    @property
    def _store(self) -> BoundedStore:
        assert self._group is not None
        return BoundedStore(get_group_store(self._group))

    @property
    def _key(self) -> str:
        return f"shardckpt/lost/{self._round}"


_DATA = 1
"""Tag of messages between two calls of `coordinate`."""

_DONE, _FAILED = b"\0", b"\1"
_IS_GONE = "is gone or did not answer in time"


def _frame(message: bytes | Exception) -> bytes:
    return _DONE + message if isinstance(message, bytes) else _FAILED + _encode_error(message)


def _encode_error(error: BaseException) -> bytes:
    text = str(error) if isinstance(error, ShardckptError) else f"{type(error).__name__}: {error}"
    kind = next((base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__), "")
    return f"{kind}\n{text[:50_000]}".encode("utf-8", "replace")


def _encode_failure(step: str, failure: Exception) -> bytes:
    """Return rank 0's reason to stop, as the others are to raise it."""
    if isinstance(failure, RankError):
        return f"{failure.rank}\n{_encode_error(failure).decode()}".encode()
    kind, text = _encode_error(failure).decode().split("\n", 1)
    return f"0\n{kind}\n{step} failed on rank 0: {text}".encode()


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
    """Return a UsageError in its own type, since every rank made that call; anything else as a RankError."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, UsageError):
        return known(text)
    return RankError(text, rank=rank)


def _build_lost_error(text: str, rank: int) -> RankError:
    return RankError(
        text,
        rank=rank,
        fix="Its own log says why; the others have stopped. Saves and loads are calls that every rank makes.",
    )


def new_coordinator(group: dist.ProcessGroup | None = None) -> Coordinator:
    """Create a coordinator over a process group of its own, of the same ranks. Collective.

    Args:
        group: The ranks; all where None.

    Raises:
        RankError: A rank did not come in time.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return Coordinator(None)
    given = dist.group.WORLD if group is None else group
    assert given is not None
    timeout = _get_timeout(given)
    meet(given, timeout)
    ranks = None if group is None else dist.get_process_group_ranks(given)

    def make() -> dist.ProcessGroup | None:
        local = group is not None
        created: dist.ProcessGroup | None
        created = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=local)
        return created

    return Coordinator(make_group(given, make, timeout), timeout)


def _get_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return how long a group waits, which torch keeps private; torch's default where it cannot be read."""
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=30)


class Channels:
    """Coordinators of one process group: one for this process's calls, one for threads in the background.

    Args:
        main: For calls of the training loop.

    Attributes:
        main: As given.
    """

    def __init__(self, main: Coordinator) -> None:
        self.main = main
        self._background: Coordinator | None = None

    @property
    def has_lost_rank(self) -> bool:
        """Whether a rank is lost: no more messages may be sent."""
        return self.main.has_lost_rank or (self._background is not None and self._background.has_lost_rank)

    def background_coordinator(self, group: dist.ProcessGroup | None) -> Coordinator:
        """Return the coordinator of threads in the background. Collective at the first call.

        Args:
            group: The process group of these channels.
        """
        if self._background is None:
            self._background = new_coordinator(group)
        return self._background


_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, Channels] = WeakKeyDictionary()
ALONE = Channels(Coordinator(None))
"""Channels of a process that is alone."""


def require_bools(**arguments: object) -> None:
    """Check arguments that are True or False. Raises UsageError with the name of one that is not."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise UsageError(f"`{name}` is neither True nor False", found=repr(value))


def resolve_process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a process group, all ranks for None; None without `torch.distributed`, where this process is alone.

    Raises:
        UsageError: It is not a process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    given = dist.group.WORLD if group is None else group
    if not isinstance(given, dist.ProcessGroup):
        raise UsageError("`process_group` must be a process group", found=repr(group))
    return given


def get_channels(group: dist.ProcessGroup | None, refusal: Exception | None = None) -> Channels:
    """Return the channels of a process group: made by the first call, and again once a rank is lost. Collective then.

    Args:
        group: The ranks; all if None.
        refusal: Raised if a rank is lost, since no other rank can receive it.
    """
    key = resolve_process_group(group)
    if key is None:
        return ALONE
    known = _CHANNELS.get(key)
    if known is not None and known.has_lost_rank and refusal is not None:
        raise refusal
    if known is None or known.has_lost_rank:
        known = _CHANNELS[key] = Channels(new_coordinator(group))
    return known
