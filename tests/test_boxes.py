"""Boxes against brute force: every claim of `boxes` is compared with a mask of elements."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import boxes
from shardckpt.boxes import (
    Box,
    Shape,
    chunk_box,
    chunk_range,
    contiguous_blocks,
    cover,
    flat_index,
    flat_to_boxes,
    full_box,
    intersect,
    is_grid,
)

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
shapes_with_empty = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...], least: int = 0) -> Box:
    offset = [draw(st.integers(0, max(n - least, 0))) for n in shape]
    size = [draw(st.integers(min(least, n - o), n - o)) for o, n in zip(offset, shape, strict=True)]
    return Box(tuple(offset), tuple(size))


@st.composite
def shape_and_boxes(draw: st.DrawFn, most: int = 6) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_of(shape), max_size=most))


@st.composite
def shape_and_range(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes_with_empty)
    a, b = sorted(draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    return shape, a, b


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, s) for o, s in zip(box.offset, box.stop, strict=True))


def counted(shape: tuple[int, ...], parts: list[Box]) -> np.ndarray:
    mask = np.zeros(shape, int)
    for part in parts:
        mask[at(part)] += 1
    return mask


@given(st.data())
def test_intersect_holds_the_elements_of_both(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    both = (counted(shape, [a]) + counted(shape, [b])) == 2
    found = intersect(a, b)
    assert (counted(shape, [found] if found else []) == both).all()
    assert found == intersect(b, a)


def test_two_scalars_are_one_element() -> None:
    assert intersect(Box((), ()), Box((), ())) == Box((), ())


@given(shape_and_boxes())
def test_cover_reports_a_gap_or_an_overlap_exactly_where_there_is_one(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, parts = case
    mask = counted(shape, parts)
    found = cover(full_box(shape), parts, limit=10**6)
    assert (counted(shape, found.gaps) == (mask == 0)).all(), "gaps are disjoint and hold every uncovered element"
    overlapped = counted(shape, [box for box, _, _ in found.overlaps]) > 0
    assert (mask[overlapped] > 1).all(), "no element is called doubled that is not"
    assert bool(found.overlaps) == bool((mask > 1).any()), "no double claim is overlooked"
    for box, i, j in found.overlaps:
        assert i != j
        assert intersect(box, parts[i]) == intersect(box, parts[j]) == box


@given(st.data())
def test_any_grid_is_a_cover(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    parts = [Box((), ())]
    for cut in cuts:
        parts = [Box((*p.offset, a), (*p.size, b - a)) for p in parts for a, b in pairwise(cut)]
    parts = data.draw(st.permutations(parts))
    assert cover(full_box(shape), parts) == ([], [])
    if len(parts) > 1:
        assert cover(full_box(shape), parts[1:]) == ([parts[0]], [])
        assert cover(full_box(shape), [*parts, parts[0]]).overlaps


@given(shape_and_boxes())
def test_cover_stops_at_its_limit(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, parts = case
    found = cover(full_box(shape), parts, limit=1)
    assert len(found.gaps) + len(found.overlaps) <= 1
    everything = cover(full_box(shape), parts, limit=10**6)
    assert bool(everything.gaps or everything.overlaps) == bool(found.gaps or found.overlaps)


@pytest.mark.parametrize("grid", ["rows", "columns", "tiles", "bricks"])
def test_cover_of_many_boxes_takes_less_than_quadratic_time(grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts intersections, not seconds: four times the boxes may cost little more than four times as many."""
    calls = 0
    real = boxes.intersect

    def counting(a: Box, b: Box) -> Box | None:
        nonlocal calls
        calls += 1
        return real(a, b)

    monkeypatch.setattr(boxes, "intersect", counting)
    costs = []
    for n in (32, 64):
        side, parts = n, []
        for i in range(n * n):
            row, column = divmod(i, n)
            parts += {
                "rows": [Box((i, 0), (1, side))],
                "columns": [Box((0, i), (side, 1))],
                "tiles": [Box((row * 3, column * 2), (3, 2))],
                "bricks": [Box((row, column * 4 + (row % 2) * 2), (1, 4))],
            }[grid]
        if grid == "bricks":
            parts = [p for p in parts if p.stop[1] <= n * 4]
            parts += [Box((row, 0), (1, 2)) for row in range(1, n, 2)]
            parts += [Box((row, n * 4 - 2), (1, 2)) for row in range(1, n, 2)]
        shape = tuple(max(p.stop[d] for p in parts) for d in (0, 1))
        calls = 0
        assert cover(full_box(shape), parts) == ([], [])
        costs.append(calls)
    assert costs[1] < 8 * costs[0], f"16 times would be quadratic: {costs}"


