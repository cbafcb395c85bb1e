"""Views of an array's pieces: narrow, shift, permute, insert or remove dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardckpt.boxes import Box, Shape, flat_index, intersect, is_contiguous, shift, strides
from shardckpt.dtypes import nbytes
from shardckpt.manifest import Encoded, Layout, Piece, Span, Strided

Steps = Callable[[Shape], Shape]  # transforms strides


def narrow(pieces: Sequence[Piece], region: Box, dtype: str) -> list[Piece]:
    """Return the pieces inside a region, in the region's coordinates."""
    found = []
    for piece in pieces:
        inner = intersect(piece.box, region)
        if inner is not None:
            layout = piece.layout if inner == piece.box else _narrow_layout(piece, inner, dtype)
            found.append(Piece(shift(inner, region.offset), piece.file, layout))
    return found


def shift_pieces(pieces: Sequence[Piece], dim: int, by: int) -> list[Piece]:
    """Move pieces by `by` elements along one dimension."""
    return [piece._replace(box=_shift_box(piece.box, dim, by)) for piece in pieces]


def unsqueeze(pieces: Sequence[Piece], dim: int) -> list[Piece]:
    """Insert a dimension of size 1 before dimension `dim`."""

    def steps(given: Shape) -> Shape:
        return (*given[:dim], 0, *given[dim:])

    found = []
    for piece in pieces:
        (offset, size), layout = piece.box, piece.layout
        box = Box((*offset[:dim], 0, *offset[dim:]), (*size[:dim], 1, *size[dim:]))
        found.append(Piece(box, piece.file, _with_strides(layout, steps)))
    return found


def squeeze(pieces: Sequence[Piece], dim: int) -> list[Piece]:
    """Remove a dimension of size 1."""
    found = []
    for piece in pieces:
        (offset, size), layout = piece.box, piece.layout
        box = Box((*offset[:dim], *offset[dim + 1 :]), (*size[:dim], *size[dim + 1 :]))
        found.append(Piece(box, piece.file, _with_strides(layout, lambda given: (*given[:dim], *given[dim + 1 :]))))
    return found


def permute(pieces: Sequence[Piece], dims: Sequence[int]) -> list[Piece]:
    """Permute the dimensions of pieces: new dimension i is old dimension `dims[i]`."""
    found = []
    for piece in pieces:
        offset, size = piece.box
        box = Box(tuple(offset[d] for d in dims), tuple(size[d] for d in dims))
        layout = _with_strides(_as_strided(piece), lambda given: tuple(given[d] for d in dims))
        found.append(Piece(box, piece.file, layout))
    return found


def _shift_box(box: Box, dim: int, by: int) -> Box:
    return Box((*box.offset[:dim], box.offset[dim] + by, *box.offset[dim + 1 :]), box.size)


def _as_strided(piece: Piece) -> Layout:
    layout = piece.layout
    inner = layout.inner if isinstance(layout, Encoded) else layout
    assert isinstance(inner, (Span, Strided)), "pieces are resolved before they are seen otherwise"
    if isinstance(inner, Span):
        inner = Strided(inner.offset, inner.nbytes, 0, strides(piece.box.size))
    return layout._replace(inner=inner) if isinstance(layout, Encoded) else inner


def _with_strides(layout: Layout, change: Steps) -> Layout:
    """Return a layout with transformed strides; contiguous elements stay contiguous."""
    if isinstance(layout, Encoded):
        inner = _with_strides(layout.inner, change)
        assert isinstance(inner, (Span, Strided)), "only those are in a decoded stream"
        return layout._replace(inner=inner)
    return layout._replace(strides=change(layout.strides)) if isinstance(layout, Strided) else layout


def _narrow_layout(piece: Piece, box: Box, dtype: str) -> Layout:
    """Return the layout for a box inside a piece."""
    layout, rel = piece.layout, shift(box, piece.box.offset)
    inner = layout.inner if isinstance(layout, Encoded) else layout
    assert isinstance(inner, (Span, Strided)), "pieces are resolved before they are seen otherwise"
    if isinstance(inner, Strided):
        start = inner.start + sum(o * s for o, s in zip(rel.offset, inner.strides, strict=True))
        made: Span | Strided = inner._replace(start=start)
    else:
        first = flat_index(piece.box.size, rel.offset)
        if is_contiguous(piece.box.size, rel):
            made = Span(inner.offset + nbytes(dtype, first), nbytes(dtype, rel.volume))
        else:
            made = Strided(inner.offset, inner.nbytes, first, strides(piece.box.size))
    return layout._replace(inner=made) if isinstance(layout, Encoded) else made
