"""Digests of tensors that add up: the digests of any parts sum to the digest of the full tensor.

An element of 1, 2 or 4 bytes is one word. One of 8 bytes is mixed, so that each bit changes both its words of 32 bits.
Word `i` of the full tensor, in row-major order, adds `K[i % 65536] * M[i // 65536] * f(word)` to a lane, modulo 2**64.
K and M are odd pseudo-random numbers; `f` is `word + 1` in the first lane, and its square in the second one. This is
the multilinear hash of Carter and Wegman, as in Lemire and Kaser, "Strongly universal string hashing is fast" (2014).
Words have at most 32 bits: with 64, no key would change what the highest bit adds, and two changed signs would cancel.

A right XOR of a wrong old word adds something else, in one lane at least: decision 85 proves it.

A digest finds damage and mistakes. It does not protect from an attacker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from shardckpt.boxes import Box, Shape, contiguous_blocks, full_box, strides
from shardckpt.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.unsignedinteger[Any]]
    Lane = NDArray[np.uint64]

__all__ = ["ZERO", "Digest", "combine_digests", "digest_box", "digest_changes"]

# Files contain digests: none of these numbers may change.
_KEYS = 1 << 16
_KEY_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # digits of pi
_BLOCK_SEEDS = (0xA4093822299F31D0, 0x082EFA98EC4E6C89)

_MASK = (1 << 64) - 1
_CHUNK = 1 << 16  # words at a time: their buffers stay in the cache
_FEW = 1 << 11  # with fewer words in a block's rows, a gather is faster than a call for each
_COPIED = 1 << 18  # elements that are copied at a time


class Digest(NamedTuple):
    """The digest of a tensor, of a part, or of a change: two numbers modulo 2**64.

    Attributes:
        low: First lane.
        high: Second lane.
    """

    low: int
    high: int

    def __add__(self, other: Digest) -> Digest:  # type: ignore[override]
        """Return the digest of both parts together."""
        return Digest((self.low + other.low) & _MASK, (self.high + other.high) & _MASK)

    def __sub__(self, other: Digest) -> Digest:
        """Return the digest without a part."""
        return self + -other

    def __neg__(self) -> Digest:
        return Digest(-self.low & _MASK, -self.high & _MASK)

    def hex(self) -> str:
        """Return 32 hexadecimal digits, the high lane first."""
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """Invert `hex`."""
        if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{32}", text):
            raise FormatError("a digest must be text", found=repr(text), expected="32 hexadecimal digits")
        return cls(int(text[16:], 16), int(text[:16], 16))


ZERO = Digest(0, 0)
"""The digest of nothing."""


def digest_box(values: Words, shape: Shape, box: Box) -> Digest:
    """Return the digest of one box, as a part of its tensor.

    Args:
        values: The elements as unsigned integers, with the shape of the box or flat in row-major order. Complex
            numbers of 16 bytes are two integers, and shape and box have one more dimension of 2.
        shape: Shape of the full tensor.
        box: The box in it.
    """
    if values.size != box.volume:
        raise ValueError(f"values must have {box.volume} elements as the box {box}, got {values.size}")
    if not values.flags.c_contiguous or (values.itemsize == 8 and values.size > _COPIED):  # mixing copies too
        return _digest_copies(values.reshape(box.size), shape, box)
    words, per_element = _as_words(values.reshape(-1))
    base, counts, steps = _merge_dimensions(shape, box, per_element)
    *outer, rows, length = counts
    if not words.size:
        return ZERO
    if min(rows, max(_KEYS // steps[-2], 1)) * length < min(_FEW, words.size):
        return _digest_scattered(words, base, counts, steps)
    total = ZERO
    starts = _spread(base, outer, steps[:-2])
    for start, block in zip(starts, words.reshape(-1, rows, length), strict=True):
        total += _digest_rows(block, int(start), steps[-2])
    return total


def digest_changes(shape: Shape, itemsize: int, positions: NDArray[Any], old: Words, new: Words) -> Digest:
    """Return what changed elements add to the digest of their tensor.

    Args:
        shape: Shape of the full tensor.
        itemsize: Bytes of an element.
        positions: Positions of the elements in the full tensor, in row-major order.
        old: Elements before, as unsigned integers.
        new: Elements after.
    """
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < prod(shape):
        raise ValueError(f"positions must be in a tensor of shape {shape}, got {positions.min()} to {positions.max()}")
    n = max(itemsize // 4, 1)
    before, after = (_as_words(np.ascontiguousarray(each).reshape(-1))[0] for each in (old, new))
    if not len(before) == len(after) == n * len(positions):
        raise ValueError(f"values must have {len(positions)} elements of {itemsize} bytes, got {old.size}, {new.size}")
    total = ZERO
    for start in range(0, len(before), _CHUNK):
        part = slice(start, start + _CHUNK)
        at = positions[start // n : (start + _CHUNK) // n].astype(np.uint64)
        if n > 1:
            at = (at[:, None] * np.uint64(n) + np.arange(n, dtype=np.uint64)).reshape(-1)
        raised = zip(_raise_words(after[part]), _raise_words(before[part]), strict=True)
        total += _sum_scattered([each - other for each, other in raised], at)
    return total


def combine_digests(digests: Mapping[str, Digest]) -> Digest:
    """Return one digest for all tensors, by name; it is linear as well."""
    total = ZERO
    for name, digest in digests.items():
        text = name.encode("utf-8", "surrogatepass")
        low, high = ((xxhash.xxh3_64_intdigest(text, seed=s) | 1) * digest[s] & _MASK for s in (0, 1))
        total += Digest(low, high)
    return total


def _digest_copies(values: Words, shape: Shape, box: Box) -> Digest:
    """Digest some elements at a time: a copy of all would take too much memory."""
    total = ZERO
    for part in contiguous_blocks(full_box(box.size), _COPIED):
        copied = np.ascontiguousarray(values[tuple(slice(a, b) for a, b in zip(part.offset, part.stop, strict=True))])
        offset = tuple(map(sum, zip(box.offset, part.offset, strict=True)))
        total += digest_box(copied.reshape(-1), shape, Box(offset, part.size))
    return total


def _as_words(values: Words) -> tuple[Words, int]:
    """Return flat elements as words, and the number of words in an element."""
    return (_mix(values).view("<u4"), 2) if values.itemsize == 8 else (values, 1)


def _raise_words(words: Words) -> tuple[Lane, Lane]:
    """Return what words contribute to each lane, before keys."""
    first = words.astype(np.uint64)
    first += np.uint64(1)
    second = first.copy()
    _square(second)
    return first, second


def _square(words: Lane) -> None:
    words *= words


def _merge_dimensions(shape: Shape, box: Box, per_element: int) -> tuple[int, list[int], list[int]]:
    """Return a box in words: its first word, then number and distance along at least two dimensions."""
    step_of = strides(shape)
    base = per_element * sum(o * s for o, s in zip(box.offset, step_of, strict=True))
    counts, steps = [per_element], [1]
    for size, step in zip(reversed(box.size), reversed(step_of), strict=True):
        if per_element * step == counts[0] * steps[0]:
            counts[0] *= size
        elif size != 1:
            counts.insert(0, size)
            steps.insert(0, per_element * step)
    if len(counts) == 1:
        return base, [1, *counts], [counts[0], *steps]
    return base, counts, steps


def _spread(base: int, counts: list[int], steps: list[int]) -> Lane:
    """Return the positions of a grid, in row-major order."""
    at = np.array([base], np.uint64)
    for count, step in zip(counts, steps, strict=True):
        at = (at[:, None] + np.arange(count, dtype=np.uint64) * np.uint64(step)).reshape(-1)
    return at


def _digest_rows(rows: Words, start: int, step: int) -> Digest:
    """Digest rows of consecutive words; the first row starts at word `start`, the next `step` words later."""
    low = high = 0
    wide, product = np.empty((2, min(_CHUNK, rows.size)), np.uint64)
    for first, at, last, stop in _split_rows(rows.shape, start, step):
        part = rows[first:last, at:stop]
        block, key = divmod(start + first * step + at, _KEYS)
        values, scaled = wide[: part.size].reshape(part.shape), product[: part.size].reshape(part.shape)
        values[...] = part
        values += np.uint64(1)
        sums = []
        for lane in (0, 1):
            if lane:
                _square(values)
            keys = np.ndarray(part.shape, np.uint64, _get_keys(lane).data, 8 * key, (8 * step, 8))
            np.multiply(values, keys, out=scaled)
            sums.append(int(scaled.sum()) * _get_block_key(lane, block))
        low, high = low + sums[0], high + sums[1]
    return Digest(low & _MASK, high & _MASK)


def _split_rows(shape: tuple[int, ...], start: int, step: int) -> Iterator[tuple[int, int, int, int]]:
    """Split rows into rectangles, each in one block of words: first row and word, then the ends."""
    rows, length = shape
    row = 0
    while row < rows:
        word = start + row * step
        left = _KEYS - word % _KEYS  # words to the end of the block
        fit = min((left - length) // step + 1, rows - row) if length <= left else 0
        if fit:
            yield row, 0, row + fit, length
            row += fit
            continue
        at = 0
        while at < length:
            stop = min(at + _KEYS - (word + at) % _KEYS, length)
            yield row, at, row + 1, stop
            at = stop
        row += 1


def _digest_scattered(words: Words, base: int, counts: list[int], steps: list[int]) -> Digest:
    """Digest a box with many short rows."""
    total = ZERO
    inner = strides(tuple(counts))
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        rest = np.arange(start, start + len(part), dtype=np.uint64)
        at = np.full(len(part), base, np.uint64)
        for count, step in zip(inner, steps, strict=True):
            index = rest // np.uint64(count)
            rest -= index * np.uint64(count)
            at += index * np.uint64(step)
        total += _sum_scattered(_raise_words(part), at)
    return total


def _sum_scattered(factors: Sequence[Lane], at: Lane) -> Digest:
    """Return for each lane the sum of its factors times the keys of the words `at`."""
    blocks, keys = at >> np.uint64(16), (at & np.uint64(_KEYS - 1)).astype(np.int64)
    starts = np.flatnonzero(np.diff(blocks, prepend=~blocks[:1]))  # of words that are in one block
    blocks = blocks[starts]
    sums = []
    for lane, factor in enumerate(factors):
        parts = np.add.reduceat(factor * _get_keys(lane)[keys], starts)
        parts *= _make_keys(blocks, _BLOCK_SEEDS[lane])
        sums.append(int(parts.sum()))
    return Digest(*sums)


@lru_cache(maxsize=2)
def _get_keys(lane: int) -> Lane:
    """Return a lane's keys of the words in a block."""
    keys = _make_keys(np.arange(_KEYS, dtype=np.uint64), _KEY_SEEDS[lane])
    keys.setflags(write=False)
    return keys


@lru_cache(maxsize=1 << 12)
def _get_block_key(lane: int, block: int) -> int:
    return int(_make_keys(np.array([block], np.uint64), _BLOCK_SEEDS[lane])[0])


def _make_keys(numbers: Lane, seed: int) -> Lane:
    """Return an odd pseudo-random number for each number."""
    keys: Lane = _mix(numbers + np.uint64(seed)) | np.uint64(1)
    return keys


def _mix(numbers: Lane) -> Lane:
    """Return numbers with each bit spread over all: the finalizer of splitmix64."""
    x = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Lane = x ^ (x >> np.uint64(31))
    return mixed
