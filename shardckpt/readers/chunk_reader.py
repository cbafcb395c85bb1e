"""Read tensors' boxes from their pieces into buffers; read tensors by blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

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
from shardckpt.dtypes import bits, nbytes
from shardckpt.encodings.codecs import DecodedStream
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Encoded, Manifest, Piece, Span, Strided, TensorEntry
from shardckpt.plan.layout.copy_plan import as_bytes
from shardckpt.plan.layout.coverage import locate
from shardckpt.reader import Reader
from shardckpt.storage.store import Read, Store

if TYPE_CHECKING:
    import numpy as np

# Maximum bytes in a range that is always read in full, even if few are needed: one disk block.
_NEAR_BYTES = 4096

# The same limit for large boxes of strided views, for which one more call costs more than reading these bytes.
_NEAR_BYTES_OF_LARGE = 1 << 18

_LARGE_BYTES = 1 << 18

_MAX_STAGED_BYTES = 1 << 21
# Maximum staged ranges of strided views in one batch; a full batch is read and scattered before the next.
_MAX_STAGED = 4096

# NumPy dtypes by width in bytes, used to copy elements of any dtype without interpreting their bits.
_BY_WIDTH = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}


class ReadItem(NamedTuple):
    """A box to read."""

    pieces: Sequence[Piece]  # resolved pieces of the tensor, which cover the box
    box: Box  # box in the full tensor, in elements
    dtype: str  # stored dtype, in torch's spelling
    buffer: memoryview  # writable buffer with exactly the box's bytes; filled in row-major order


@dataclass(frozen=True, slots=True)
class _StagedRead:
    """Staged elements from one read, `strides` apart, for a `ReadItem`'s box."""

    want: ReadItem
    box: Box
    staged: np.ndarray[tuple[int], np.dtype[np.uint8]]
    strides: Shape


def straight_reads(want: ReadItem) -> list[Read] | None:
    """Return the reads that fill a box directly; None if bytes must be transformed."""
    reads: list[Read] = []
    for piece in want.pieces:
        box, file, layout = piece
        if box == want.box and isinstance(layout, Span):
            return [Read(file, layout.offset, want.buffer)]
        common = _find_common(box, want.box, bits(want.dtype))
        if common is not None and isinstance(layout, Span):
            if common.nbytes:
                reads.append(
                    Read(file, layout.offset + common.start, want.buffer[common.at : common.at + common.nbytes])
                )
            continue
        inner = intersect(box, want.box)
        if inner is None:
            continue
        if not isinstance(layout, Span) or not is_contiguous(want.box.size, shift(inner, want.box.offset)):
            return None
        reads += [Read(file, start, target) for target, start in _span_ranges(want, piece, layout, inner, [])]
    return reads


class _CommonRange(NamedTuple):
    """Elements that a piece and a box share, consecutive in both."""

    start: int  # first byte in the piece
    at: int  # first byte in the box
    nbytes: int  # number of bytes; 0 without common elements


