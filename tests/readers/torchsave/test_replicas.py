"""Pieces of several ranks with one box: which are known to be equal, and which are compared when they are read."""

from __future__ import annotations

from typing import NamedTuple

from shardckpt.boxes import Box
from shardckpt.manifest import Lazy, Piece
from shardckpt.readers.torchsave.replicas import find_replicas, join_replicas, list_replicas
from shardckpt.readers.torchsave.storages import UnreadableTensor

BOX = Box((0,), (2,))


class Detail(NamedTuple):
    checksum: int | None

    def content_key(self) -> int | None:
        return self.checksum

    def full_checksum(self, size: int) -> int | None:
        return self.checksum if size == 8 else None


def piece(file: str, detail: object, box: Box = BOX) -> Piece:
    return Piece(box, file, Lazy(0, 0, detail))


def test_pieces_with_equal_checksums_are_one() -> None:
    first = piece("0.pt", Detail(7))
    assert join_replicas("w", "float32", [first, piece("1.pt", Detail(7))]) == first


def test_pieces_without_checksums_are_kept_once_each() -> None:
    pieces = [piece(f"{rank}.pt", Detail(None)) for rank in range(3)]
    joined = join_replicas("w", "float32", [*pieces, pieces[0], pieces[2]])
    assert (joined.file, list_replicas(joined)) == ("0.pt", tuple(pieces))


def test_a_checksum_that_differs_names_its_file() -> None:
    joined = join_replicas("w", "float32", [piece(f"{at}.pt", Detail(n)) for at, n in enumerate((7, 7, 8, 9))])
    replicas = find_replicas(joined)
    assert replicas is not None
    different = replicas.find_different()
    assert different is not None and different.file == "2.pt"


def test_unknown_checksums_prove_nothing() -> None:
    for checksums in ((7, None), (None, 7), (None, None)):
        joined = join_replicas("w", "float32", [piece(f"{at}.pt", Detail(n)) for at, n in enumerate(checksums)])
        replicas = find_replicas(joined)
        assert replicas is not None and replicas.find_different() is None


def test_what_no_rank_can_read_is_one() -> None:
    pieces = [piece(f"{rank}.pt", UnreadableTensor(("w",), "quantized")) for rank in range(2)]
    assert join_replicas("w", "uint8", pieces) == pieces[0]


def test_what_one_rank_cannot_read_is_compared() -> None:
    pieces = [piece("0.pt", Detail(7)), piece("1.pt", UnreadableTensor(("w",), "quantized"))]
    assert list_replicas(join_replicas("w", "float32", pieces)) == tuple(pieces)


def test_boxes_without_elements_are_equal() -> None:
    pieces = [piece(f"{rank}.pt", Detail(None), Box((0,), (0,))) for rank in range(2)]
    assert join_replicas("w", "float32", pieces) == pieces[0]
