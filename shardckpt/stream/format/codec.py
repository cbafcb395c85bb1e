"""The changes of a box: find, encode, compose and apply them.

Elements are unsigned integers, flat in the box's row-major order. Complex numbers of 16 bytes are two integers each.

Encoded changes are a header, the length of each plane, and the planes. A plane has one byte of each number: first of
each gap between positions, then of each value. It is a zstd frame, or as it is if that is not longer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zstandard

from shardckpt.boxes import Box, Shape, flat_index, intersect, is_contiguous, shift, strides
from shardckpt.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements = NDArray[np.unsignedinteger[Any]]
    Positions = NDArray[np.int64]
    Words = NDArray[np.uint64]

__all__ = [
    "BoxChange",
    "ChangedWords",
    "apply_change",
    "apply_part",
    "compose_changes",
    "decode_change",
    "encode_change",
    "find_changes",
    "map_change",
    "shift_positions",
]

_BLOCK = 1 << 16  # elements at a time: their buffers stay in the cache
_WORD = 8  # bytes that are compared at once: most are equal, so that several elements take one comparison
_COMPARED = 1 << 18  # words that are compared at a time
_GAP_BYTES = 2  # of a gap and the position's share, where a full copy is weighed against positions
_LEVEL = 1

_HEADER = struct.Struct("<BBBxQ")  # kind, bytes of a value, bytes of a gap, number of values
_SPARSE, _FULL = 1, 2
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class BoxChange:
    """What changed in a box.

    Attributes:
        numel: Number of elements in the box.
        positions: Flat positions of the changed elements, ascending; None if `values` has every element.
        values: XOR of the old and the new element at each position; without positions every new element.
    """

    numel: int
    positions: Positions | None
    values: Elements

    @property
    def is_full(self) -> bool:
        """Whether the change has the new value of every element."""
        return self.positions is None


class ChangedWords(NamedTuple):
    """Words of 8 bytes in a box that changed."""

    at: Positions  # ascending
    old: Words
    new: Words


def find_changes(old: Elements, new: Elements) -> tuple[BoxChange, ChangedWords | None]:
    """Return what changed from `old` to `new`, and the words that changed.

    The change has every new element if positions would not save bytes. Then there are no words, and none either if the
    elements do not fill them.
    """
    if old.shape != new.shape or old.dtype != new.dtype or old.ndim != 1:
        raise ValueError(f"both must be flat and alike, got {old.dtype} {old.shape} and {new.dtype} {new.shape}")
    most = len(new) * new.itemsize // (new.itemsize + _GAP_BYTES)
    n = _WORD // new.itemsize
    if len(new) % n:
        xor = old ^ new
        at = np.flatnonzero(xor != 0)
        change, words = BoxChange(len(new), at, xor[at]), None
    else:
        words = _find_words(old.view(np.uint64), new.view(np.uint64), most)
        if words is None:
            return BoxChange(len(new), None, new.copy()), None
        change = _split_words(words, new)
    return (change, words) if len(change.values) <= most else (BoxChange(len(new), None, new.copy()), None)


def _find_words(old: Words, new: Words, most: int) -> ChangedWords | None:
    """Return the words that differ; None if there are more than `most`."""
    found, count = [], 0
    for start in range(0, len(new), _COMPARED):
        one, other = old[start : start + _COMPARED], new[start : start + _COMPARED]
        at = np.flatnonzero(one != other)
        if len(at):
            found.append((at + start, one[at], other[at]))
            count += len(at)
        if count > most:
            return None
    if not found:
        return ChangedWords(np.empty(0, np.int64), new[:0], new[:0])
    return ChangedWords(*map(np.concatenate, zip(*found, strict=True)))


def _split_words(words: ChangedWords, new: Elements) -> BoxChange:
    """Return the elements of words that differ."""
    xor = (words.old ^ words.new).view(new.dtype)
    inside = np.flatnonzero(xor != 0)
    n = _WORD // new.itemsize
    shift = n.bit_length() - 1  # a division takes longer than the comparison of a sparse change
    at = words.at[inside >> shift]
    at <<= shift
    at |= inside & (n - 1)
    return BoxChange(len(new), at, xor[inside])


def encode_change(change: BoxChange) -> bytes:
    """Return a change as bytes."""
    itemsize, count = change.values.itemsize, len(change.values)
    planes: list[bytes | memoryview] = []
    gap_bytes = 0
    if change.positions is not None and count:
        gaps = np.diff(change.positions, prepend=-1) - 1
        gap_bytes = next(n for n in (1, 2, 4, 8) if int(gaps.max()) < 1 << 8 * n)
        planes += _split_planes(gaps.astype(f"<u{gap_bytes}"))
    if count:
        planes += _split_planes(change.values)
    kind = _FULL if change.is_full else _SPARSE
    lengths = b"".join(_LENGTH.pack(len(plane)) for plane in planes)
    return b"".join((_HEADER.pack(kind, itemsize, gap_bytes, count), lengths, *planes))


def decode_change(data: bytes | memoryview, *, numel: int, itemsize: int, where: str) -> BoxChange:
    """Invert `encode_change`.

    Args:
        data: Encoded change.
        numel: Number of elements in the box; the memory needed is linear in it.
        itemsize: Bytes of an element.
        where: File and tensor, for errors.

    Raises:
        FormatError: The bytes are damaged, or for another box.
    """
    view = memoryview(data)
    kind, gap_bytes, count = _read_header(view, numel, itemsize, where)
    widths = [n for n in (gap_bytes, itemsize) if n] if count else []
    at = _HEADER.size + sum(widths) * _LENGTH.size
    if len(view) < at:
        raise FormatError("an encoded change ends early", where=where, found=f"{len(view)} bytes", expected=at)
    lengths = [n for (n,) in _LENGTH.iter_unpack(view[_HEADER.size : at])]
    if at + sum(lengths) != len(view):
        raise FormatError(
            "an encoded change has another length", where=where, found=f"{len(view)} bytes", expected=at + sum(lengths)
        )
    numbers = []
    for width in widths:
        joined = np.empty(count, f"<u{width}")
        for plane in joined.view(np.uint8).reshape(count, width).T:
            length = lengths.pop(0)
            plane[:] = _read_plane(view[at : at + length], count, where)
            at += length
        numbers.append(joined)
    values = numbers.pop() if count else np.empty(0, f"<u{itemsize}")
    if kind == _FULL:
        return BoxChange(numel, None, values)
    return BoxChange(numel, _add_gaps(numbers[0], numel, where) if count else np.empty(0, np.int64), values)


def compose_changes(changes: Sequence[BoxChange]) -> BoxChange:
    """Return one change with the effect of several, in their order."""
    if not changes:
        raise ValueError("there must be a change to compose, got an empty sequence")
    last = max((i for i, change in enumerate(changes) if change.is_full), default=None)
    first = changes[last or 0]
    if any(change.numel != first.numel or change.values.dtype != first.values.dtype for change in changes):
        raise ValueError("changes must be of one box")
    if len(changes) == 1:
        return first
    if last is not None:
        values = first.values.copy()
        for change in changes[last + 1 :]:
            apply_change(change, values)
        return BoxChange(first.numel, None, values)
    parts = [part for group in _group_overlapping(changes) for part in _compose_blocks(group)]
    return _join(first.numel, first.values.dtype, parts)


def _group_overlapping(changes: Sequence[BoxChange]) -> Iterator[list[BoxChange]]:
    """Yield changes that have positions in groups of which none overlaps another, in ascending order."""
    group: list[BoxChange] = []
    end = 0
    for first, last, change in sorted(_iter_ranges(changes), key=lambda each: each[0]):
        if group and first >= end:
            yield group
            group = []
        group.append(change)
        end = max(end, last + 1)
    if group:
        yield group


def _iter_ranges(changes: Sequence[BoxChange]) -> Iterator[tuple[int, int, BoxChange]]:
    for change in changes:
        if change.positions is not None and len(change.positions):
            yield int(change.positions[0]), int(change.positions[-1]), change


def apply_change(change: BoxChange, values: Elements) -> None:
    """Change `values`, the box's flat elements, in place."""
    if values.shape != (change.numel,) or values.dtype != change.values.dtype:
        raise ValueError(
            f"values must be {change.numel} flat {change.values.dtype}, got {values.dtype} of shape {values.shape}"
        )
    if change.positions is None:
        values[:] = change.values
    else:
        values[change.positions] ^= change.values


