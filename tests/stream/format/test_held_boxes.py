"""Changes of held boxes, compared by words: what they add to a digest is the difference of the digests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box, full_box
from shardckpt.stream.format.codec import apply_change
from shardckpt.stream.format.digest import digest_box
from shardckpt.stream.format.held_boxes import HeldBox, compare_box, map_shared

DTYPES = {np.uint8: "uint8", np.uint16: "bfloat16", np.uint32: "float32", np.uint64: "int64"}
BOXES = {
    "the tensor": full_box((96, 1000)),
    "rows": Box((17, 0), (40, 1000)),
    "columns": Box((0, 8), (96, 16)),
    "an odd number of elements": Box((3, 7), (1, 993)),
    "a start inside a word": Box((0, 3), (1, 8)),
    "the end inside a word": Box((95, 0), (1, 997)),
    "rows over a block of keys": Box((60, 0), (36, 1000)),
    "nothing": Box((5, 0), (0, 1000)),
}


def numbers(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
def test_a_change_of_any_part_updates_the_digest(dtype, share, box):
    old = numbers((96, 1000), dtype, 0)
    is_changed = np.random.default_rng(1).random(old.shape) < share
    new = np.where(is_changed, numbers(old.shape, dtype, 2), old)
    before, after = (each[box.offset[0] : box.stop[0], box.offset[1] : box.stop[1]].flatten() for each in (old, new))
    held = HeldBox("w", old.shape, DTYPES[dtype], box, 0)
    change, digest = compare_box(held, before, after)
    assert digest == digest_box(after, old.shape, box) - digest_box(before, old.shape, box)
    apply_change(change, before)
    assert np.array_equal(before, after)


@given(st.lists(st.integers(0, 131_071), unique=True), st.integers(0, 3))
def test_elements_that_share_a_word_count_once_each(chosen, row):
    old = np.zeros(131_072, np.uint16)
    new = old.copy()
    new[chosen] = 1 + np.arange(len(chosen))
    held = HeldBox("w", (4, 131_072), "bfloat16", Box((row, 0), (1, 131_072)), 0)
    change, digest = compare_box(held, old, new)
    assert change.positions is not None
    assert change.positions.tolist() == sorted(chosen)
    assert digest == digest_box(new, held.shape, held.box) - digest_box(old, held.shape, held.box)


@pytest.mark.parametrize("has_second", [True, False])
def test_shared_work_keeps_the_order_of_items(monkeypatch, has_second):
    monkeypatch.setattr("shardckpt.stream.format.held_boxes.has_second_core", lambda: has_second)
    assert list(map_shared(lambda n: n * n, iter(range(50)))) == [n * n for n in range(50)]
