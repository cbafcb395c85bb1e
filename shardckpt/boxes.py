"""Boxes in n-dimensional arrays, in elements: intersect, cover, flat ranges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, Protocol, TypeVar

Shape = tuple[int, ...]


class Narrowable(Protocol):
    """A torch tensor; this module does not import torch."""

    @property
    def shape(self) -> Sequence[int]:
        """Number of elements in each dimension."""

    def narrow(self: _T, dim: int, start: int, length: int, /) -> _T:
        """Return a range in one dimension, as a view."""


_T = TypeVar("_T", bound=Narrowable)


class Box(NamedTuple):
    """A half-open box `[offset, offset + size)` in an array.

    Attributes:
        offset: First element in each dimension.
        size: Number of elements in each dimension; a zero makes the box empty.
    """

    offset: Shape
    size: Shape

    @property
    def stop(self) -> Shape:
        """End of the box in each dimension, exclusive."""
        return tuple(map(sum, zip(self.offset, self.size, strict=True)))

    @property
    def volume(self) -> int:
        """Number of elements in the box; 1 for a 0-dim box."""
        return prod(self.size)

    def within(self, shape: Shape) -> bool:
        """Return True if the box is inside an array with `shape` and has no negative number."""
        return len(self.offset) == len(self.size) == len(shape) and all(
            min(o, n) >= 0 and o + n <= s for o, n, s in zip(self.offset, self.size, shape, strict=True)
        )

    def __str__(self) -> str:
        if not self.size:
            return "[]"
        return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.size, strict=True)) + "]"


@lru_cache(maxsize=4096)  # a checkpoint with 100,000 tensors has a few dozen shapes
def full_box(shape: Shape) -> Box:
    """Return the box that covers an array with `shape`."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements that are in both boxes; None without any."""
    # Two 0-dim boxes are the same single element.
    offset, size = [], []
    for ao, an, bo, bn in zip(a.offset, a.size, b.offset, b.size, strict=True):
        start = ao if ao > bo else bo
        n = min(ao + an, bo + bn) - start
        if n <= 0:
            return None
        offset.append(start)
        size.append(n)
    return Box(tuple(offset), tuple(size))


def shift(box: Box, origin: Shape) -> Box:
    """Return `box` in the coordinates that start at `origin`."""
    return Box(tuple(o - p for o, p in zip(box.offset, origin, strict=True)), box.size)


