"""Every layout holds every element once, at any world size, and survives JSON and a change of world."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box, cover, full_box
from shardckpt.errors import FormatError
from shardckpt.layout import DimLayout, FlatLayout, Layout, ParamSpec, from_json

WORLDS = st.integers(1, 6)


@st.composite
def specs(draw) -> tuple[ParamSpec, ...]:
    found = []
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        order = tuple(draw(st.permutations(range(len(shape))))) if draw(st.booleans()) else ()
        found.append(ParamSpec(f"p{index}", shape, "float32", order, ("q",) if index == 0 else ()))
    return tuple(found)


@st.composite
def layouts(draw) -> Layout:
    chosen = draw(specs())
    if draw(st.booleans()):
        return FlatLayout(chosen, draw(WORLDS), draw(st.sampled_from([1, 4, 8])))
    plain = tuple(ParamSpec(s.name, s.shape, s.dtype, (), s.aliases) for s in chosen)
    dims = tuple(draw(st.integers(0, max(len(s.shape) - 1, 0))) for s in plain)
    return DimLayout(plain, draw(WORLDS), dims, draw(st.sampled_from([1, 4, 8])))


def covered(layout: Layout, boxes: dict[int, list[Box]]) -> bool:
    return all(
        cover(full_box(spec.shape), boxes.get(index, [])) == ([], [])
        for index, spec in enumerate(layout.specs)
        if spec.numel
    )


@given(layouts(), WORLDS)
def test_the_shards_of_all_ranks_hold_every_element_once(layout, world):
    """At another world size too: it replaces the test of `layout.moves`, which was removed (decision 27)."""
    assert_complete(layout)
    assert_complete(layout.with_world(world))


def assert_complete(layout: Layout) -> None:
    held: dict[int, list[Box]] = {}
    for rank in range(layout.world):
        for index, box, _ in layout.boxes(rank):
            held.setdefault(index, []).append(box)
    assert covered(layout, held)


@given(layouts())
def test_boxes_lie_in_the_shard_without_touching(layout):
    for rank in range(layout.world):
        end = 0
        for _, box, offset in layout.boxes(rank):
            assert offset >= end
            end = offset + box.volume
        assert end <= layout.chunk


@given(layouts())
def test_json_gives_the_layout_back(layout):
    assert from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_sizes_of_the_reference_example():
    specs = (ParamSpec("a", (6,), "float32"), ParamSpec("b", (4,), "float32"))
    aligned, packed = FlatLayout(specs, 2, 4), FlatLayout(specs, 2)
    assert (aligned.offsets, aligned.numel, aligned.chunk) == ((0, 8), 12, 6)
    assert (packed.offsets, packed.numel, packed.chunk) == ((0, 6), 10, 5)


def test_trailing_ranks_may_own_nothing():
    layout = FlatLayout((ParamSpec("a", (5,), "float32"),), 4)
    assert [layout.get_unpadded_size(rank) for rank in range(4)] == [2, 2, 1, 0]
    assert layout.runs(3) == []


def test_rows_are_cut_with_later_ranks_shorter_or_empty():
    layout = DimLayout((ParamSpec("w", (5, 3), "float32"), ParamSpec("s", (), "float32")), 4, (0, 0))
    assert [layout.box(0, rank).size for rank in range(4)] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert [layout.box(1, rank).volume for rank in range(4)] == [1, 0, 0, 0]
    assert layout.chunk == 7


def test_rows_start_at_multiples_that_json_does_not_have():
    specs = (ParamSpec("w", (5, 3), "float32"), ParamSpec("e", (0,), "float32"), ParamSpec("s", (), "float32"))
    packed, aligned = DimLayout(specs, 4, (0, 0, 0)), DimLayout(specs, 4, (0, 0, 0), 4)
    assert (packed.places, packed.chunk) == ((0, 6, 6), 7)
    assert (aligned.places, aligned.chunk) == ((0, 8, 8), 12)
    assert aligned.with_world(2).places == (0, 12, 12)
    assert aligned.to_json() == packed.to_json()


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {"format": 2},
        {"format": 1, "kind": "flat", "world": 0, "params": [], "alignment": 1},
        {"format": 1, "kind": "flat", "world": 1, "params": [{"name": "a", "shape": [-1], "dtype": "float32"}]},
        {"format": 1, "kind": "flat", "world": 1, "params": [{"name": "a", "shape": [1], "dtype": "evil"}]},
        {"format": 1, "kind": "flat", "world": True, "params": [], "alignment": 1},
        {"format": 1, "kind": "dim", "world": 1, "params": [{"name": 3, "shape": [], "dtype": "int8"}], "dims": [0]},
        {"format": 1, "kind": "dim", "world": 1, "params": [{"name": "a", "shape": [], "dtype": "int8"}], "dims": [1]},
        {"format": 1, "kind": "cube", "world": 1, "params": []},
    ],
)
def test_what_is_no_layout_is_refused(broken):
    with pytest.raises(FormatError):
        from_json(broken)


def test_it_does_without_torch():
    code = "import sys, shardckpt.layout; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
