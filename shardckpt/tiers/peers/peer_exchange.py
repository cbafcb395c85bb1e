"""Exchange files between nodes: each rank has a thread that reads pieces for others and receives its own."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from shardckpt.checkpoint.background_thread import BackgroundThread
from shardckpt.errors import RankError, ShardckptError, StorageError
from shardckpt.ranks.linked_group import LinkedGroup, Transfer
from shardckpt.storage.store import MappedStore, Read
from shardckpt.tiers.peers.exchange_round import (
    PIECE_BYTES,
    ROUND_BYTES,
    FilePiece,
    RoundAnswer,
    RoundRequest,
    plan_round,
)
from shardckpt.tiers.peers.known_files import AskForFiles, FoundFiles
from shardckpt.tiers.peers.tier_files import FileReader

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_SENDING = 2  # pieces that a rank sends at a time, each from reused memory

# Seconds to wait for a request before the next round: after a round in which pieces or an answer came to this rank,
# which often needs the next ones; after a round with pieces for others; after a round without any.
NEXT_S, BUSY_S, IDLE_S = 0.01, 0.001, 0.02

_FINE, _FAILED = 1, 0


@dataclass(eq=False)
class _PendingPiece:
    """A piece that a thread waits for."""

    piece: FilePiece  # `peer` is the rank that has it
    buffer: memoryview
    is_filled: bool | None = None  # None until the answer comes

    def end(self, *, is_filled: bool) -> None:
        """Record whether the bytes came, and release the caller's memory."""
        self.buffer, self.is_filled = memoryview(b""), is_filled


@dataclass(eq=False)
class _Question:
    """Files that a thread asks rank 0 for."""

    names: tuple[str, ...]  # names of files, or of folders with a slash at the end
    answer: FoundFiles | None = None  # None until it comes


class PieceExchange(Protocol):
    """The file exchange that a `PeerStore` needs."""

    def pull(self, wanted: Sequence[tuple[FilePiece, memoryview]]) -> list[bool]:
        """Fill buffers with pieces that other ranks have; return for each whether its bytes came."""

    def find(self, names: Sequence[str]) -> FoundFiles:
        """Return where files have copies, also all files in folders, whose names end with a slash."""

    def delete(self, name: str) -> None:
        """Delete a file, or a folder whose name ends with a slash, on all nodes."""


class LoneExchange:
    """The exchange for a single node."""

    def __init__(self, on_delete: Callable[[str], None], on_ask: AskForFiles) -> None:
        self._on_delete, self._on_ask = on_delete, on_ask

    def pull(self, wanted: Sequence[tuple[FilePiece, memoryview]]) -> list[bool]:
        """Return that no piece came, since this node has all files."""
        return [False] * len(wanted)

    def find(self, names: Sequence[str]) -> FoundFiles:
        """Return where files have copies, also all files in folders, whose names end with a slash."""
        return self._on_ask(names)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder whose name ends with a slash."""
        self._on_delete(name)


class PeerExchange:
    """Exchanges pieces of files from a restore's start to its end on all ranks."""

    # All ranks run the same rounds until all are done, even if they need nothing. In a round rank 0 plans which pieces
    # are sent, and each rank starts its receives before its sends. So ranks cannot deadlock, and a round bounds memory.

    def __init__(
        self,
        coordinator: LinkedGroup,
        own: FileReader,
        on_delete: Callable[[str], None],
        on_ask: AskForFiles = lambda _names: FoundFiles(),
    ) -> None:
        self._coordinator, self._own, self._on_delete, self._on_ask = coordinator, own, on_delete, on_ask
        self._sender = _PieceSender(coordinator, own)
        self._changed = threading.Condition()
        self._waiting: deque[_PendingPiece] = deque()
        self._deleted: list[str] = []
        self._questions: list[_Question] = []
        self._is_done = False
        self._wait_s = IDLE_S
        self._failure: Exception | None = None
        self._thread = BackgroundThread(self._run, "shardckpt-peers", is_daemon=True)
        self.received_bytes = 0  # bytes that came from other ranks

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
        try:
            if kind is None or issubclass(kind, Exception):
                self._thread.join(self._coordinator.timeout_s)
        finally:
            if self._thread.is_running:  # another rank has not come to the end, or a signal ended the restore here
                self._coordinator.leave()

    def pull(self, wanted: Sequence[tuple[FilePiece, memoryview]]) -> list[bool]:
        """Fill buffers with pieces that other ranks have; return for each whether its bytes came."""
        waiting = [_PendingPiece(piece, buffer) for piece, buffer in wanted]
        with self._changed:
            self._waiting.extend(waiting)
            self._wait_until(lambda: all(each.is_filled is not None for each in waiting))
        return [bool(each.is_filled) for each in waiting]

    def find(self, names: Sequence[str]) -> FoundFiles:
        """Ask rank 0 where files have copies, also all files in folders, whose names end with a slash."""
        if self._coordinator.rank == 0:
            return self._on_ask(names)
        question = _Question(tuple(names))
        with self._changed:
            self._questions.append(question)
            self._wait_until(lambda: question.answer is not None)
        return question.answer or FoundFiles()

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        """Wait for the exchange's thread, with its lock held. Raises as `find`."""
        self._changed.notify_all()
        while self._failure is None and not is_over():
            if not self._thread.is_running:
                raise StorageError("files on other nodes can be read during a restore only", where=self._own.url)
            self._changed.wait(1.0)
        if self._failure is not None:
            raise self._failure

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
        wanted, questions, request = self._collect()

        def decide(messages: list[bytes]) -> list[bytes]:
            requests = [RoundRequest.decode(message, len(messages)) for message in messages]
            answers = zip(requests, plan_round(requests), strict=True)
            return [
                (answer._replace(found=self._on_ask(each.sought)) if each.sought else answer).encode()
                for each, answer in answers
            ]

        what = f"exchanging files of {self._own.url}"
        answer = RoundAnswer.decode(self._coordinator.ask_rank0(what, request.encode(), decide))
        self._wait_s = NEXT_S if answer.accepted or questions else BUSY_S if answer.is_busy else IDLE_S
        for name in answer.deleted:
            self._on_delete(name)
        self._transfer(answer.sends, [wanted[index] for index in answer.accepted])
        with self._changed:
            self._waiting.extendleft(each for each in reversed(wanted) if each.is_filled is None)
            for question in questions:
                question.answer = answer.found
            self._changed.notify_all()
        return answer.is_over

    def _collect(self) -> tuple[list[_PendingPiece], list[_Question], RoundRequest]:
        """Wait a short time for this rank's requests, and return them."""
        with self._changed:
            if not self._waiting and not self._questions and not self._is_done:
                self._changed.wait(self._wait_s)
            wanted: list[_PendingPiece] = []
            nbytes = 0
            while self._waiting and (not wanted or nbytes + self._waiting[0].piece.nbytes <= ROUND_BYTES):
                wanted.append(self._waiting.popleft())
                nbytes += wanted[-1].piece.nbytes
            deleted, self._deleted = self._deleted, []
            questions, self._questions = self._questions, []
            is_done = self._is_done and not self._waiting
        sought = tuple(name for question in questions for name in question.names)
        return wanted, questions, RoundRequest(tuple(each.piece for each in wanted), tuple(deleted), is_done, sought)

    def _transfer(self, sends: Sequence[FilePiece], wanted: Sequence[_PendingPiece]) -> None:
        """Send pieces and receive others at the same time."""
        # The receives start first on every rank, so that no send waits for another.
        arriving = [
            (self._coordinator.start_recv(torch.frombuffer(each.buffer, dtype=torch.uint8), each.piece.peer), each)
            for each in wanted
        ]
        # After its pieces each rank receives one byte per piece: whether the sender could read it.
        counts = Counter(each.piece.peer for each in wanted)
        words = {peer: torch.empty(count, dtype=torch.uint8) for peer, count in counts.items()}
        states = {peer: self._coordinator.start_recv(word, peer) for peer, word in words.items()}
        sending = self._sender.send(sends)
        for work, each in arriving:
            self._coordinator.wait(work, each.piece.peer)
        for peer, state in states.items():
            self._coordinator.wait(state, peer)
        left = {peer: iter(word.tolist()) for peer, word in words.items()}
        for each in wanted:
            each.end(is_filled=next(left[each.piece.peer]) == _FINE)
            self.received_bytes += each.piece.nbytes * bool(each.is_filled)
        for sent in sending:
            self._sender.wait(sent)


