"""Rounds in which ranks give each other pieces of files: messages and their plan, without I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardckpt.checkpoint.peers.known_files import FoundFiles
from shardckpt.errors import FormatError

PIECE_BYTES = 8 << 20
"""Maximum bytes of one piece."""

ROUND_BYTES = 64 << 20
"""Bytes that a rank sends in one round, at most, unless it sends a single piece; it receives no more."""


class FilePiece(NamedTuple):
    """A range of a file that a rank gives to another one.

    Attributes:
        peer: The other rank.
        name: Name of the file in the store of the node.
        offset: Offset of the first byte.
        nbytes: Number of bytes, at most `PIECE_BYTES`.
    """

    peer: int
    name: str
    offset: int
    nbytes: int


class RoundRequest(NamedTuple):
    """Message of a rank in one round.

    Attributes:
        pieces: Pieces that it needs, with the rank that has each.
        deleted: Names of files that every node deletes.
        is_done: Whether this rank needs no more pieces.
        sought: Names of files whose copies it asks for.
    """

    pieces: tuple[FilePiece, ...]
    deleted: tuple[str, ...] = ()
    is_done: bool = False
    sought: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes, size: int) -> RoundRequest:
        """Parse the bytes of `encode`, in time linear in them.

        Args:
            data: Bytes of a message.
            size: Number of ranks.

        Raises:
            FormatError: The bytes are not such a message.
        """
        try:
            pieces, deleted, is_done, sought = json.loads(data)
            wanted = tuple(_read_piece(piece, size) for piece in pieces)
            found = cls(wanted, tuple(map(str, deleted)), bool(is_done), tuple(map(str, sought)))
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError("a request for files of another node is damaged", found=f"{len(data)} bytes") from error
        return found


def _read_piece(piece: Any, size: int) -> FilePiece:
    peer, name, offset, nbytes = piece
    is_valid = type(peer) is type(offset) is type(nbytes) is int and type(name) is str
    if not (is_valid and 0 <= peer < size and 0 <= offset < 1 << 62 and 0 < nbytes <= PIECE_BYTES):
        raise ValueError(piece)
    return FilePiece(peer, name, offset, nbytes)


class RoundAnswer(NamedTuple):
    """Answer to a rank in one round.

    Attributes:
        accepted: Indices of its pieces that come in this round.
        sends: Pieces that it sends.
        deleted: Names of files to delete.
        is_busy: Whether any rank needs pieces, or asks for files.
        is_over: Whether no rank needs more pieces: this was the last round.
        found: Copies of the files that it asked for.
    """

    accepted: tuple[int, ...]
    sends: tuple[FilePiece, ...]
    deleted: tuple[str, ...]
    is_busy: bool
    is_over: bool
    found: FoundFiles = FoundFiles()

    def encode(self) -> bytes:
        """Return the answer as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> RoundAnswer:
        """Return the answer from the bytes of `encode`."""
        accepted, sends, deleted, is_busy, is_over, found = json.loads(data)
        pieces = tuple(FilePiece(*piece) for piece in sends)
        return cls(tuple(accepted), pieces, tuple(deleted), is_busy, is_over, FoundFiles.from_json(found))


def plan_round(requests: Sequence[RoundRequest]) -> list[RoundAnswer]:
    """Return the answers to the messages of all ranks.

    A rank sends at most `ROUND_BYTES` and receives at most as many, or a single piece; other pieces are asked for
    again. If a piece is wanted, at least one comes. Two ranks see the pieces between them in the same order.

    Args:
        requests: Messages, in rank order.
    """
    sent, received = [0] * len(requests), [0] * len(requests)
    sends: list[list[FilePiece]] = [[] for _ in requests]
    accepted: list[list[int]] = [[] for _ in requests]
    for rank, request in enumerate(requests):
        for index, piece in enumerate(request.pieces):
            if _has_space(sent[piece.peer], piece.nbytes) and _has_space(received[rank], piece.nbytes):
                sent[piece.peer] += piece.nbytes
                received[rank] += piece.nbytes
                sends[piece.peer].append(piece._replace(peer=rank))
                accepted[rank].append(index)
    deleted = tuple(dict.fromkeys(name for request in requests for name in request.deleted))
    is_busy = any(request.pieces or request.sought for request in requests)
    is_over = all(request.is_done for request in requests) and not is_busy
    return [
        RoundAnswer(tuple(indices), tuple(pieces), deleted, is_busy, is_over)
        for indices, pieces in zip(accepted, sends, strict=True)
    ]


def _has_space(nbytes: int, more: int) -> bool:
    return not nbytes or nbytes + more <= ROUND_BYTES
