"""Who the ranks are: a world of one, or a torch process group, behind one small interface.

Values travel as bytes in tensor collectives, never as pickled objects: what a peer sends is data, not code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardckpt.errors import RankError, ShardckptError

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
        _raise_first(what, told)
        word.heard = [each[1:] for each in told]


def _fixed(failure: Exception | None, said: bytes) -> bytes:
    if failure is None:
        return b"\0" + said[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")
    text = str(failure) if isinstance(failure, ShardckptError) else f"{type(failure).__name__}: {failure}"
    return (
        (text or type(failure).__name__).encode("utf-8", "replace")[: _MESSAGE_BYTES - 1].ljust(_MESSAGE_BYTES, b"\0")
    )


def _raise_first(what: str, told: Sequence[bytes]) -> None:
    failed = {rank: data.rstrip(b"\0").decode("utf-8", "replace") for rank, data in enumerate(told) if data[0]}
    if failed:
        rank, text = next(iter(failed.items()))
        more = f"; ranks {', '.join(map(str, failed))} failed" if len(failed) > 1 else ""
        raise RankError(f"{what} failed on rank {rank}: {text}{more}", rank=rank)


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