def apply_part(change: BoxChange, box: Box, values: Elements, into: Box) -> None:
    """Apply the part of a change that is in another box, in place.

    Args:
        change: Change of `box`.
        box: The box that was written.
        values: Flat elements of `into`.
        into: The box that is held, of the same tensor.
    """
    if box == into:
        return apply_change(change, values)
    part = intersect(box, into)
    if part is None:
        return None
    inner, mapped = shift(part, into.offset), map_change(change, box, part)
    if mapped.positions is None:
        values.reshape(into.size)[_slices(inner)] = mapped.values.reshape(part.size)
    else:
        values[shift_positions(mapped, into.size, inner)] ^= mapped.values
    return None


def map_change(change: BoxChange, box: Box, into: Box) -> BoxChange:
    """Return the part of a change that is in another box, as a change of the intersection.

    Args:
        change: Change of `box`.
        box: The box that was written.
        into: Another box of the same tensor.
    """
    if change.numel != box.volume:
        raise ValueError(f"the change must have {box.volume} elements as its box {box}, got {change.numel}")
    part = intersect(box, into)
    if part is None:
        return BoxChange(0, np.empty(0, np.int64), change.values[:0])
    if part == box:
        return change
    inner = shift(part, box.offset)
    if change.positions is None:
        taken = np.ascontiguousarray(change.values.reshape(box.size)[_slices(inner)])
        return BoxChange(part.volume, None, taken.reshape(-1))
    start = flat_index(box.size, inner.offset)
    stop = flat_index(box.size, tuple(n - 1 for n in inner.stop)) + 1
    low, high = (int(n) for n in np.searchsorted(change.positions, (start, stop)))
    positions, values = change.positions[low:high], change.values[low:high]
    if is_contiguous(box.size, inner):
        return BoxChange(part.volume, positions - start, values)
    at, is_inside = _locate(positions, box.size, inner)
    return BoxChange(part.volume, at[is_inside], values[is_inside])