@lru_cache(maxsize=4096)  # most layers of a model have the same boxes
def _find_common(piece: Box, box: Box, width: int) -> _CommonRange | None:
    """Return the elements that a piece and a box share; None unless they are consecutive and start at bytes in both."""
    inner = intersect(piece, box)
    if inner is None:
        return _CommonRange(0, 0, 0)
    in_piece, in_box = shift(inner, piece.offset), shift(inner, box.offset)
    if not (is_contiguous(piece.size, in_piece) and is_contiguous(box.size, in_box)):
        return None
    start, at = flat_index(piece.size, in_piece.offset) * width, flat_index(box.size, in_box.offset) * width
    size = inner.volume * width
    return None if start % 8 or at % 8 or size % 8 else _CommonRange(start // 8, at // 8, size // 8)


class PieceReader:
    """Reads boxes from one store's files; keeps a decoder for each encoded piece until `forget`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._decoders: dict[tuple[str, Encoded], DecodedStream] = {}

    def fill(self, wants: Sequence[ReadItem], more: Sequence[Read] = ()) -> None:
        """Fill the buffers of all items with one batch of reads.

        It needs memory for the buffers again at most, and 2 MiB for strided views, which are read in several batches.
        """
        reads: list[Read] = [*more]
        parts: list[_StagedRead] = []
        for want in wants:
            for piece in want.pieces:
                inner = intersect(piece.box, want.box)
                if inner is not None:
                    self._plan(want, piece, inner, reads, parts)
        self._carry_out(reads, parts)

    def _carry_out(self, reads: list[Read], parts: list[_StagedRead]) -> None:
        self._store.read(reads)
        for part in parts:
            _scatter(part)
        reads.clear()
        parts.clear()

    def forget(self) -> None:
        """Drop the decoders; call it when the tensors read so far are complete."""
        self._decoders.clear()

    def _plan(self, want: ReadItem, piece: Piece, inner: Box, reads: list[Read], parts: list[_StagedRead]) -> None:
        layout = piece.layout
        if isinstance(layout, Span):
            for target, start in _span_ranges(want, piece, layout, inner, parts):
                reads.append(Read(piece.file, start, target))
        elif isinstance(layout, Strided):
            staged = 0
            for part, start in _strided_ranges(want, piece, layout, inner):
                reads.append(Read(piece.file, start, memoryview(part.staged)))  # type: ignore[arg-type]
                parts.append(part)
                staged += part.staged.nbytes
                if staged >= _MAX_STAGED_BYTES or len(parts) >= _MAX_STAGED:
                    self._carry_out(reads, parts)
                    staged = 0
        elif isinstance(layout, Encoded):
            self._decode(want, piece, layout, inner, parts)
        else:
            raise TypeError(f"piece {piece.box} of {piece.file} was not resolved")

    def _decode(self, want: ReadItem, piece: Piece, layout: Encoded, inner: Box, parts: list[_StagedRead]) -> None:
        stream = self._decoders.get((piece.file, layout))
        if stream is None:
            stream = self._decoders[piece.file, layout] = DecodedStream(self._store, piece.file, layout)
        if isinstance(layout.inner, Span):
            for target, start in _span_ranges(want, piece, layout.inner, inner, parts):
                stream.read_into(start, target)
        else:
            for part, start in _strided_ranges(want, piece, layout.inner, inner):
                stream.read_into(start, memoryview(part.staged))  # type: ignore[arg-type]
                _scatter(part)


def _span_ranges(
    want: ReadItem, piece: Piece, span: Span, inner: Box, parts: list[_StagedRead]
) -> Iterator[tuple[memoryview, int]]:
    """Yield a buffer for `inner`, and the offset of its bytes in the file."""
    # The buffer is part of the item's buffer if the bytes are contiguous there; otherwise it is scattered later.
    width = bits(want.dtype)
    in_piece, in_want = shift(inner, piece.box.offset), shift(inner, want.box.offset)
    if not is_contiguous(piece.box.size, in_piece):
        for row in _rows(in_piece):
            back = shift(row, tuple(-o for o in piece.box.offset))
            yield from _span_ranges(want, piece, span, back, parts)
        return
    first = flat_index(piece.box.size, in_piece.offset) * width
    size = inner.volume * width
    at = flat_index(want.box.size, in_want.offset) * width
    if is_contiguous(want.box.size, in_want):
        if first % 8 or size % 8 or at % 8:
            raise UnsupportedError(f"a box starts inside a byte of {want.dtype}", where=piece.file, found=str(inner))
        yield want.buffer[at // 8 : (at + size) // 8], span.offset + first // 8
        return
    if width % 8:
        raise UnsupportedError(f"a box starts inside a byte of {want.dtype}", where=piece.file, found=str(inner))
    staged = _allocate(size // 8)
    parts.append(_StagedRead(want, in_want, staged, strides(inner.size)))
    yield memoryview(staged), span.offset + first // 8  # type: ignore[arg-type]


def _allocate(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return bytes that are not initialized."""
    import numpy as np  # noqa: PLC0415  (0.07 s; pieces that are read as they are need none)

    return np.empty(size, np.uint8)


def _rows(box: Box) -> Iterator[Box]:
    """Split a box along its first dimension with more than one index."""
    dim = next(d for d, n in enumerate(box.size) if n > 1)
    for i in range(box.size[dim]):
        yield Box(
            (*box.offset[:dim], box.offset[dim] + i, *box.offset[dim + 1 :]),
            (*box.size[:dim], 1, *box.size[dim + 1 :]),
        )


def _strided_ranges(want: ReadItem, piece: Piece, layout: Strided, inner: Box) -> Iterator[tuple[_StagedRead, int]]:
    """Yield the byte ranges in a storage that contain `inner`, split at large gaps between elements."""
    width = bits(want.dtype) // 8
    near = _NEAR_BYTES if len(want.buffer) < _LARGE_BYTES else _NEAR_BYTES_OF_LARGE
    todo = [inner]
    while todo:
        box = todo.pop()
        rel = shift(box, piece.box.offset)
        first = layout.start + sum(o * s for o, s in zip(rel.offset, layout.strides, strict=True))
        length = 1 + sum((n - 1) * s for n, s in zip(box.size, layout.strides, strict=True))
        needed = prod(n for n, s in zip(box.size, layout.strides, strict=True) if s)
        if length * width <= max(near, min(2 * needed * width, _MAX_STAGED_BYTES)):
            staged = _allocate(length * width)
            part = _StagedRead(want, shift(box, want.box.offset), staged, layout.strides)
            yield part, layout.offset + first * width
        else:
            low, high = _halves(box, layout.strides)
            todo += (high, low)  # the lower half is next, since decoders only run forward


def _halves(box: Box, steps: Shape) -> tuple[Box, Box]:
    """Split a box along the dimension with the largest stride."""
    dim = max(range(len(steps)), key=lambda d: (box.size[d] - 1) * steps[d] if steps[d] else -1)
    half = box.size[dim] // 2
    low = Box(box.offset, (*box.size[:dim], half, *box.size[dim + 1 :]))
    high = Box(
        (*box.offset[:dim], box.offset[dim] + half, *box.offset[dim + 1 :]),
        (*box.size[:dim], box.size[dim] - half, *box.size[dim + 1 :]),
    )
    return low, high


def _scatter(part: _StagedRead) -> None:
    """Copy staged elements to their box in the item's buffer."""
    # Dimensions of size 1 are dropped: NumPy supports 64 dimensions, and a hostile file may have any number of size 1.
    import numpy as np  # noqa: PLC0415  (as in `_allocate`)

    width = bits(part.want.dtype) // 8
    kind = _BY_WIDTH[width]
    dims = [d for d, n in enumerate(part.want.box.size) if n != 1]
    size, steps = [part.box.size[d] for d in dims], [part.strides[d] * width for d in dims]
    source: np.ndarray[Any, Any] = np.ndarray(size, kind, part.staged.data, 0, steps)
    target: np.ndarray[Any, Any] = np.ndarray([part.want.box.size[d] for d in dims], kind, part.want.buffer)
    target[tuple(slice(part.box.offset[d], part.box.offset[d] + part.box.size[d]) for d in dims)] = source


def same_bits(reader: Reader, manifest: Manifest, a: TensorEntry, b: TensorEntry) -> bool:
    """Return True if two arrays in one checkpoint have equal bits."""
    return have_equal_blocks(reader, *locate(reader, manifest, [a, b]))


def have_equal_blocks(reader: Reader, a: TensorEntry, b: TensorEntry) -> bool:
    """Return True if two arrays with resolved pieces and one shape have equal bits."""
    return all(x == y for x, y in zip(read_blocks(reader, a), read_blocks(reader, b), strict=True))


def read_blocks(reader: Reader, entry: TensorEntry, block_bytes: int = 1 << 22) -> Iterator[bytearray]:
    """Yield an array's bytes in row-major order, block by block."""
    if bits(entry.stored) % 8:
        entry = as_bytes(entry)
    pieces = PieceReader(reader.store)
    most = max(block_bytes * 8 // bits(entry.stored), 1)
    for box in contiguous_blocks(full_box(entry.shape), most) if prod(entry.shape) else ():
        buffer = bytearray(nbytes(entry.stored, box.volume))
        pieces.fill([ReadItem(entry.pieces, box, entry.stored, memoryview(buffer))])
        yield buffer
