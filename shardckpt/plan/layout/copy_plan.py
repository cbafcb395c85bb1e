"""Plan how to fill one output file: copied runs, and assembled batches; views over stored pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardckpt.boxes import (
    Box,
    Shape,
    contiguous_blocks,
    flat_index,
    full_box,
    intersect,
    is_contiguous,
    shift,
    strides,
)
from shardckpt.dtypes import bits, block_elements, nbytes
from shardckpt.manifest import Encoded, Layout, Piece, Span, Strided, TensorEntry
from shardckpt.plan.layout.output_files import OutputTensor

_FEW_PIECES = 64
# A block with many pieces whose average size is below this is assembled at once instead of copying each.
_FINE_BYTES = 1 << 16

_Steps = Callable[[Shape], Shape]  # transforms strides


@dataclass(frozen=True, slots=True)
class Copy:
    """Consecutive bytes that are copied unchanged."""

    file: str
    offset: int  # first byte in the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class Take:
    """A tensor's block within a batch."""

    tensor: OutputTensor
    box: Box  # one contiguous range
    offset: int  # in the batch, in bytes as written
    # The block's stored bytes, if they are written unchanged; None if pieces are assembled.
    source: Copy | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return nbytes(self.tensor.dtype, self.box.volume)


@dataclass(frozen=True, slots=True)
class Batch:
    """Bytes that are assembled in memory and written at once."""

    nbytes: int  # bytes as written
    takes: tuple[Take, ...]  # contiguous


@dataclass(frozen=True, slots=True)
class _Run:
    """A tensor's contiguous range, and its source bytes if they can be copied."""

    tensor: OutputTensor
    box: Box
    source: Copy | None


def steps(
    tensors: Sequence[OutputTensor], *, batch_bytes: int, copy_bytes: int, wide_bytes: int = 0
) -> Iterator[Copy | Batch]:
    """Yield the steps that write `tensors` contiguously."""
    wide_bytes = max(batch_bytes, wide_bytes)
    takes: list[Take] = []
    size = stored = 0
    for run in _merge_runs(
        run for tensor in tensors for run in _runs(tensor, wide_bytes if is_scattered(tensor) else batch_bytes)
    ):
        source = run[0].source
        if source is not None and sum(r.source.nbytes for r in run if r.source) >= copy_bytes:
            if takes:
                yield Batch(size, tuple(takes))
                takes, size, stored = [], 0, 0
            yield Copy(source.file, source.offset, sum(r.source.nbytes for r in run if r.source))
            continue
        for part in run:
            written = nbytes(part.tensor.dtype, part.box.volume)
            read = nbytes(part.tensor.entry.stored, part.box.volume)
            if takes and (size + written > batch_bytes or stored + read > batch_bytes):
                yield Batch(size, tuple(takes))
                takes, size, stored = [], 0, 0
            has_bytes = bits(part.tensor.entry.stored) % 8 == 0
            takes.append(Take(part.tensor, part.box, size, part.source if has_bytes else None))
            size += written
            stored += read
    if takes:
        yield Batch(size, tuple(takes))


def _merge_runs(runs: Iterator[_Run]) -> Iterator[list[_Run]]:
    """Join runs whose source bytes are consecutive in one file."""
    group: list[_Run] = []
    for run in runs:
        last = group[-1].source if group else None
        if last and run.source and (last.file, last.offset + last.nbytes) == (run.source.file, run.source.offset):
            group.append(run)
            continue
        if group:
            yield group
        group = [run]
    if group:
        yield group


def _runs(tensor: OutputTensor, batch_bytes: int) -> Iterator[_Run]:
    """Split a tensor into contiguous ranges in order: pieces, else blocks."""
    if bits(tensor.entry.stored) % 8:
        tensor = replace(tensor, entry=as_bytes(tensor.entry), dtype=as_bytes(tensor.entry).stored)
    entry = tensor.entry
    pieces = sorted((p for p in entry.pieces if p.box.volume), key=lambda p: flat_index(entry.shape, p.box.offset))
    most = most_elements(tensor, batch_bytes)
    is_fine = len(pieces) > _FEW_PIECES and entry.nbytes < len(pieces) * _FINE_BYTES
    # Pieces are copied only if all are contiguous.
    if not tensor.is_computed and not is_fine and all(_is_run(tensor, piece) for piece in pieces):
        for box, file, layout in pieces:
            copy = Copy(file, layout.offset, layout.nbytes)
            if layout.nbytes <= batch_bytes:
                yield _Run(tensor, box, copy)
            else:
                yield from _pieces_of_run(tensor, box, copy, most)
    elif prod(entry.shape):
        for block in contiguous_blocks(full_box(entry.shape), most):
            yield _Run(tensor, block, None)


_CHANGE_ARRAYS = 4  # arrays that a change holds at a time, each as wide as the tensor: codes, scales and indices


def most_elements(tensor: OutputTensor, most_bytes: int) -> int:
    """Return how many elements fit into some bytes, as stored and as written; a quantized type has full blocks."""
    widest, block = max(bits(tensor.entry.stored), bits(tensor.dtype)), block_elements(tensor.dtype)
    if tensor.change is not None:
        widest *= _CHANGE_ARRAYS
    return max(most_bytes * 8 // widest // block, 1) * block


def is_scattered(tensor: OutputTensor) -> bool:
    """Return True if neighbors in the tensor are far apart in a storage."""
    return any(
        isinstance(inner := p.layout.inner if isinstance(p.layout, Encoded) else p.layout, Strided)
        and list(inner.strides) != sorted(inner.strides, reverse=True)
        for p in tensor.entry.pieces
    )


def as_bytes(entry: TensorEntry) -> TensorEntry:
    """Return an array with sub-byte elements as bytes, which can be split anywhere."""
    # With several spans, a split between elements may be inside a byte.
    if len(entry.pieces) != 1 or not isinstance(entry.pieces[0].layout, Span):
        return entry
    _, file, span = entry.pieces[0]
    shape = (span.nbytes,)
    return TensorEntry(entry.path, shape, "uint8", (Piece(full_box(shape), file, span),))


def _pieces_of_run(tensor: OutputTensor, box: Box, copy: Copy, most: int) -> Iterator[_Run]:
    """Split a long run where batches may end; `_merge_runs` joins parts that are copied together."""
    at = copy.offset
    for block in contiguous_blocks(box, most):
        size = nbytes(tensor.dtype, block.volume)
        yield _Run(tensor, block, Copy(copy.file, at, size))
        at += size


def _is_run(tensor: OutputTensor, piece: Piece) -> bool:
    return isinstance(piece.layout, Span) and is_contiguous(tensor.entry.shape, piece.box)


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


def _with_strides(layout: Layout, change: _Steps) -> Layout:
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
