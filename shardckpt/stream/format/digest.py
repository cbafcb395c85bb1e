"""Digests of tensors that add up: the digests of any parts sum to the digest of the full tensor.

A tensor is read as words of 8 bytes, in row-major order: as little-endian numbers in the first lane, as big-endian ones
in the second. Word `i` adds `K[i % 65536] * M[i // 65536] * word` to a lane, modulo 2**64. K and M are odd
pseudo-random numbers. This is the multilinear hash of Carter and Wegman, as in Lemire and Kaser, "Strongly universal
string hashing is fast" (2014). An element is a part of a word, so that its bytes add their share.

One lane alone would be weak: a key has little effect on the highest bits of a word. Those are low in the other lane, so
that other bytes have the same digest with a probability of 2**-44 at most: decision 85 proves it.

Bytes `a` to `b` also add `C(b) - C(a)` to the first lane; C is pseudo-random. So zeros that are missing show as well.

A digest finds damage and mistakes. It does not protect from an attacker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from shardckpt.boxes import Box, Shape, contiguous_blocks, full_box, strides
from shardckpt.errors import FormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements = NDArray[np.unsignedinteger[Any]]
    Lane = NDArray[np.uint64]

__all__ = ["ZERO", "Digest", "combine_digests", "digest_box", "digest_changes", "digest_words"]

# Files contain digests: none of these numbers may change.
_KEYS = 1 << 16
_KEY_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # digits of pi
_BLOCK_SEEDS = (0xA4093822299F31D0, 0x082EFA98EC4E6C89)
_BORDER_SEED = 0x452821E638D01377

_MASK = (1 << 64) - 1
_WORD = 8
_PART = 1 << 20  # elements at a time: all memory is linear in it
_CHANGES = 1 << 15  # elements with keys of their own at a time: their buffers stay in the cache
_FEW = 1 << 11  # with fewer words in a block's rows, a gather is faster than a call for each
_SHORT = 16  # words of a row, in the same way


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


def digest_box(values: Elements, shape: Shape, box: Box) -> Digest:
    """Return the digest of one box, as a part of its tensor.

    Args:
        values: The elements as unsigned integers, with the shape of the box or flat in row-major order. Complex
            numbers of 16 bytes are two integers, and shape and box have one more dimension of 2.
        shape: Shape of the full tensor.
        box: The box in it.
    """
    if values.size != box.volume:
        raise ValueError(f"values must have {box.volume} elements as the box {box}, got {values.size}")
    total = ZERO
    values = values.reshape(box.size)
    for part in contiguous_blocks(full_box(box.size), _PART):
        taken = values[tuple(slice(a, b) for a, b in zip(part.offset, part.stop, strict=True))]
        offset = tuple(map(sum, zip(box.offset, part.offset, strict=True)))
        total += _digest_part(np.ascontiguousarray(taken).reshape(-1), shape, Box(offset, part.size))
    return total


def digest_changes(shape: Shape, itemsize: int, positions: NDArray[Any], old: Elements, new: Elements) -> Digest:
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
    n = max(itemsize // _WORD, 1)
    before, after = (np.ascontiguousarray(each).reshape(-1) for each in (old, new))
    if not len(before) == len(after) == n * len(positions):
        raise ValueError(f"values must have {len(positions)} elements of {itemsize} bytes, got {old.size}, {new.size}")
    total = ZERO
    for start in range(0, len(positions), _CHANGES):
        at = positions[start : start + _CHANGES].astype(np.uint64)
        if n > 1:
            at = (at[:, None] * np.uint64(n) + np.arange(n, dtype=np.uint64)).reshape(-1)
        part = slice(start * n, start * n + len(at))
        total += _sum_elements(at, after[part], before[part])
    return total


def digest_words(at: Lane, old: Lane, new: Lane) -> Digest:
    """Return what changed words add to the digest of their tensor.

    Args:
        at: Number of each word in the full tensor, in row-major order.
        old: Words before.
        new: Words after.
    """
    total = ZERO
    for start in range(0, len(at), _CHANGES):
        part = slice(start, start + _CHANGES)
        before, after = old[part], new[part]
        total += _sum_keyed(at[part], (after - before, after.byteswap() - before.byteswap()))
    return total


def combine_digests(digests: Mapping[str, Digest]) -> Digest:
    """Return one digest for all tensors, by name; it is linear as well."""
    total = ZERO
    for name, digest in digests.items():
        text = name.encode("utf-8", "surrogatepass")
        low, high = ((xxhash.xxh3_64_intdigest(text, seed=s) | 1) * digest[s] & _MASK for s in (0, 1))
        total += Digest(low, high)
    return total


def _digest_part(values: Elements, shape: Shape, box: Box) -> Digest:
    """Digest a box of flat elements."""
    if not values.size:
        return ZERO
    base, counts, steps = _merge_dimensions(shape, box)
    *outer, length = counts
    starts = _spread(base, outer, steps[:-1])
    n = _WORD // values.itemsize
    rows = values.reshape(-1, length)
    total = _sum_borders(starts * np.uint64(values.itemsize), length * values.itemsize)
    if any(step % n for step in steps[:-1]):  # each row starts in another place of its word
        return total + _sum_rows(rows, starts)
    head = min(-base % n, length)
    tail = head + (length - head) // n * n
    for first, last in ((0, head), (tail, length)):
        total += _sum_rows(rows[:, first:last], starts + np.uint64(first))
    words = rows[:, head:tail].view(np.uint64)
    if not words.size:
        return total
    first_words, step = (starts + np.uint64(head)) // np.uint64(n), steps[-2] // n
    is_short = outer[-1] > 1 and words.shape[1] < _SHORT
    if is_short or min(outer[-1], max(_KEYS // step, 1)) * words.shape[1] < min(_FEW, words.size):
        return total + _sum_rows(words, first_words)
    for start, block in zip(first_words[:: outer[-1]], words.reshape(-1, outer[-1], words.shape[1]), strict=True):
        total += _sum_words(block, int(start), step)
    return total


def _sum_borders(starts: Lane, nbytes: int) -> Digest:
    """Return what runs of bytes add, whatever they are."""
    starts = starts + np.uint64(_BORDER_SEED)
    return Digest(int((_mix(starts + np.uint64(nbytes)) - _mix(starts)).sum()), 0)


def _merge_dimensions(shape: Shape, box: Box) -> tuple[int, list[int], list[int]]:
    """Return a box's first element, then number and distance along at least two dimensions."""
    step_of = strides(shape)
    base = sum(o * s for o, s in zip(box.offset, step_of, strict=True))
    counts, steps = [1], [1]
    for size, step in zip(reversed(box.size), reversed(step_of), strict=True):
        if step == counts[0] * steps[0]:
            counts[0] *= size
        elif size != 1:
            counts.insert(0, size)
            steps.insert(0, step)
    if len(counts) == 1:
        return base, [1, *counts], [_WORD, *steps]
    return base, counts, steps


