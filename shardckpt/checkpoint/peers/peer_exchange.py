"""Exchange of files between nodes: a thread of each rank reads pieces for others and receives those that it needs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import torch

from shardckpt.checkpoint.coordinator import Coordinator
from shardckpt.checkpoint.peers.exchange_round import ROUND_BYTES, FilePiece, RoundAnswer, RoundRequest, plan_round
from shardckpt.errors import RankError, ShardckptError, StorageError
from shardckpt.storage.store import Read

if TYPE_CHECKING:
    from typing_extensions import Self

BUSY_S, IDLE_S = 0.001, 0.02
"""Seconds to wait for a request before the next round, after a round with pieces and after one without."""

_FINE, _FAILED = 1, 0


@dataclass(eq=False)
class _PendingPiece:
    """A piece that a thread waits for.

    Attributes:
        piece: The piece, with the rank that has it.
        buffer: Buffer to fill.
        is_filled: Whether its bytes came; None while it is waited for.
    """

    piece: FilePiece
    buffer: memoryview
    is_filled: bool | None = None


class FileReader(Protocol):
    """The files of a node, as far as they are read for a rank."""

    @property
    def url(self) -> str:
        """Path or URL of the files, for messages."""

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer. Raises ShardckptError."""


class PieceExchange(Protocol):
    """The exchange of files that a `PeerStore` needs."""

    def pull(self, wanted: Sequence[tuple[FilePiece, memoryview]]) -> list[bool]:
        """Fill buffers with pieces that other ranks have; return for each whether its bytes came."""

    def delete(self, name: str) -> None:
        """Delete a file, or a folder whose name ends with a slash, on all nodes."""


class LoneExchange:
    """The exchange of a single node.

    Args:
        on_delete: Called with the name of a file or folder to delete.
    """

    def __init__(self, on_delete: Callable[[str], None]) -> None:
        self._on_delete = on_delete

    def pull(self, wanted: Sequence[tuple[FilePiece, memoryview]]) -> list[bool]:
        """Return that no piece came, since this node has all files."""
        return [False] * len(wanted)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder whose name ends with a slash."""
        self._on_delete(name)


class PeerExchange:
    """Exchange of pieces of files, from the start of a restore to its end on all ranks.

    All ranks run the same rounds: rank 0 plans which pieces are sent, each rank starts to send its own, then receives.
    So ranks cannot deadlock, and memory is bounded by the bytes of a round. Ranks that need nothing take part until all
    are done.

    Args:
        coordinator: Coordinator for this exchange alone.
        own: Files of this node, from which pieces are read for others.
        on_delete: Called with the name of a file or folder that every node deletes, on the thread of the exchange.

    Attributes:
        received_bytes: Bytes that came from other ranks.
    """

    def __init__(self, coordinator: Coordinator, own: FileReader, on_delete: Callable[[str], None]) -> None:
        self._coordinator, self._own, self._on_delete = coordinator, own, on_delete
        self._changed = threading.Condition()
        self._waiting: deque[_PendingPiece] = deque()
        self._deleted: list[str] = []
        self._is_done = self._was_busy = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shardckpt-peers", daemon=True)
        self.received_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until all ranks are done, for as long as ranks wait for each other; not after a signal."""
        with self._changed:
            self._is_done = True
            self._changed.notify_all()
        if kind is None or issubclass(kind, Exception):
            self._thread.join(self._coordinator.timeout_s)
        if self._thread.is_alive():  # another rank has not come to the end, or a signal ended the restore here
            self._coordinator.leave()

    def pull(self, wanted: Sequence[tuple[FilePiece, memoryview]]) -> list[bool]:
        """Fill buffers with pieces that other ranks have; return for each whether its bytes came.

        Args:
            wanted: Pieces, each with the rank that has it, and their buffers.

        Raises:
            RankError: A rank is lost.
            StorageError: The exchange is over.
        """
        waiting = [_PendingPiece(piece, buffer) for piece, buffer in wanted]
        with self._changed:
            self._waiting.extend(waiting)
            self._changed.notify_all()
            while self._failure is None and any(each.is_filled is None for each in waiting):
                if not self._thread.is_alive():
                    raise StorageError("files of other nodes can be read during a restore only", where=self._own.url)
                self._changed.wait(1.0)
            if self._failure is not None:
                raise self._failure
        return [bool(each.is_filled) for each in waiting]

    def delete(self, name: str) -> None:
        """Delete a file, or a folder whose name ends with a slash, on all nodes, in the next round."""
        with self._changed:
            self._deleted.append(name)

    def _run(self) -> None:
        try:
            while not self._take_round():
                pass
        except Exception as error:  # noqa: BLE001  (raised by whoever waits)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take_round(self) -> bool:
        """Take part in one round; return True after the last one."""
        wanted, request = self._collect()

        def decide(messages: list[bytes]) -> list[bytes]:
            requests = [RoundRequest.decode(message, len(messages)) for message in messages]
            return [answer.encode() for answer in plan_round(requests)]

        what = f"exchanging files of {self._own.url}"
        answer = RoundAnswer.decode(self._coordinator.coordinate(what, request.encode(), decide))
        self._was_busy = answer.is_busy
        for name in answer.deleted:
            self._on_delete(name)
        self._transfer(answer.sends, [wanted[index] for index in answer.accepted])
        with self._changed:
            self._waiting.extendleft(each for each in reversed(wanted) if each.is_filled is None)
            self._changed.notify_all()
        return answer.is_over

    def _collect(self) -> tuple[list[_PendingPiece], RoundRequest]:
        """Wait shortly for requests of this rank, and return them."""
        with self._changed:
            if not self._waiting and not self._is_done:
                self._changed.wait(BUSY_S if self._was_busy else IDLE_S)
            wanted: list[_PendingPiece] = []
            nbytes = 0
            while self._waiting and (not wanted or nbytes + self._waiting[0].piece.nbytes <= ROUND_BYTES):
                wanted.append(self._waiting.popleft())
                nbytes += wanted[-1].piece.nbytes
            deleted, self._deleted = self._deleted, []
            is_done = self._is_done and not self._waiting
        return wanted, RoundRequest(tuple(each.piece for each in wanted), tuple(deleted), is_done)

    def _transfer(self, sends: Sequence[FilePiece], wanted: Sequence[_PendingPiece]) -> None:
        """Send pieces and receive others; the byte before each piece has whether its bytes follow."""
        started = []
        for piece in sends:
            row = self._read(piece)
            word = torch.tensor([_FAILED if row is None else _FINE], dtype=torch.uint8)
            for tensor in (word,) if row is None else (word, row):
                started.append((self._coordinator.send(tensor, piece.peer), piece.peer, tensor))
        for each in wanted:
            word = torch.empty(1, dtype=torch.uint8)
            self._coordinator.recv(word, each.piece.peer)
            if word.item() == _FINE:
                self._coordinator.recv(torch.frombuffer(each.buffer, dtype=torch.uint8), each.piece.peer)
                self.received_bytes += each.piece.nbytes
            each.is_filled = word.item() == _FINE
        for work, peer, _tensor in started:
            self._coordinator.wait(work, peer)

    def _read(self, piece: FilePiece) -> torch.Tensor | None:
        """Return the bytes of a piece in the store of this node; None if they cannot be read."""
        row = torch.empty(piece.nbytes, dtype=torch.uint8)
        try:
            self._own.read([Read(piece.name, piece.offset, memoryview(row.numpy()))])  # type: ignore[arg-type]
        except ShardckptError as error:
            if isinstance(error, RankError):
                raise
            return None
        return row