def narrow_to_box(tensor: _T, box: Box) -> _T:
    """Return the elements in a tensor's box, as a view."""
    for dim, (start, size) in enumerate(zip(box.offset, box.size, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, size)
    return tensor


def strides(shape: Shape) -> Shape:
    """Return row-major strides for `shape`, in elements."""
    out, step = [1] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


class Cover(NamedTuple):
    """Gaps and overlaps that `cover` found."""

    gaps: list[Box]  # disjoint parts that no box covers
    # Parts that two boxes cover, with the indices of both boxes.
    overlaps: list[tuple[Box, int, int]]


def cover(region: Box, boxes: Sequence[Box], *, limit: int = 16) -> Cover:
    """Find the parts of `region` that no box covers or that several boxes cover."""
    # Splitting at the border that crosses the fewest boxes takes O(n log n) for a grid of n boxes. The search stops
    # after `limit` faults, so that hostile boxes cannot make it long.
    found = Cover([], [])
    clipped = [(part, i) for i, box in enumerate(boxes) if (part := intersect(region, box))]
    stack = [(region, clipped)] if region.volume else []
    while stack and len(found.gaps) + len(found.overlaps) < limit:
        part, inside = stack.pop()
        if not inside:
            found.gaps.append(part)
            continue
        covering = [i for box, i in inside if box == part]
        if len(covering) > 1:
            found.overlaps.append((part, covering[0], covering[1]))
        elif covering and len(inside) > 1:
            box, other = next((b, i) for b, i in inside if i != covering[0])
            found.overlaps.append((box, covering[0], other))
        elif not covering:
            stack.extend(_split(part, inside))
    return found


def _split(region: Box, inside: list[tuple[Box, int]]) -> list[tuple[Box, list[tuple[Box, int]]]]:
    """Split `region`, and the boxes in it, in two at a box border."""
    dim, at = _best_split(region, inside)
    halves = []
    for start, stop in ((region.offset[dim], at), (at, region.stop[dim])):
        half = _with(region, dim, start, stop - start)
        parts = [(box, i) for b, i in inside if (box := intersect(half, b))]
        halves.append((half, parts))
    return halves


def _best_split(region: Box, inside: list[tuple[Box, int]]) -> tuple[int, int]:
    """Return dimension and coordinate of the middle border, where it crosses the fewest boxes."""
    best: tuple[int, int, int] | None = None
    for dim in range(len(region.size)):
        low, high = region.offset[dim], region.stop[dim]
        borders = sorted({c for b, _ in inside for c in (b.offset[dim], b.offset[dim] + b.size[dim]) if low < c < high})
        if not borders:
            continue
        at = borders[len(borders) // 2]
        crossed = sum(b.offset[dim] < at < b.offset[dim] + b.size[dim] for b, _ in inside)
        if best is None or crossed < best[0]:
            best = (crossed, dim, at)
    assert best is not None, "a box inside a region that does not fill it has a border inside"
    return best[1], best[2]


def _with(box: Box, dim: int, offset: int, size: int) -> Box:
    return Box(
        (*box.offset[:dim], offset, *box.offset[dim + 1 :]),
        (*box.size[:dim], size, *box.size[dim + 1 :]),
    )


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and length of one chunk, like `torch.chunk`: the last chunks may be shorter or empty."""
    length = -(-size // parts)
    start = min(index * length, size)
    return start, min(length, size - start)


def chunk_box(shape: Shape, dim: int, parts: int, index: int) -> Box:
    """Return one chunk along an array's dimension, split like `torch.chunk`."""
    return _with(full_box(shape), dim, *chunk_range(shape[dim], parts, index))


def flat_to_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Return the boxes for the elements `[start, stop)` of a row-major array."""
    # At most `2 * ndim - 1` boxes: for each dimension a partial head, full slabs and a partial tail.
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range {start}:{stop} is not in an array of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return [_prefix_box(first, b) for b in flat_to_boxes(shape[1:], head, tail)]
    boxes = []
    if head:
        boxes += [_prefix_box(first, b) for b in flat_to_boxes(shape[1:], head, row)]
        first += 1
    if first < last:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if tail:
        boxes += [_prefix_box(last, b) for b in flat_to_boxes(shape[1:], 0, tail)]
    return boxes


def _prefix_box(index: int, box: Box) -> Box:
    return Box((index, *box.offset), (1, *box.size))


def flat_index(shape: Shape, index: Shape) -> int:
    """Return the row-major position of `index` in an array with `shape`, in elements."""
    return sum(i * s for i, s in zip(index, strides(shape), strict=True))


def is_contiguous(shape: Shape, box: Box) -> bool:
    """Return True if `box` is one contiguous row-major range in an array."""
    inner_full = True
    for n, s in zip(reversed(box.size), reversed(shape), strict=True):
        if not inner_full and n != 1:
            return False
        inner_full = inner_full and n == s
    return True


def is_grid(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Return True if the boxes are the cells of a grid over an array, each once."""
    # A mesh's shards form a grid, for any number of ranks. This is faster than `cover`, which finds all gaps and
    # overlaps.
    cells = 1
    for dim, length in enumerate(shape):
        at = 0
        segments = sorted({(box.offset[dim], box.size[dim]) for box in boxes})
        for offset, size in segments:
            if offset != at or size <= 0:
                return False
            at += size
        if at != length:
            return False
        cells *= len(segments)
    return cells == len(boxes) == len(set(boxes))


def contiguous_blocks(box: Box, most: int) -> Iterator[Box]:
    """Split `box` into contiguous blocks with at most `most` elements, in order."""
    if box.volume <= most:
        if box.volume:
            yield box
        return
    rows = max(most // prod(box.size[1:]), 1)
    for start in range(0, box.size[0], rows):
        slab = _with(box, 0, box.offset[0] + start, min(rows, box.size[0] - start))
        if slab.volume <= most:
            yield slab
        else:
            for inner in contiguous_blocks(Box(slab.offset[1:], slab.size[1:]), most):
                yield _prefix_box(slab.offset[0], inner)