def _spread(base: int, counts: list[int], steps: list[int]) -> Lane:
    """Return the positions of a grid, in row-major order."""
    at = np.array([base], np.uint64)
    for count, step in zip(counts, steps, strict=True):
        at = (at[:, None] + np.arange(count, dtype=np.uint64) * np.uint64(step)).reshape(-1)
    return at


def _sum_words(rows: Lane, start: int, step: int) -> Digest:
    """Digest rows of consecutive words; the first row starts at word `start`, the next `step` words later."""
    low = high = 0
    buffer = np.empty(min(_KEYS, rows.size), np.uint64)
    for first, at, last, stop in _split_rows(rows.shape, start, step):
        part = rows[first:last, at:stop]
        block, key = divmod(start + first * step + at, _KEYS)
        swapped = buffer[: part.size].reshape(part.shape)
        swapped[...] = part.view(">u8")
        sums = []
        for lane, words in enumerate((part, swapped)):
            keys = np.ndarray(part.shape, np.uint64, _get_keys(lane).data, _WORD * key, (_WORD * step, _WORD))
            sums.append(int(np.einsum("ij,ij->", words, keys)) * _get_block_key(lane, block))
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


def _sum_rows(rows: Elements, starts: Lane) -> Digest:
    """Digest many short rows of elements; each starts at another element."""
    total, length = ZERO, rows.shape[1]
    several = max(_CHANGES // max(length, 1), 1)
    for first in range(0, len(rows) if length else 0, several):
        part = slice(first, first + several)
        at = np.add.outer(starts[part], np.arange(length, dtype=np.uint64)).reshape(-1)
        total += _sum_elements(at, np.ascontiguousarray(rows[part]).reshape(-1), None)
    return total


def _sum_elements(at: Lane, new: Elements, old: Elements | None) -> Digest:
    """Return what elements add at these positions; with old ones, what their change adds."""
    if not len(at):
        return ZERO
    bits, n = 8 * new.itemsize, _WORD // new.itemsize
    shifts = (at & np.uint64(n - 1)) * np.uint64(bits)
    numbers = new.astype(np.uint64) << shifts
    swapped = numbers.byteswap()
    if old is not None:
        before = old.astype(np.uint64) << shifts
        numbers -= before
        swapped -= before.byteswap(inplace=True)
    return _sum_keyed(at >> np.uint64(n.bit_length() - 1), (numbers, swapped))


def _sum_keyed(words: Lane, lanes: tuple[Lane, Lane]) -> Digest:
    """Return the sums of what each lane has at these words, multiplied by the keys, in place."""
    blocks, keys = words >> np.uint64(16), (words & np.uint64(_KEYS - 1)).view(np.int64)
    starts = np.append(0, np.flatnonzero(blocks[1:] != blocks[:-1]) + 1)  # of words that are in one block
    blocks = blocks[starts]
    sums = []
    for lane, numbers in enumerate(lanes):
        numbers *= np.take(_get_keys(lane), keys)
        parts = np.add.reduceat(numbers, starts) * _make_keys(blocks, _BLOCK_SEEDS[lane])
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
