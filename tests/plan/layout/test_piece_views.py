"""Pieces seen as another array: every part, turn and dimension more or less is where numpy has it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest

from shardckpt.boxes import Box, full_box, strides
from shardckpt.manifest import Encoded, Layout, Piece, Span, Strided
from shardckpt.plan.layout.piece_views import narrow, permute, shift_pieces, squeeze, unsqueeze

ARRAY = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
AT = 12
DATA = b"x" * AT + ARRAY.tobytes() + np.ascontiguousarray(ARRAY.transpose(2, 0, 1)).tobytes()
SECOND = AT + ARRAY.nbytes
LAYOUTS: dict[str, Layout] = {
    "span": Span(AT, ARRAY.nbytes),
    "strided": Strided(SECOND, ARRAY.nbytes, 0, (3, 1, 6)),
    "encoded": Encoded("zstd", 0, 0, Span(AT, ARRAY.nbytes)),  # as if the decoded stream were the file
}


def read(pieces: Sequence[Piece], shape: tuple[int, ...]) -> np.ndarray:
    """Return what pieces hold together."""
    found = np.full(shape, -1, np.int32)
    for box, _, layout in pieces:
        inner = layout.inner if isinstance(layout, Encoded) else layout
        assert isinstance(inner, (Span, Strided))
        start, steps = (0, strides(box.size)) if isinstance(inner, Span) else (inner.start, inner.strides)
        part = np.ndarray(box.size, np.int32, DATA, inner.offset + 4 * start, [4 * step for step in steps])
        if isinstance(inner, Span):
            assert inner.nbytes == part.nbytes
        found[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))] = part
    assert (found >= 0).all()
    return found


@pytest.fixture(params=sorted(LAYOUTS))
def pieces(request: pytest.FixtureRequest) -> list[Piece]:
    return [Piece(full_box(ARRAY.shape), "f", LAYOUTS[request.param])]


def test_every_part_is_found_and_whole_rows_stay_spans(pieces: list[Piece]) -> None:
    ranges = [[(o, n) for o in range(length) for n in range(1, length - o + 1)] for length in ARRAY.shape]
    for chosen in product(*ranges):
        box = Box(tuple(o for o, _ in chosen), tuple(n for _, n in chosen))
        found = narrow(pieces, box, "int32")
        expected = ARRAY[tuple(slice(o, o + n) for o, n in chosen)]
        assert (read(found, box.size) == expected).all()
    [row] = narrow(pieces, Box((1, 0, 0), (1, 3, 4)), "int32")
    assert isinstance(row.layout, type(pieces[0].layout))


def test_a_part_of_a_part_and_what_lies_outside(pieces: list[Piece]) -> None:
    once = narrow(pieces, Box((0, 1, 1), (2, 2, 3)), "int32")
    twice = narrow(once, Box((1, 0, 1), (1, 2, 2)), "int32")
    assert (read(twice, (1, 2, 2)) == ARRAY[1:, 1:, 2:]).all()
    half = [Piece(Box((0, 0, 0), (1, 3, 4)), "f", Span(AT, 48))]
    assert narrow(half, Box((1, 0, 0), (1, 3, 4)), "int32") == []


@pytest.mark.parametrize("dims", list(permutations(range(3))))
def test_every_turn(pieces: list[Piece], dims: tuple[int, ...]) -> None:
    expected = ARRAY.transpose(dims)
    found = permute(pieces, dims)
    assert (read(found, expected.shape) == expected).all()
    part = narrow(found, Box((1, 0, 0), (1, *expected.shape[1:])), "int32")
    assert (read(part, (1, *expected.shape[1:])) == expected[1:2]).all()


@pytest.mark.parametrize("dim", range(4))
def test_a_dimension_more_and_less(pieces: list[Piece], dim: int) -> None:
    more = unsqueeze(pieces, dim)
    assert (read(more, np.expand_dims(ARRAY, dim).shape) == np.expand_dims(ARRAY, dim)).all()
    assert (read(squeeze(more, dim), ARRAY.shape) == ARRAY).all()


def test_pieces_move(pieces: list[Piece]) -> None:
    both = [*pieces, *shift_pieces(pieces, 1, 3)]
    assert (read(both, (2, 6, 4)) == np.concatenate([ARRAY, ARRAY], 1)).all()
