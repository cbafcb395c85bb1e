"""How ranks talk, over any transport: a protocol, and the rule that all ranks raise the error of one.

Values are sent as bytes, never as pickled objects: peers send data, not code.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from shardckpt import errors
from shardckpt.errors import MismatchError, RankError, ShardckptError, UsageError, describe_with_class

__all__ = ["FAILED", "Decide", "Group", "Piggyback", "frame_message", "join_parts", "split_parts"]

DONE, FAILED = b"\0", b"\1"  # the first byte of each message and answer

# Bytes for an error message in the all-gather that ends a collective: one small all-gather if no rank failed.
_MESSAGE_BYTES = 512
_SIZE = struct.Struct("<Q")

Decide: TypeAlias = Callable[[list[bytes]], Sequence[bytes]]  # rank 0's answers to all ranks' messages


class Piggyback:
    """One message per rank, sent with the all-gather for errors."""

    def __init__(self) -> None:
        self.local = b""  # this rank's message, at most 511 bytes; set inside the block
        # Each rank's message, in rank order, padded with zero bytes; set at the end of the block.
        self.gathered: list[bytes] = []


class Group(ABC):
    """The ranks that take part in one operation."""

    rank: int  # of this process in the group, from 0
    size: int  # number of ranks

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of this group; messages name global ranks."""
        return rank

    @abstractmethod
    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, of one length, in rank order. Raises RankError. Collective."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order; lengths may differ. Raises RankError. Collective."""
        lengths = [_SIZE.unpack(each)[0] for each in self.all_gather_equal(_SIZE.pack(len(data)))]
        rows = self.all_gather_equal(data.ljust(max(lengths), b"\0")) if any(lengths) else [b""] * self.size
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes of rank `source`; the other ranks may pass None. Raises RankError. Collective."""
        if data is None and self.rank == source:
            raise RankError(f"rank {source} of {self.size} has nothing to broadcast", rank=source)
        return self.all_gather(data if data is not None and self.rank == source else b"")[source]

    def ask_rank0(self, what: str, message: bytes | Exception, decide: Decide) -> bytes:
        """Return rank 0's answer to this rank's message. Collective."""
        # All ranks raise a message that is an error, or an error of `decide`; its owner raises it unchanged.
        own = message if isinstance(message, Exception) else None

        def answer_all(gather: Callable[[], list[bytes]]) -> Sequence[bytes]:
            nonlocal own
            try:
                messages = gather()
                if own is None:
                    failure = _find_failure(what, messages, self.global_rank)
                    return [failure] * self.size if failure else _frame_answers(decide([each[1:] for each in messages]))
            except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
                own = error if own is None else own
            return [_encode_own_failure(what, own, self.global_rank(0))] * self.size

        answer = self._exchange(what, message, answer_all)
        if own is not None:
            raise own
        if answer[:1] == FAILED:
            raise _decode_failure(answer)
        return answer[1:]

    def _exchange(
        self,
        what: str,  # noqa: ARG002  (for a group that reports what it waits in)
        message: bytes | Exception,
        answer_all: Callable[[Callable[[], list[bytes]]], Sequence[bytes]],
    ) -> bytes:
        """Send rank 0 a framed message, and return its framed answer. Collective."""
        messages = self.all_gather(frame_message(message))
        answers = answer_all(lambda: messages) if self.rank == 0 else ()
        return split_parts(self.broadcast(join_parts(answers)))[self.rank]

    @contextmanager
    def collective(self, what: str) -> Iterator[Piggyback]:
        """Run a block on every rank; if one fails, all raise. One all-gather at the end."""
        failure: Exception | None = None
        piggyback = Piggyback()
        try:
            yield piggyback
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            failure = error
        message = frame_message(piggyback.local if failure is None else failure)
        outcomes = self.all_gather_equal(message[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"))
        if failure is not None:
            raise failure
        found = _find_failure(what, outcomes, self.global_rank)
        if found:
            raise _decode_failure(found, is_same_call=False)
        piggyback.gathered = [each[1:] for each in outcomes]


def join_parts(parts: Iterable[bytes]) -> bytes:
    """Return several byte strings as one, for `split_parts`."""
    return b"".join(_SIZE.pack(len(each)) + each for each in parts)


def split_parts(data: bytes) -> list[bytes]:
    """Return what `join_parts` joined."""
    parts, at = [], 0
    while at < len(data):
        start = at + _SIZE.size
        at = start + _SIZE.unpack_from(data, at)[0]
        parts.append(data[start:at])
    return parts


def frame_message(message: bytes | Exception) -> bytes:
    """Return a message as it is sent: whether the rank failed, then its bytes, or its error."""
    return DONE + message if isinstance(message, bytes) else FAILED + _encode_error(message)


def _frame_answers(answers: Sequence[bytes]) -> list[bytes]:
    """Return answers as they are sent; equal ones share memory: there may be thousands, each many megabytes."""
    framed: dict[int, bytes] = {}
    return [framed.get(id(each)) or framed.setdefault(id(each), DONE + each) for each in answers]


def _encode_error(error: BaseException) -> bytes:
    text = str(error) if isinstance(error, ShardckptError) else describe_with_class(error)
    kind = next((base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__), "")
    return f"{kind}\n{text[:50_000] or type(error).__name__}".encode("utf-8", "replace")


def _encode_own_failure(what: str, error: Exception, rank: int) -> bytes:
    """Return rank 0's error for all ranks; one that is about a rank names that rank already."""
    kind, text = _encode_error(error).decode().split("\n", 1)
    if isinstance(error, RankError):
        return FAILED + f"{error.rank}\n{kind}\n{text}".encode()
    return FAILED + f"{rank}\n{kind}\n{what} failed on rank {rank}: {text}".encode()


def _find_failure(what: str, messages: Sequence[bytes], name: Callable[[int], int]) -> bytes:
    """Return the first failure in framed messages, for all ranks; empty if no rank failed."""
    failed = {name(rank): data[1:].rstrip(b"\0") for rank, data in enumerate(messages) if data[:1] == FAILED}
    if not failed:
        return b""
    rank = next(iter(failed))
    kind, _, text = failed[rank].decode("utf-8", "replace").partition("\n")
    more = f"; ranks {', '.join(map(str, failed))} failed" if len(failed) > 1 else ""
    return FAILED + f"{rank}\n{kind}\n{what} failed on rank {rank}: {text}{more}".encode()


def _decode_failure(data: bytes, *, is_same_call: bool = True) -> ShardckptError:
    """Return another rank's error: a usage error in its own type if all ranks made the same call, else a RankError."""
    rank, kind, text = data[1:].decode("utf-8", "replace").split("\n", 2)
    known = getattr(errors, kind, None) if is_same_call else None
    if isinstance(known, type) and issubclass(known, UsageError):
        return known.on_other_rank(text) if issubclass(known, MismatchError) else known(text)
    return RankError(text, rank=int(rank))
