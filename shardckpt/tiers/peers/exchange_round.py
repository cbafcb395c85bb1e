"""Rounds in which ranks send each other pieces of files: messages and their plan, without I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardckpt.errors import FormatError
from shardckpt.tiers.peers.known_files import FoundFiles

PIECE_BYTES = 8 << 20  # maximum bytes of one piece

# Maximum bytes that a rank sends or receives in one round, unless it is a single piece.
ROUND_BYTES = 64 << 20


class FilePiece(NamedTuple):
    """A file range that a rank sends to another one."""

    peer: int
    name: str  # name of the file in the store of the node
    offset: int  # in bytes
    nbytes: int  # at most `PIECE_BYTES`


class RoundRequest(NamedTuple):
    """A rank's message in one round."""

    pieces: tuple[FilePiece, ...]  # pieces that it needs, with the rank that has each
    deleted: tuple[str, ...] = ()  # names of files that every node deletes
    is_done: bool = False  # this rank needs no more pieces
    sought: tuple[str, ...] = ()  # names of files whose copies it asks for

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes, size: int) -> RoundRequest:
        """Parse what `encode` returned, in linear time."""
        try:
            pieces, deleted, is_done, sought = json.loads(data)
            wanted = tuple(_read_piece(piece, size) for piece in pieces)
            found = cls(wanted, tuple(map(str, deleted)), bool(is_done), tuple(map(str, sought)))
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError("a request for another node's files is damaged", found=f"{len(data)} bytes") from error
        return found


def _read_piece(piece: Any, size: int) -> FilePiece:
    peer, name, offset, nbytes = piece
    is_valid = type(peer) is type(offset) is type(nbytes) is int and type(name) is str
    if not (is_valid and 0 <= peer < size and 0 <= offset < 1 << 62 and 0 < nbytes <= PIECE_BYTES):
        raise ValueError(piece)
    return FilePiece(peer, name, offset, nbytes)


class RoundAnswer(NamedTuple):
    """Answer to a rank in one round."""

    accepted: tuple[int, ...]  # indices of its pieces that come in this round
    sends: tuple[FilePiece, ...]
    deleted: tuple[str, ...]  # names of files to delete
    is_busy: bool  # a rank needs pieces, or asks for files
    is_over: bool  # no rank needs more pieces: this was the last round
    found: FoundFiles = FoundFiles()  # copies of the files that it asked for

    def encode(self) -> bytes:
        """Return the answer as bytes."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> RoundAnswer:
        """Parse what `encode` returned."""
        accepted, sends, deleted, is_busy, is_over, found = json.loads(data)
        pieces = tuple(FilePiece(*piece) for piece in sends)
        return cls(tuple(accepted), pieces, tuple(deleted), is_busy, is_over, FoundFiles.from_json(found))


def plan_round(requests: Sequence[RoundRequest]) -> list[RoundAnswer]:
    """Return the answers to all ranks' messages."""
    # A rank sends and receives at most `ROUND_BYTES`, or one piece; it asks for the others again. So at least one
    # wanted piece comes in each round. Two ranks see the pieces between them in the same order.
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