def shift_positions(change: BoxChange, shape: Shape, box: Box) -> Positions:
    """Return a change's positions in the full tensor, in row-major order.

    Args:
        change: Change of `box`, with positions.
        shape: Shape of the full tensor.
        box: Its box.
    """
    if change.positions is None:
        raise ValueError("a change must have positions, got one with every element")
    start = flat_index(shape, box.offset)
    if is_contiguous(shape, box):
        return change.positions + start if start else change.positions
    at = np.full(len(change.positions), start, np.int64)
    rest = change.positions
    for size, step in _merge_runs(box.size, shape):
        index = rest // size
        at += index * step
        rest = rest - index * size
    at += rest
    return at


def _join(numel: int, dtype: np.dtype[Any], parts: list[tuple[Positions, Elements]]) -> BoxChange:
    """Return a change from its parts, in ascending order."""
    if not parts:
        return BoxChange(numel, np.empty(0, np.int64), np.empty(0, dtype))
    positions, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    return BoxChange(numel, positions, values)


def _split_planes(numbers: Elements) -> Iterator[bytes | memoryview]:
    """Return one plane for each byte of the numbers, compressed if that is shorter."""
    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    for plane in numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T:
        raw = np.ascontiguousarray(plane).data
        packed = compress(raw)
        yield packed if len(packed) < len(raw) else raw