class _StartedSend(NamedTuple):
    """Bytes that are being sent."""

    work: Transfer
    peer: int
    tensor: torch.Tensor  # must stay until the transfer ends


class _PieceSender:
    """Sends pieces of a node's files: from where they are, or through a little reused memory."""

    def __init__(self, coordinator: LinkedGroup, own: FileReader) -> None:
        self._coordinator, self._own = coordinator, own
        # Used again: new memory costs more than a copy.
        self._rows = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(_MAX_SENDING)]

    def send(self, pieces: Sequence[FilePiece]) -> list[_StartedSend]:
        """Send pieces, then to each rank one byte per piece; return what is still being sent, to `wait` for."""
        sending: list[_StartedSend] = []
        in_rows: deque[_StartedSend] = deque()
        words: dict[int, list[int]] = {}
        for piece in pieces:
            tensor, is_fine = self._find(piece), True
            if tensor is not None:
                sending.append(self._start(tensor, piece.peer))
            else:
                row = self._take_row(in_rows)[: piece.nbytes]
                is_fine = self._read(piece, row)
                in_rows.append(self._start(row, piece.peer))
            words.setdefault(piece.peer, []).append(_FINE if is_fine else _FAILED)
        sending += in_rows
        sending += [self._start(torch.tensor(found, dtype=torch.uint8), peer) for peer, found in words.items()]
        return sending

    def wait(self, sent: _StartedSend) -> None:
        """Wait until bytes have been received. Raises RankError."""
        self._coordinator.wait(sent.work, sent.peer)

    def _start(self, tensor: torch.Tensor, peer: int) -> _StartedSend:
        return _StartedSend(self._coordinator.send(tensor, peer), peer, tensor)

    def _take_row(self, in_rows: deque[_StartedSend]) -> torch.Tensor:
        """Return the memory that is free next; wait until it has been sent."""
        if len(in_rows) == len(self._rows):
            self.wait(in_rows.popleft())
        self._rows.append(self._rows.pop(0))
        return self._rows[-1]

    def _find(self, piece: FilePiece) -> torch.Tensor | None:
        """Return a piece where it is in this machine's memory; None if it has to be read."""
        try:
            own = self._own
            view = own.view(*piece[1:]) if isinstance(own, MappedStore) else None
        except ShardckptError as error:
            if isinstance(error, RankError):
                raise
            return None
        return None if view is None else torch.frombuffer(view, dtype=torch.uint8)

    def _read(self, piece: FilePiece, row: torch.Tensor) -> bool:
        """Read a piece from this node's store; return False if it cannot be read."""
        try:
            self._own.read([Read(piece.name, piece.offset, memoryview(row.numpy()))])  # type: ignore[arg-type]
        except ShardckptError as error:
            if isinstance(error, RankError):
                raise
            return False
        return True
