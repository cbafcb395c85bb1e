"""Digests against a reference in pure Python, and against their promise: parts and changes add up."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box, flat_to_boxes, full_box
from shardckpt.errors import FormatError
from shardckpt.stream.format.digest import ZERO, Digest, combine_digests, digest_box, digest_changes

BITS64 = (1 << 64) - 1
DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64]
shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@cache
def key(number: int) -> int:
    return mix(number & BITS64) | 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS64
    return x ^ (x >> 31)


def reference(values: np.ndarray) -> Digest:
    data = values.tobytes()
    words = [data[at : at + 8].ljust(8, b"\0") for at in range(0, len(data), 8)]
    low, high = (
        sum(key(k + i % 65536) * key(m + i // 65536) * int.from_bytes(w, order) for i, w in enumerate(words))
        for order, k, m in (
            ("little", 0x243F6A8885A308D3, 0xA4093822299F31D0),
            ("big", 0x13198A2E03707344, 0x082EFA98EC4E6C89),
        )
    )
    low += mix(0x452821E638D01377 + len(data)) - mix(0x452821E638D01377)
    return Digest(low & BITS64, high & BITS64)


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))


def full(values: np.ndarray) -> Digest:
    return digest_box(values, values.shape, full_box(values.shape))


def numbers(shape: tuple[int, ...], dtype: type = np.uint16, seed: int = 0) -> np.ndarray:
    most = np.iinfo(dtype).max
    return np.random.default_rng(seed).integers(0, most, shape, dtype, endpoint=True)


def split(shape: tuple[int, ...], dim: int, sizes: list[int]) -> list[Box]:
    boxes, start = [], 0
    for size in sizes:
        lengths = (*shape[:dim], size, *shape[dim + 1 :])
        boxes.append(Box((*(0,) * dim, start, *(0,) * (len(shape) - dim - 1)), lengths))
        start += size
    return boxes


@st.composite
def cuts(draw: st.DrawFn) -> tuple[np.ndarray, list[Box]]:
    """An array and disjoint boxes that cover it: of a grid, or of flat ranges."""
    shape = draw(shapes)
    values = numbers(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    if draw(st.booleans()):
        borders = sorted({0, values.size, *draw(st.lists(st.integers(0, values.size), max_size=4))})
        boxes = [box for a, b in pairwise(borders) for box in flat_to_boxes(shape, a, b)]
    else:
        boxes = [full_box(shape)]
        for dim, size in enumerate(shape):
            border = draw(st.integers(0, size))
            halves = ((0, border), (border, size))
            boxes = [
                Box((*box.offset[:dim], a, *box.offset[dim + 1 :]), (*box.size[:dim], b - a, *box.size[dim + 1 :]))
                for box in boxes
                for a, b in halves
            ]
    return values, draw(st.permutations(boxes))


@given(cuts())
def test_the_digests_of_any_parts_add_up_in_any_order(cut):
    values, boxes = cut
    total = ZERO
    for box in boxes:
        total += digest_box(values[at(box)], values.shape, box)
    assert total == full(values) == reference(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "dim", "sizes"),
    [
        ((3, 65543), 0, [1, 2]),
        ((3, 65543), 1, [60000, 5000, 543]),
        ((300, 700), 0, [93, 94, 113]),
        ((300, 700), 1, [1, 99, 600]),
        ((1500, 128), 1, [1, 63, 64]),
        ((3, 50, 1024), 1, [25, 1, 24]),
        ((3, 50, 1024), 2, [1000, 3, 21]),
        ((150_000,), 0, [65535, 2, 84463]),
        ((600_000,), 0, [262_143, 2, 337_855]),
        ((40, 3, 5000), 1, [1, 2]),
    ],
)
def test_parts_of_large_tensors_add_up_over_the_borders_of_blocks(dtype, shape, dim, sizes):
    values = numbers(shape, dtype)
    boxes = split(shape, dim, sizes)
    views = [digest_box(values[at(box)], shape, box) for box in boxes]
    flat = [digest_box(np.ascontiguousarray(values[at(box)]).reshape(-1), shape, box) for box in boxes]
    assert views == flat
    assert sum(views[1:], views[0]) == reference(values)


def test_a_box_may_have_any_strides():
    values = numbers((6, 7, 8))
    transposed = np.asfortranarray(values)
    assert full(transposed) == full(values)
    box = Box((1, 2, 3), (4, 5, 5))
    assert digest_box(transposed[at(box)], values.shape, box) == digest_box(values[at(box)], values.shape, box)
    assert full(values[:, ::2]) == full(values[:, ::2].copy())


def test_an_empty_box_adds_nothing_and_a_scalar_has_a_digest():
    assert digest_box(np.empty((0, 4), np.uint16), (0, 4), Box((0, 0), (0, 4))) == ZERO
    assert digest_box(np.empty((3, 0), np.uint64), (3, 4), Box((0, 2), (3, 0))) == ZERO
    scalar = np.array(7, np.uint32)
    assert digest_box(scalar, (), Box((), ())) == reference(scalar) != ZERO


def test_files_have_these_digests_for_ever():
    ramp = np.arange(200_000, dtype=np.uint32)
    assert [full(ramp.astype(dtype)).hex() for dtype in DTYPES] == [
        "76744c34065fa8f6037960dcbc128d0a",
        "c0f01068d7ad245adffcc45c64f8b710",
        "ddea53ff60caf200e27a8ff7251bcdd1",
        "5abcde0000000000988b223456f847ad",
    ]
    assert full(np.zeros((), np.uint8)).hex() == "0000000000000000ffc8c474ea0e5e85"
    far = digest_changes((1 << 40,), 2, np.array([1 << 39]), np.array([1], np.uint16), np.array([3], np.uint16))
    assert far.hex() == "5e00000000000000a64dc0abf45d0eae"
    assert combine_digests({"a": Digest(1, 2), "b.ü": Digest(3, 4)}).hex() == "b0f7b0232dfb595654e16b3b359a0322"


@given(cuts(), st.data())
def test_damage_changes_the_digest(cut, data):
    values, boxes = cut
    parts = [digest_box(values[at(box)], values.shape, box) for box in boxes if box.volume]
    chosen = data.draw(st.sampled_from(parts))
    assert full(values) + chosen != full(values), "a part twice"
    assert full(values) - chosen != full(values), "a part that is missing"
    i, j = (data.draw(st.integers(0, values.size - 1)) for _ in range(2))
    flat = values.reshape(-1).copy()
    flat[[i, j]] = flat[[j, i]]
    assert (full(flat.reshape(values.shape)) == full(values)) == bool(np.array_equal(flat, values.reshape(-1)))
    flat = values.reshape(-1).copy()
    flat[i] ^= flat.dtype.type(1 << data.draw(st.integers(0, 8 * flat.itemsize - 1)))
    assert full(flat.reshape(values.shape)) != full(values)


def test_any_two_flipped_bits_change_the_digest():
    size, seen = 40_000, set()
    for at in range(size - 8, size * 16, 997):  # bytes, over two blocks of keys
        for bit in range(8):
            one = digest_changes(
                (size * 16,), 1, np.array([at]), np.array([0], np.uint8), np.array([1 << bit], np.uint8)
            )
            assert ZERO not in (one, one + one), "one bit, or two that flip in one direction"
            seen |= {one, -one}
    assert len(seen) == 2 * 8 * len(range(size - 8, size * 16, 997)), "two bits cancel"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_highest_and_lowest_bits_of_many_elements_do_not_cancel(dtype):
    width = 8 * dtype().itemsize
    for bit in (0, 7, width - 8, width - 1):
        mask, zeros = dtype(1 << bit), np.zeros(400, dtype)
        seen = set()
        for seed in range(300):
            damaged = zeros ^ numbers((400,), dtype, seed) & mask
            seen.add(full(damaged))
        assert len(seen) == 300


@given(cuts(), st.sampled_from(DTYPES))
def test_a_digest_is_of_bytes_whatever_the_elements_are(cut, dtype):
    values, _ = cut
    data = np.frombuffer(values.tobytes(), np.uint8)
    assert full(data) == full(values)
    if len(data) % dtype().itemsize == 0:
        assert full(data.view(dtype)) == full(values)


@given(cuts(), st.data())
def test_a_wrong_old_element_shows_in_the_digest_after_its_change(cut, data):
    """A digest of wrong elements and of their change is the digest of what results, and of nothing else."""
    values, _ = cut
    old, width = values.reshape(-1), 8 * values.itemsize
    positions = np.array(data.draw(st.lists(st.integers(0, old.size - 1), min_size=1, unique=True)))
    xor = numbers((len(positions),), values.dtype.type, 7)
    wrong, right = old.copy(), old.copy()
    right[positions] ^= xor
    for at in data.draw(st.lists(st.sampled_from(positions), min_size=1, unique=True)):
        wrong[at] ^= values.dtype.type(1 << data.draw(st.integers(0, width - 1)))
    result = wrong.copy()
    result[positions] ^= xor
    made = full(wrong) + digest_changes(old.shape, old.itemsize, positions, wrong[positions], result[positions])
    assert made == full(result) != full(right)


def test_a_part_of_zeros_that_is_missing_changes_the_digest():
    zeros = np.zeros((4, 1000), np.uint16)
    parts = [digest_box(zeros[row], (4, 1000), Box((row, 0), (1, 1000))) for row in range(4)]
    assert ZERO not in parts
    assert len(set(parts)) == 4


def test_moved_rows_and_swapped_blocks_change_the_digest():
    values = numbers((4, 65536))
    seen = {full(np.roll(values, (rows, columns), (0, 1))) for rows in range(4) for columns in range(3)}
    assert len(seen) == 12
    zeros = np.zeros(1000, np.uint16)
    assert digest_box(zeros, (2000,), Box((0,), (1000,))) != digest_box(zeros, (2000,), Box((1000,), (1000,)))


@given(shapes, st.sampled_from(DTYPES), st.data())
def test_a_chain_of_changes_updates_the_digest(shape, dtype, data):
    values = numbers(shape, dtype)
    digest = full(values)
    for seed in range(1, 3):
        chosen = data.draw(st.lists(st.integers(0, values.size - 1), unique=True))
        new = values.reshape(-1).copy()
        positions = np.array(chosen, np.int64)
        new[positions] = numbers((len(chosen),), dtype, seed)
        digest += digest_changes(shape, values.itemsize, positions, values.reshape(-1)[positions], new[positions])
        values = new.reshape(shape)
    assert digest == full(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [1, 3, 70_001])
def test_many_changes_update_the_digest_over_the_borders_of_blocks(dtype, step):
    values, new = numbers((3, 70_000), dtype), numbers((3, 70_000), dtype, 1)
    positions = np.arange(0, values.size, step).astype(np.uint64)
    unchanged = np.ones(values.size, bool)
    unchanged[positions] = False
    new.reshape(-1)[unchanged] = values.reshape(-1)[unchanged]
    old = values.reshape(-1)[positions]
    change = digest_changes(values.shape, values.itemsize, positions, old, new.reshape(-1)[positions])
    assert full(values) + change == full(new)


def test_complex_numbers_are_two_integers_in_one_more_dimension():
    values, new = numbers((5, 6, 2), np.uint64), numbers((5, 6, 2), np.uint64, 1)
    change = digest_changes((5, 6), 16, np.arange(30), values.reshape(30, 2), new.reshape(30, 2))
    assert full(values) + change == full(new)


@given(st.dictionaries(st.text(max_size=3), st.tuples(*[st.integers(0, BITS64)] * 4), max_size=5))
def test_the_digest_of_all_tensors_is_linear_and_knows_their_names(entries):
    before = {name: Digest(a, b) for name, (a, b, _, _) in entries.items()}
    change = {name: Digest(c, d) for name, (_, _, c, d) in entries.items()}
    after = {name: before[name] + change[name] for name in entries}
    assert combine_digests(before) + combine_digests(change) == combine_digests(after)
    one, other = Digest(1, 2), Digest(3, 4)
    assert combine_digests({"a": one, "b": other}) != combine_digests({"a": other, "b": one})
    assert combine_digests({"a": one}) != combine_digests({"c": one}) != combine_digests({"\ud800": one})


@given(*[st.integers(0, BITS64)] * 4)
def test_digests_form_a_group_and_have_a_text(a, b, c, d):
    one, other = Digest(a, b), Digest(c, d)
    assert one + other - other == one
    assert one + -one == ZERO == -ZERO
    assert one - other == Digest((a - c) & BITS64, (b - d) & BITS64)
    assert Digest.from_hex(one.hex()) == one
    assert len(one.hex()) == 32


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "0" * 32 + "\n", "g" * 32, "A" * 32, "٣" * 32, None, 7])
def test_a_text_that_is_no_digest_is_refused(text):
    with pytest.raises(FormatError, match="32 hexadecimal digits"):
        Digest.from_hex(text)


def test_values_and_positions_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must have 6 elements"):
        digest_box(np.zeros(5, np.uint16), (2, 3), full_box((2, 3)))
    one = np.zeros(1, np.uint16)
    for position in (-1, 6):
        with pytest.raises(ValueError, match="positions must be in"):
            digest_changes((2, 3), 2, np.array([position]), one, one)
    with pytest.raises(ValueError, match="must have 2 elements"):
        digest_changes((2, 3), 2, np.array([0, 1]), one, one)
    assert digest_changes((2, 3), 2, np.empty(0, np.int64), one[:0], one[:0]) == ZERO