def _read_header(view: memoryview, numel: int, itemsize: int, where: str) -> tuple[int, int, int]:
    """Return kind, bytes of a gap and number of values."""
    if len(view) < _HEADER.size:
        raise FormatError(
            "an encoded change ends early", where=where, found=f"{len(view)} bytes", expected=f"at least {_HEADER.size}"
        )
    kind, width, gap_bytes, count = _HEADER.unpack(view[: _HEADER.size])
    if kind not in (_SPARSE, _FULL) or view[3]:
        raise FormatError(
            "an encoded change has an unknown kind",
            where=where,
            found=(kind, view[3]),
            expected=f"{_SPARSE} or {_FULL}, then 0",
            fix="Read the stream with the version of shardckpt that wrote it, or a later one.",
        )
    if width != itemsize:
        raise FormatError("an encoded change has another element size", where=where, found=width, expected=itemsize)
    if count > numel or (kind == _FULL and count != numel):
        raise FormatError(
            "an encoded change has another number of elements",
            where=where,
            found=count,
            expected=numel if kind == _FULL else f"at most {numel}",
        )
    if gap_bytes not in ((1, 2, 4, 8) if kind == _SPARSE and count else (0,)):
        raise FormatError("an encoded change has another gap size", where=where, found=gap_bytes)
    return kind, gap_bytes, count


def _read_plane(data: memoryview, count: int, where: str) -> NDArray[np.uint8]:
    """Return a plane's `count` bytes."""
    if len(data) == count:
        return np.frombuffer(data, np.uint8)
    try:
        # The size in the frame decides how much memory zstd takes: it is checked first.
        size = zstandard.get_frame_parameters(data).content_size
        plane = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False) if size == count else b""
    except zstandard.ZstdError as error:
        raise FormatError(f"a plane cannot be decompressed: {error}", where=where) from error
    if len(plane) != count:
        raise FormatError("a plane has another size", where=where, found=f"{size} bytes", expected=count)
    return np.frombuffer(plane, np.uint8)


def _add_gaps(gaps: Elements, numel: int, where: str) -> Positions:
    """Return the positions that have these gaps between them."""
    # The first sum that is too large cannot wrap around, if no gap is as large as the box.
    if int(gaps.max()) < numel:
        positions: Positions = gaps.astype(np.int64)
        positions += 1
        np.cumsum(positions, out=positions)
        positions -= 1
        if int(positions.max()) < numel:
            return positions
    raise FormatError(
        "a changed element is after the end of its box", where=where, expected=f"a position below {numel}"
    )


def _compose_blocks(changes: Sequence[BoxChange]) -> Iterator[tuple[Positions, Elements]]:
    """XOR changes that have positions, one block of elements after the other."""
    pairs = [(change.positions, change.values) for change in changes if change.positions is not None]
    if len(pairs) == 1:
        yield from pairs
        return
    xor = np.zeros(_BLOCK, changes[0].values.dtype)
    while pairs := [(positions, values) for positions, values in pairs if len(positions)]:
        start = min(int(positions[0]) for positions, _ in pairs)
        rest = []
        for positions, values in pairs:
            stop = int(np.searchsorted(positions, start + _BLOCK))
            xor[positions[:stop] - start] ^= values[:stop]
            rest.append((positions[stop:], values[stop:]))
        at = np.flatnonzero(xor != 0)
        yield at + start, xor[at]
        xor[at] = 0
        pairs = rest


def _locate(positions: Positions, shape: Shape, box: Box) -> tuple[Positions, NDArray[np.bool_]]:
    """Return flat positions of an array as positions in a box, and which are inside."""
    at, is_inside = np.zeros(len(positions), np.int64), np.ones(len(positions), np.bool_)
    rest = positions
    for offset, size, step, inner in zip(box.offset, box.size, strides(shape), strides(box.size), strict=True):
        index = rest // step
        rest = rest - index * step
        index -= offset
        is_inside &= (index >= 0) & (index < size)
        at += index * inner
    return at, is_inside


def _merge_runs(size: Shape, shape: Shape) -> Iterator[tuple[int, int]]:
    """Return the steps of a box and of its array along each dimension, without full inner ones."""
    for n, inner, step in zip(size, strides(size), strides(shape), strict=True):
        if inner == step:
            return
        if n != 1:
            yield inner, step


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.offset, box.stop, strict=True))
