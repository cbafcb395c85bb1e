"""Changes against arrays: what a change does equals the new elements, in any box."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from shardckpt.boxes import Box, full_box, intersect, shift
from shardckpt.errors import FormatError
from shardckpt.stream.format.codec import (
    BoxChange,
    apply_change,
    apply_part,
    compose_changes,
    decode_change,
    encode_change,
    find_changes,
    map_change,
    shift_positions,
)

DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64]
shares = st.sampled_from([0, 0.01, 0.1, 0.5, 1])


def numbers(shape, dtype: type = np.uint16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def edited(old: np.ndarray, share: float, seed: int = 1) -> np.ndarray:
    """A copy of which about this share changed."""
    chosen = np.random.default_rng(seed).random(old.shape) < share
    return np.where(chosen, numbers(old.shape, old.dtype.type, seed), old)


def sparse(numel: int, positions: list[int], dtype: type = np.uint16) -> BoxChange:
    return BoxChange(numel, np.array(positions, np.int64), numbers(len(positions), dtype, 3) | dtype(1))


def decoded(change: BoxChange) -> BoxChange:
    data = encode_change(change)
    return decode_change(data, numel=change.numel, itemsize=change.values.itemsize, where="x")


def same(one: BoxChange, other: BoxChange) -> bool:
    return (
        one.numel == other.numel
        and one.values.dtype == other.values.dtype
        and np.array_equal(one.values, other.values)
        and (one.positions is None) == (other.positions is None)
        and (one.positions is None or np.array_equal(one.positions, other.positions))
    )


def found(old: np.ndarray, new: np.ndarray) -> BoxChange:
    return find_changes(np.ascontiguousarray(old), np.ascontiguousarray(new))[0]  # as in a buffer: no slices


def applied(change: BoxChange, old: np.ndarray) -> np.ndarray:
    values = old.copy()
    apply_change(change, values)
    return values


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))


@given(st.sampled_from(DTYPES), st.integers(0, 300), shares, st.integers(0, 99))
@example(np.uint16, 200_000, 0.01, 0)
@example(np.uint16, 200_000, 0.4, 0)
@example(np.uint64, 200_000, 1, 0)
@example(np.uint8, 1, 1, 1)
def test_a_found_change_arrives_through_its_bytes(dtype, numel, share, seed):
    old = numbers(numel, dtype, seed)
    new = edited(old, share, seed + 1)
    change = found(old, new)
    assert same(decoded(change), change)
    assert np.array_equal(applied(decoded(change), old), new)
    if change.positions is not None:
        assert np.array_equal(change.positions, np.flatnonzero(old != new))
        assert np.array_equal(change.values, (old ^ new)[old != new])


def test_equal_elements_are_no_change():
    change = found(numbers(1000), numbers(1000))
    assert len(change.values) == 0
    assert not change.is_full
    assert len(encode_change(change)) == 12
    assert same(decoded(change), change)


@pytest.mark.parametrize(("dtype", "most"), [(np.uint8, 333), (np.uint16, 500), (np.uint32, 666), (np.uint64, 800)])
def test_all_elements_are_sent_when_positions_would_not_save_bytes(dtype, most):
    old = numbers(1000, dtype)
    for count, is_full in ((most, False), (most + 1, True), (1000, True)):
        new = old.copy()
        new[:count] ^= dtype(1)
        change = found(old, new)
        assert change.is_full == is_full
        assert np.array_equal(applied(change, old), new)


def test_a_full_change_does_not_follow_later_writes():
    new = numbers(1000)
    change = found(np.zeros_like(new), new)
    new[:] = 0
    assert change.is_full
    assert change.values.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [254, 255, 256, 65_534, 65_535, 65_536, 1 << 24, (1 << 32) - 1, 1 << 32, 1 << 40])
def test_gaps_of_any_size_arrive(dtype, gap):
    for positions in ([gap], [0, gap, gap + 1, 2 * gap + 1], [3, 4, gap + 4]):
        change = sparse(2 * gap + 2, positions, dtype)
        assert same(decoded(change), change)


def test_weights_of_a_training_step_take_little_over_a_byte_for_each_change():
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, 1 << 18).astype(np.float32)
    step = (1e-6 * rng.normal(0, 1, len(weights))).astype(np.float32)
    old, new = ((w.view(np.uint32) + 0x8000 >> 16).astype(np.uint16) for w in (weights, weights - step))
    change = found(old, new)
    assert 0.01 < len(change.values) / len(old) < 0.1
    assert len(encode_change(change)) < 1.4 * len(change.values)


def test_files_of_older_versions_can_be_decoded():
    data = bytes.fromhex("01020200 0300000000000000" + "0300000000000000" * 4 + "030000 000001 010203 000080")
    change = decode_change(data, numel=1000, itemsize=2, where="x")
    assert same(change, BoxChange(1000, np.array([3, 4, 261]), np.array([1, 2, 0x8003], np.uint16)))
    assert encode_change(change) == data
    frame = zstandard.ZstdCompressor().compress(bytes(range(4)) * 100)
    data = bytes.fromhex("02010000 9001000000000000") + struct.pack("<Q", len(frame)) + frame
    assert bytes(decode_change(data, numel=400, itemsize=1, where="x").values) == bytes(range(4)) * 100


@given(st.sampled_from(DTYPES), st.lists(shares, min_size=1, max_size=5), st.data())
def test_composed_changes_do_what_one_after_the_other_do(dtype, chain, data):
    numel = data.draw(st.sampled_from([1, 40, 300, 150_000]))
    old = new = numbers(numel, dtype)
    changes = []
    for seed, share in enumerate(chain):
        after = edited(new, share, seed + 1)
        if data.draw(st.booleans()):  # back to the start, so that XORs cancel
            after = np.where(np.arange(numel) % 2, old, after)
        changes.append(found(new, after))
        new = after
    change = compose_changes(changes)
    assert np.array_equal(applied(change, old), new)
    assert change.is_full == any(each.is_full for each in changes)
    if change.positions is not None:
        assert np.array_equal(change.positions, np.flatnonzero(old != new))


def test_a_full_change_replaces_all_before_it():
    first, full, last = sparse(10, [0, 3]), BoxChange(10, None, numbers(10)), sparse(10, [3, 9])
    change = compose_changes([first, full, last])
    assert change.is_full
    assert np.array_equal(change.values, applied(last, full.values))
    assert np.array_equal(full.values, numbers(10)), "the parts stay as they are"


def test_a_change_and_its_reverse_leave_no_position():
    change = sparse(1 << 40, [0, 5, 65_535, 65_536, 1 << 39])
    assert len(compose_changes([change, change]).values) == 0
    assert same(compose_changes([change, change, change]), change)


def test_changes_of_different_boxes_are_not_composed():
    for other in (sparse(11, [1]), sparse(10, [1], np.uint32)):
        with pytest.raises(ValueError, match="must be of one box"):
            compose_changes([sparse(10, [1]), other])
    with pytest.raises(ValueError, match="must be a change"):
        compose_changes([])


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - o)) for o, n in zip(offset, shape, strict=True)))


@given(st.data())
def test_a_mapped_change_equals_the_slice_of_the_changed_array(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    old = numbers(shape)
    new = edited(old, data.draw(st.sampled_from([0.2, 0.3, 1])), data.draw(st.integers(0, 99)))
    box, into = data.draw(st.sampled_from([full_box(shape), data.draw(boxes_in(shape))])), data.draw(boxes_in(shape))
    change = found(old[at(box)].reshape(-1), new[at(box)].reshape(-1))
    mapped, part = map_change(change, box, into), intersect(box, into)
    if part is None:
        assert mapped.numel == len(mapped.values) == 0
    else:
        assert np.array_equal(applied(mapped, old[at(part)].reshape(-1)), new[at(part)].reshape(-1))
        assert mapped.is_full == change.is_full
    after = old.copy()
    after[at(box)] = new[at(box)]
    values = old[at(into)].reshape(-1).copy()
    apply_part(change, box, values, into)
    assert np.array_equal(values, after[at(into)].reshape(-1))


@pytest.mark.parametrize(
    ("shape", "size"),
    [((2, 2, 2), (2, 1, 2)), ((5, 3, 4), (2, 2, 4)), ((3, 4, 2, 2), (3, 1, 2, 1)), ((4, 5, 1), (4, 2, 1))],
)
def test_shifted_positions_are_right_where_inner_dimensions_are_full(shape, size):
    box = Box((0,) * len(shape), size)
    every = np.arange(np.prod(shape)).reshape(shape)[at(box)].reshape(-1)
    assert np.array_equal(shift_positions(sparse(box.volume, list(range(box.volume))), shape, box), every)


@given(st.data())
def test_shifted_positions_are_those_in_the_full_tensor(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    box = data.draw(boxes_in(shape))
    every = np.arange(np.prod(shape, dtype=int)).reshape(shape)[at(box)].reshape(-1)
    change = sparse(box.volume, list(range(box.volume)))
    assert np.array_equal(shift_positions(change, shape, box), every)


def test_rows_of_a_change_count_from_the_first_of_them():
    change = sparse(40, [3, 15, 19, 20, 39])
    rows = map_change(change, Box((2, 0), (4, 10)), Box((3, 0), (1, 10)))
    assert same(rows, BoxChange(10, np.array([5, 9]), change.values[1:3]))


def test_mapping_there_and_back_keeps_large_boxes_of_columns():
    shape, box = (500, 700), Box((100, 0), (300, 700))
    old = numbers(shape)
    new = edited(old, 0.05)
    change = found(old[at(box)].reshape(-1), new[at(box)].reshape(-1))
    assert map_change(change, box, full_box(shape)) is change
    total = old.copy()
    for start in range(0, 700, 233):
        into = Box((0, start), (500, min(233, 700 - start)))
        part = intersect(box, into)
        mapped = map_change(change, box, into)
        total.reshape(-1)[shift_positions(mapped, shape, part)] ^= mapped.values
        assert mapped.numel == shift(part, box.offset).volume
    expected = old.copy()
    expected[at(box)] = new[at(box)]
    assert np.array_equal(total, expected)


def test_arguments_that_do_not_fit_are_refused():
    change = sparse(10, [1])
    for values in (np.zeros(9, np.uint16), np.zeros(10, np.uint32), np.zeros((2, 5), np.uint16)):
        with pytest.raises(ValueError, match="must be 10 flat uint16"):
            apply_change(change, values)
    with pytest.raises(ValueError, match="flat and alike"):
        found(np.zeros(3, np.uint16), np.zeros(4, np.uint16))
    with pytest.raises(ValueError, match="must have 9 elements"):
        map_change(change, Box((0,), (9,)), Box((0,), (9,)))
    with pytest.raises(ValueError, match="must have positions"):
        shift_positions(BoxChange(2, None, numbers(2)), (2,), full_box((2,)))


SAMPLES = [
    encode_change(found(numbers(5000, dtype), edited(numbers(5000, dtype), share)))
    for dtype in (np.uint8, np.uint16, np.uint64)
    for share in (0.05, 1)
]


def try_to_decode(data: bytes, numel: int = 5000) -> BoxChange | None:
    """Decode hostile bytes: a change that can be applied, or the typed error."""
    itemsize = data[1] if len(data) > 1 and data[1] in (1, 2, 8) else 2
    try:
        change = decode_change(data, numel=numel, itemsize=itemsize, where="file, tensor w")
    except FormatError as error:
        assert str(error).startswith("file, tensor w: ")
        return None
    apply_change(change, np.zeros(numel, f"u{itemsize}"))
    if change.positions is not None:
        assert (np.diff(change.positions) > 0).all()
    return change


@pytest.mark.parametrize("data", SAMPLES)
def test_every_cut_file_is_refused(data):
    for end in {*range(min(len(data), 120)), *range(0, len(data), 97), len(data) - 1}:
        assert try_to_decode(data[:end]) is None
    assert try_to_decode(data + b"\0") is None
    assert try_to_decode(data) is not None


@given(st.sampled_from(SAMPLES), st.lists(st.tuples(st.integers(0, 100_000), st.integers(1, 255)), max_size=4))
def test_flipped_bits_decode_or_are_refused(data, flips):
    damaged = bytearray(data)
    for index, bits in flips:
        damaged[index % min(len(data), 200 if index % 2 else len(data))] ^= bits
    try_to_decode(bytes(damaged))


@given(st.binary(max_size=100))
def test_any_bytes_decode_or_are_refused(data):
    try_to_decode(data)


def with_planes(kind: int, gap_bytes: int, count: int, planes: list[bytes], itemsize: int = 2) -> bytes:
    lengths = b"".join(struct.pack("<Q", len(plane)) for plane in planes)
    return struct.pack("<BBBxQ", kind, itemsize, gap_bytes, count) + lengths + b"".join(planes)


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 26))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
SHORT = zstandard.ZstdCompressor().compress(bytes(999))
RIGHT = zstandard.ZstdCompressor().compress(bytes(1000))
SKIPPED = struct.pack("<II", 0x184D2A50, 1000)


@pytest.mark.parametrize(
    "data",
    [
        with_planes(1, 1, 1 << 63, [b"", b"", b""]),
        with_planes(1, 1, 5001, [bytes(5001)] * 3),
        with_planes(2, 0, 4999, [bytes(4999)] * 2),
        with_planes(2, 1, 5000, [bytes(5000)] * 3),
        with_planes(1, 0, 5000, [bytes(5000)] * 2),
        with_planes(1, 3, 10, [bytes(10)] * 5),
        with_planes(3, 0, 5000, [bytes(5000)] * 2),
        with_planes(1, 1, 1000, [BOMB, bytes(1000), bytes(1000)]),
        with_planes(1, 1, 1000, [UNSIZED, bytes(1000), bytes(1000)]),
        with_planes(1, 1, 1000, [SHORT, bytes(1000), bytes(1000)]),
        with_planes(1, 1, 1000, [RIGHT + RIGHT, bytes(1000), bytes(1000)]),
        with_planes(1, 1, 1000, [RIGHT + b"\0", bytes(1000), bytes(1000)]),
        with_planes(1, 1, 1000, [SKIPPED, bytes(1000), bytes(1000)]),
        with_planes(1, 1, 1000, [bytes(1001), bytes(1000), bytes(999)]),
        with_planes(1, 1, 1000, [b"\xff" * 1000, bytes(1000), bytes(1000)]),
        with_planes(1, 2, 1, [b"\x88", b"\x13", b"\1", b"\1"]),
        with_planes(1, 8, 2, [b"\xff\1", *[b"\xff\0"] * 7, b"\1\1", b"\1\1"]),
        with_planes(1, 8, 3, [b"\0\0\0"] * 7 + [b"\x40\x40\x7f", b"\1\1\1", b"\1\1\1"]),
        with_planes(1, 1, 0, []),
        b"\1\2\0\1" + bytes(8),
        with_planes(1, 0, 0, []) + b"\0",
    ],
)
def test_a_hostile_change_is_refused_in_little_memory(data):
    tracemalloc.start()
    assert try_to_decode(data) is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_last_element_may_change_and_none_after_it():
    assert try_to_decode(with_planes(1, 2, 1, [b"\x87", b"\x13", b"\1", b"\1"])).positions.tolist() == [4999]
    assert try_to_decode(with_planes(1, 1, 1000, [RIGHT, bytes(1000), bytes(1000)])) is not None


def test_positions_that_wrap_around_are_refused():
    gaps = np.full(5, (1 << 62) - 1, "<u8").view(np.uint8).reshape(5, 8).T
    data = with_planes(1, 8, 5, [bytes(plane) for plane in gaps] + [bytes(5)] * 2)
    with pytest.raises(FormatError, match="after the end of its box"):
        decode_change(data, numel=1 << 62, itemsize=2, where="w")


def test_a_change_for_another_element_size_is_refused():
    with pytest.raises(FormatError, match=r"w: an encoded change has another element size; found 2; expected 4"):
        decode_change(encode_change(sparse(10, [1])), numel=10, itemsize=4, where="w")
