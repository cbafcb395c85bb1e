"""Who the ranks are: a world of one, or a torch process group, behind one small interface.

Values travel as bytes in tensor collectives, never as pickled objects: what a peer sends is data, not code.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from shardckpt import errors
from shardckpt.errors import RankError, ShardckptError, UsageError
from shardckpt.rendezvous import BoundedStore, make_group, meet

_MESSAGE_BYTES = 512
"""An error is told in so many bytes, so that agreeing that there was none costs one small collective."""


_WORD_BYTES = _MESSAGE_BYTES - 1


class Word:
    """What ranks tell each other besides that none failed, in the same collective.

    Attributes:
        said: What this rank says, of at most 511 bytes; set inside the block.
        heard: What each rank said, in rank order, with zero bytes behind it; there once the block has ended.
    """

    def __init__(self) -> None:
        self.said = b""
        self.heard: list[bytes] = []


class Group(ABC):
    """The ranks that take part in one piece of work."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    def everywhere(self, rank: int) -> int:
        """Return the number among all ranks of one of these, which messages name.

        Args:
            rank: Its number here.
        """
        return rank

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order. Collective; lengths may differ.

        Raises:
            RankError: A rank did not take part in time.
        """

    @abstractmethod
    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes of rank `source`, which alone has to give some. Collective.

        Raises:
            RankError: A rank did not take part in time.
        """

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, of which each gives as many, in rank order. Collective: one, where that is less.

        Args:
            data: This rank's.
        """
        return self.all_gather(data)

    @contextmanager
    def together(self, what: str) -> Iterator[Word]:
        """Run a block on every rank; a failure on one is raised on all, naming the rank. One collective at its end.

        Args:
            what: The work, for the message.

        Yields:
            What this rank may say, and where it hears the others.

        Raises:
            RankError: Another rank failed; this rank's own exception is raised as it is.
        """
        failure: Exception | None = None
        word = Word()
        try:
            yield word
        except Exception as error:  # noqa: BLE001  (told to every rank, then raised)
            failure = error
        told = self.all_gather_equal(_fixed(failure, word.said))
        if failure is not None:
            raise failure
        self._raise_first(what, told)
        word.heard = [each[1:] for each in told]

    def _raise_first(self, what: str, told: Sequence[bytes]) -> None:
        texts = {at: data.rstrip(b"\0").decode("utf-8", "replace") for at, data in enumerate(told) if data[0]}
        if texts:
            failed = [self.everywhere(at) for at in texts]
            more = f"; ranks {', '.join(map(str, failed))} failed" if len(failed) > 1 else ""
            text = next(iter(texts.values()))
            raise RankError(f"{what} failed on rank {failed[0]}: {text}{more}", rank=failed[0])


def _fixed(failure: Exception | None, said: bytes) -> bytes:
    if failure is None:
        return b"\0" + said[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")
    text = str(failure) if isinstance(failure, ShardckptError) else f"{type(failure).__name__}: {failure}"
    return (
        (text or type(failure).__name__).encode("utf-8", "replace")[: _MESSAGE_BYTES - 1].ljust(_MESSAGE_BYTES, b"\0")
    )


class LocalGroup(Group):
    """A world of one: every collective returns what it was given."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes given."""
        return [data]

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes given."""
        if data is None or source != 0:
            raise RankError(f"rank {source} has nothing to broadcast in a world of one", rank=source)
        return data


class TorchGroup(Group):
    """A torch process group whose backend moves CPU tensors, such as gloo.

    Args:
        group: The process group; the default one where None.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self._group)

    def everywhere(self, rank: int) -> int:
        """Return the number among all ranks of one of the group's."""
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gather lengths, then the bytes, padded to the longest."""
        with self._named("all-gather"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(data)]), group=self._group)
            longest = max(int(length) for length in lengths)
            if longest == 0:
                return [b""] * self.size
            rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(rows, _padded(data, longest), group=self._group)
        return [row[: int(n)].numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Gather the bytes, whose number is known."""
        with self._named("all-gather"):
            rows = [torch.empty(len(data), dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(rows, _padded(data, len(data)), group=self._group)
        return [row.numpy().tobytes() for row in rows]

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Broadcast the length, then the bytes."""
        with self._named("broadcast"):
            length = torch.tensor([len(data or b"")])
            dist.broadcast(length, group=self._group, group_src=source)
            if int(length) == 0:
                return b""
            row = _padded(data if data is not None and self.rank == source else b"", int(length))
            dist.broadcast(row, group=self._group, group_src=source)
        return row.numpy().tobytes()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Say which rank waited in vain, where a collective fails or runs out of time."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size} waited in vain in an {what}: {error}",
                rank=self.rank,
                fix="Another rank died or left; its own log says why.",
            ) from error


def _padded(data: bytes, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)


def current_group(group: dist.ProcessGroup | None = None) -> Group:
    """Return the ranks of this process: a torch group where one is initialised, else a world of one."""
    if dist.is_available() and dist.is_initialized():
        return TorchGroup(group)
    return LocalGroup()


@contextmanager
def joined_ranks(timeout: timedelta = timedelta(days=7)) -> Iterator[Group]:
    """Yield all ranks: of the group that is initialised, else of those that `torchrun` started, joined by gloo.

    Args:
        timeout: How long a rank may keep the others waiting, where they are joined here.

    Raises:
        RankError: They cannot be joined.
    """
    if dist.is_initialized():
        yield current_group()
        return
    try:
        dist.init_process_group("gloo", timeout=timeout)
    except RuntimeError as error:
        raise RankError(f"the ranks could not join: {error}", fix="Start them together, as torchrun does.") from error
    try:
        yield current_group()
    finally:
        dist.destroy_process_group()


class Star:
    """Every rank tells the first, which decides and answers each: a rank that fails or dies is named on all others.

    Messages go from rank to rank, so the first sees whose connection broke or whose word is late. What it found is
    left in the group's store too, since a backend that ran out of time speaks to nobody any more.

    Args:
        group: A group that nobody else uses, whose backend moves CPU tensors; None for a world of one.
        timeout: How long ranks wait for each other.

    Attributes:
        rank: This process's number.
        size: How many there are.
        is_lost: Whether a rank is gone: nobody may be consulted any more.
    """

    _FIRST_WAITS = 0.75
    """Of the timeout: the first rank has to find who is late before the others give up on it."""

    _FINDS_S = 2.0

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._group = group
        self._timeout = timeout
        self._round = 0
        self.is_lost = False
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    def consult(self, what: str, say: bytes | Exception, decide: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        """Return what the first rank answers this one. Collective: a message from every rank, and one back.

        Args:
            what: The work, for messages.
            say: What this rank tells, or why it failed.
            decide: On the first rank, what everyone told becomes an answer for each; what it raises is raised by all.

        Raises:
            RankError: Another rank failed, is gone or did not answer in time; this rank's own exception comes as it is,
                one that blames the call comes in its own type on every rank.
        """
        self._round += 1
        with self.in_step():
            answer = self._answered(what, say, decide)
        if isinstance(say, Exception):
            raise say
        if answer[:1] == _FAILED:
            failure = _told_failure(answer[1:])
            self.is_lost = _IS_GONE in failure.what
            raise failure
        return answer[1:]

    def _answered(self, what: str, say: bytes | Exception, decide: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        if self.rank == 0:
            return self._decided(what, say, decide)
        known = say if isinstance(say, RankError) and self.is_lost else None
        with self._of_first(known):
            self._send(_framed(say), 0)
            return self._receive(0, time.monotonic() + self._timeout.total_seconds())

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Run work of several consultations; where a signal ends it before its end, the ranks count as lost.

        The others go on to the next consultation of that work. Whatever this rank said next would be taken for its
        part in it, and the answer to that for the answer to what it said.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Count the ranks as lost: this one leaves work of several consultations before its end."""
        self.is_lost = self.size > 1

    def post(self, row: torch.Tensor, to: int) -> dist.Work:
        """Begin to send bytes to a rank that takes them; the tensor stays as it is until the work is done.

        Between two consultations, in an order that both ranks know; it does not mix with what is said there.

        Args:
            row: The bytes.
            to: The rank.
        """
        with self._on_the_way(to):
            work = dist.isend(row, group=self._group, group_dst=to, tag=_DATA)
        assert work is not None
        return work

    def take(self, row: torch.Tensor, source: int) -> None:
        """Wait for the bytes that a rank posts.

        Args:
            row: Where they go.
            source: The rank.

        Raises:
            RankError: It is gone or did not post them in time.
        """
        with self._on_the_way(source):
            work = dist.irecv(row, group=self._group, group_src=source, tag=_DATA)
            assert work is not None
            work.wait(self._timeout)

    def wait(self, work: dist.Work, to: int) -> None:
        """Wait until what was posted to a rank has arrived.

        Args:
            work: What `post` returned.
            to: The rank.

        Raises:
            RankError: It is gone or did not take it in time.
        """
        with self._on_the_way(to):
            work.wait(self._timeout)

    @contextmanager
    def _on_the_way(self, peer: int) -> Iterator[None]:
        """Turn a broken way into the loss of a rank: the one that somebody found first, else the peer."""
        try:
            yield
        except RuntimeError as error:
            self.is_lost = True
            raise self._give_up({peer: error}) from error

    def _decided(self, what: str, say: bytes | Exception, decide: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        """Gather, decide, answer; whatever goes wrong is told to all that are left, then raised."""
        try:
            if isinstance(say, RankError) and self.is_lost:  # who is left cannot be heard either
                self._store.leave(self._key, say.what)
                raise say
            told = [_framed(say), *self._gathered()]
            _raise_failed(what, told)
            answers = [_DONE + answer for answer in decide([each[1:] for each in told])]
        except Exception as error:  # noqa: BLE001  (told to every rank, then raised)
            failure = say if isinstance(say, Exception) else error
            self._tell_all([_FAILED + _as_bytes(what, failure)] * self.size, suppressed=True)
            raise failure from failure.__cause__  # its own, not that it was told
        self._tell_all(answers)
        return answers[0]

    def _gathered(self) -> list[bytes]:
        deadline = time.monotonic() + self._timeout.total_seconds() * self._FIRST_WAITS
        told, lost = [], {}
        for rank in range(1, self.size):
            try:
                told.append(self._receive(rank, deadline))
            except RuntimeError as error:
                lost[rank] = error
                deadline = min(deadline, time.monotonic() + self._FINDS_S)  # whoever is there has spoken by now
        if lost:
            raise self._give_up(lost)
        return told

    def _tell_all(self, answers: Sequence[bytes], *, suppressed: bool = False) -> None:
        lost = {}
        for rank in range(1, self.size):
            try:
                self._send(answers[rank], rank)
            except RuntimeError as error:
                lost[rank] = error
        if lost and not suppressed:
            raise self._give_up(lost)

    def _send(self, data: bytes, to: int) -> None:
        for part in (len(data).to_bytes(8, "little"), data):
            work = dist.isend(_padded(part, len(part)), group=self._group, group_dst=to)
            assert work is not None
            work.wait(self._timeout)

    def _receive(self, source: int, deadline: float) -> bytes:
        return self._received(int.from_bytes(self._received(8, source, deadline), "little"), source, deadline)

    def _received(self, nbytes: int, source: int, deadline: float) -> bytes:
        row = torch.empty(nbytes, dtype=torch.uint8)
        work = dist.irecv(row, group=self._group, group_src=source)
        assert work is not None
        work.wait(timedelta(seconds=max(0.05, deadline - time.monotonic())))
        return row.numpy().tobytes()

    def _give_up(self, lost: dict[int, RuntimeError]) -> RankError:
        """Leave word of who is gone for those that are left, unless somebody has; nobody else can be heard any more."""
        self.is_lost = True
        known = self._store.find(self._key)
        if known:
            return self._named(known)
        rank, error = next(iter(lost.items()))
        text = f"rank {rank} of {self.size} {_IS_GONE}: {' '.join(str(error).split())[:200]}"
        self._store.leave(self._key, text)
        return _gone(text, rank)

    @contextmanager
    def _of_first(self, known: RankError | None) -> Iterator[None]:
        """Turn a failure of the way to the first rank into what the first rank found, if it found something.

        Args:
            known: Who was found to be gone before.
        """
        try:
            yield
        except RuntimeError as error:
            self.is_lost = True
            if known is not None:
                raise known from error
            text = self._store.find(self._key, wait_s=self._FINDS_S) or f"rank 0 of {self.size} {_IS_GONE}: {error}"
            raise self._named(text) from error

    def _named(self, text: str) -> RankError:
        """Return the error for what a rank has left word of; no rank names itself."""
        found = re.match(r"rank (\d+) of \d+ ", text)
        if found is None or int(found[1]) != self.rank:
            return _gone(text, int(found[1]) if found else -1)
        return _gone(f"another rank of {self.size} is gone, or has stopped waiting for this one", -1)

    @property
    def _store(self) -> BoundedStore:
        assert self._group is not None
        return BoundedStore(self._group.get_group_store())

    @property
    def _key(self) -> str:
        return f"shardckpt/lost/{self._round}"


_DATA = 1
"""Tag of messages between consultations."""

_DONE, _FAILED = b"\0", b"\1"
_IS_GONE = "is gone or did not answer in time"


def _framed(say: bytes | Exception) -> bytes:
    return _DONE + say if isinstance(say, bytes) else _FAILED + _kind_and_text(say)


def _kind_and_text(error: BaseException) -> bytes:
    text = str(error) if isinstance(error, ShardckptError) else f"{type(error).__name__}: {error}"
    kind = next((each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__), "")
    return f"{kind}\n{text[:50_000]}".encode("utf-8", "replace")


def _as_bytes(what: str, failure: Exception) -> bytes:
    """Return the first rank's reason to stop, as the others are to raise it."""
    if isinstance(failure, RankError):
        return f"{failure.rank}\n{_kind_and_text(failure).decode()}".encode()
    kind, text = _kind_and_text(failure).decode().split("\n", 1)
    return f"0\n{kind}\n{what} failed on rank 0: {text}".encode()


def _raise_failed(what: str, told: Sequence[bytes]) -> None:
    failed = {rank: data[1:].decode("utf-8", "replace") for rank, data in enumerate(told) if data[:1] == _FAILED}
    if failed:
        rank = next(iter(failed))
        kind, text = failed[rank].split("\n", 1)
        more = f"; ranks {', '.join(map(str, failed))} failed" if len(failed) > 1 else ""
        raise _of_kind(kind, f"{what} failed on rank {rank}: {text}{more}", rank)


def _told_failure(data: bytes) -> ShardckptError:
    rank, kind, text = data.decode("utf-8", "replace").split("\n", 2)
    return _of_kind(kind, text, int(rank))


def _of_kind(kind: str, text: str, rank: int) -> ShardckptError:
    """Return what blames the call as what it is, since every rank made that call; anything else names its rank."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, UsageError):
        return known(text)
    return RankError(text, rank=rank)


def _gone(text: str, rank: int) -> RankError:
    return RankError(
        text,
        rank=rank,
        fix="Its own log says why; the others have stopped. Saves and loads are calls that every rank makes.",
    )


def new_star(group: dist.ProcessGroup | None = None) -> Star:
    """Make a group of one's own of the same ranks. Collective.

    Args:
        group: The ranks; all where None.

    Raises:
        RankError: A rank did not come in time.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return Star(None)
    given = dist.group.WORLD if group is None else group
    assert given is not None
    timeout = _timeout_of(given)
    meet(given, timeout)
    ranks = None if group is None else dist.get_process_group_ranks(given)

    def make() -> dist.ProcessGroup | None:
        local = group is not None
        made: dist.ProcessGroup | None
        made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=local)
        return made

    return Star(make_group(given, make, timeout), timeout)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a group waits, which torch tells nobody publicly; its default where it does not tell us."""
    for device in ("cpu", "cuda"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
        if isinstance(found, timedelta):
            return found
    return timedelta(minutes=30)
