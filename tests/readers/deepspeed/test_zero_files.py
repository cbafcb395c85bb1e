"""ZeRO's cuts: for any world and any sizes the runs are each element once, in order, and where ranks hold them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.readers.deepspeed import zero_files as layout

WORLDS = st.integers(1, 16)
NUMELS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(NUMELS, WORLDS, st.integers(1, 8))
def test_equal_parts_of_a_group_hold_each_element_where_ranks_have_it(
    numels: list[int], world: int, alignment: int
) -> None:
    """The group is built as its writer builds it: back to back, padded at the end, chunked."""
    paddings = [(-n) % alignment for n in numels]
    flat, at = [], 0
    for name, (n, padding) in enumerate(zip(numels, paddings, strict=True)):
        flat += [(name, i) for i in range(n)] + [None] * padding
    total = len(flat)
    flat += [None] * (-total % (2 * world))
    each = len(flat) // world
    offsets = layout.offsets(numels, paddings)
    assert offsets[-1] == total
    assert layout.partition_elements(total, world) == each
    for name, (n, at) in enumerate(zip(numels, offsets, strict=False)):
        runs = layout.split_partition_runs(at, n, each or 1)
        held = [flat[r.rank * each + r.at + i] for r in runs for i in range(r.stop - r.start)]
        assert held == [(name, i) for i in range(n)]


@given(st.integers(0, 60), WORLDS, st.data())
def test_the_size_of_a_part_is_told_from_lengths_with_padding_and_without(
    total: int, world: int, data: st.DataObject
) -> None:
    each = layout.partition_elements(total, world)
    lean = {rank: layout.lean_elements(total, each, rank) for rank in range(world)}
    assert sum(lean.values()) == total
    lengths = {rank: data.draw(st.sampled_from((each, lean[rank]))) for rank in lean}
    found = layout.fit_partition(total, world, lengths)
    assert found is not None
    assert all(n in (found, layout.lean_elements(total, found, rank)) for rank, n in lengths.items())
    longer = {**lengths, 0: each + 1}
    assert layout.fit_partition(total, world, longer) is None


def test_parts_of_before_the_alignment_to_four_bytes_are_known_too() -> None:
    assert layout.fit_partition(9, 3, {0: 3, 1: 3, 2: 3}) == 3
    assert layout.fit_partition(9, 3, {0: 4, 1: 4, 2: 1}) == 4


@given(st.lists(st.integers(), max_size=20, unique=True), WORLDS)
def test_the_order_before_parameters_were_dealt_out_is_found(names: list[int], world: int) -> None:
    dealt = [name for rank in range(world) for name in names[rank::world]]
    assert layout.original_order([str(n) for n in dealt], world) == [str(n) for n in names]


@given(NUMELS, WORLDS, st.lists(st.integers(0, 50), max_size=4))
def test_parts_of_each_parameter_hold_each_element_even_across_flat_tensors(
    numels: list[int], world: int, cuts: list[int]
) -> None:
    parts = [layout.part_elements(n, world) for n in numels]
    end = sum(parts)
    bounds = [0, *sorted(min(cut, end) for cut in cuts), end]
    ranks = [[(name, rank * part + i) for name, part in enumerate(parts) for i in range(part)] for rank in range(world)]
    offset = 0
    for name, n in enumerate(numels):
        runs = layout.split_stage3_runs(offset, n, world, bounds)
        held = [ranks[r.rank][bounds[r.unit] + r.at + i] for r in runs for i in range(r.stop - r.start)]
        assert held == [(name, i) for i in range(n)]
        assert all(r.at >= 0 and r.at + r.stop - r.start <= bounds[r.unit + 1] - bounds[r.unit] for r in runs)
        offset += parts[name]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (4, 1, 3)])
def test_boxes_of_a_run_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(int(torch.Size(shape).numel())).reshape(shape)
    n = whole.numel()
    for start in range(n + 1):
        for stop in range(start, n + 1):
            found = []
            for box, at in layout.boxes(shape, layout.PartitionRun(0, 0, 10, start, stop)):
                assert at == 10 + len(found)
                found += whole[tuple(map(slice, box.offset, box.stop))].reshape(-1).tolist()
            assert found == list(range(start, stop))