@given(shape_and_range())
def test_a_flat_range_is_few_boxes_that_hold_exactly_its_elements(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    parts = flat_to_boxes(shape, start, stop)
    assert len(parts) <= max(2 * len(shape) - 1, 1)
    numbers = np.arange(prod(shape)).reshape(shape)
    flat = np.concatenate([numbers[at(p)].reshape(-1) for p in parts]) if parts else np.array([], int)
    assert flat.tolist() == list(range(start, stop)), "in row-major order, nothing twice"


def test_a_range_of_a_huge_array_costs_nothing() -> None:
    shape = (1 << 40, 1 << 10, 1 << 9)
    parts = flat_to_boxes(shape, 1, prod(shape) - 1)
    assert len(parts) == 5
    assert all(boxes.is_contiguous(shape, part) for part in parts)
    starts = [flat_index(shape, part.offset) for part in parts]
    assert starts == [1 + sum(part.volume for part in parts[:at]) for at in range(5)]
    assert sum(part.volume for part in parts) == prod(shape) - 2


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_its_array_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="is not in an array"):
        flat_to_boxes((2, 3), start, stop)


@given(st.data())
def test_contiguous_means_that_the_elements_follow_one_another(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    box = data.draw(boxes_of(shape, least=1))
    numbers = np.arange(prod(shape)).reshape(shape)[at(box)].reshape(-1)
    truth = numbers.tolist() == list(range(numbers[0], numbers[0] + box.volume))
    assert boxes.is_contiguous(shape, box) == truth
    assert flat_index(shape, box.offset) == numbers[0]


@given(st.data(), st.integers(1, 40))
def test_blocks_cut_a_box_in_order_and_keep_to_their_size(data: st.DataObject, most: int) -> None:
    shape = data.draw(shapes_with_empty)
    box = data.draw(boxes_of(shape))
    blocks = list(contiguous_blocks(box, most))
    numbers = np.arange(box.volume).reshape(box.size)
    seen: list[int] = []
    for block in blocks:
        assert 0 < block.volume <= most
        inner = boxes.shift(block, box.offset)
        assert boxes.is_contiguous(box.size, inner)
        seen += numbers[at(inner)].reshape(-1).tolist()
    assert seen == list(range(box.volume))


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        (Box((0, 0), (2, 3)), True),
        (Box((2, 0), (0, 3)), True),
        (Box((0, 0), (2, 4)), False),
        (Box((-1, 0), (1, 1)), False),
        (Box((0, 0), (-1, 1)), False),
        (Box((0,), (1,)), False),
        (Box((1 << 80, 0), (1, 1)), False),
    ],
)
def test_within_refuses_what_does_not_lie_inside(box: Box, inside: bool) -> None:
    assert box.within((2, 3)) is inside


@given(shapes_with_empty)
def test_strides_are_numpys(shape: tuple[int, ...]) -> None:
    array = np.empty(shape, np.uint8)
    if array.size:
        assert boxes.strides(shape) == array.strides


def test_a_box_is_printed_as_a_slice() -> None:
    assert str(Box((0, 3), (2, 5))) == "[0:2, 3:8]"
    assert str(Box((), ())) == "[]"


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((), [Box((), ())], True),
        ((), [], False),
        ((4,), [Box((0,), (1,)), Box((1,), (3,))], True),
        ((4,), [Box((1,), (3,)), Box((0,), (1,))], True),
        ((4,), [Box((0,), (1,)), Box((2,), (2,))], False),
        ((4,), [Box((0,), (4,)), Box((0,), (4,))], False),
        ((4,), [Box((0,), (2,)), Box((0,), (4,))], False),
        ((4, 2), [Box((i, j), (2, 1)) for i in (0, 2) for j in (0, 1)], True),
        ((4, 2), [Box((0, 0), (2, 1)), Box((2, 1), (2, 1)), Box((0, 1), (2, 1)), Box((0, 0), (2, 1))], False),
        ((4, 2), [Box((0, 0), (4, 1)), Box((0, 1), (2, 1)), Box((2, 1), (2, 1))], False),
        ((4, 2), [Box((0, 0), (4, 3))], False),
        ((4, 2), [Box((-1, 0), (5, 2))], False),
        ((0, 2), [Box((0, 0), (0, 2))], False),
    ],
)
def test_the_cells_of_a_grid_are_known(shape: Shape, boxes: list[Box], expected: bool) -> None:
    assert is_grid(shape, boxes) is expected
    if expected:
        assert cover(full_box(shape), boxes) == ([], [])


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_are_those_of_torch(size: int, parts: int) -> None:
    """torch leaves out empty chunks, and gives one where there is nothing to split."""
    expected = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
    ranges = [chunk_range(size, parts, index) for index in range(parts)]
    assert [length for _, length in ranges] == expected + [0] * (parts - len(expected))
    assert [start for start, _ in ranges] == [sum(expected[:index]) for index in range(parts)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), st.integers(1, 6), st.data())
def test_chunk_boxes_are_those_of_torch(shape: Shape, parts: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    array = torch.arange(prod(shape)).reshape(shape)
    chunks = array.chunk(parts, dim)
    for index in range(parts):
        box = chunk_box(shape, dim, parts, index)
        values = array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
        expected = chunks[index] if index < len(chunks) else array.narrow(dim, 0, 0)
        assert values.shape == expected.shape
        assert torch.equal(values, expected)
