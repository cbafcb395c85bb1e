"""Flat shards and rows are two cuts of the same parameters: one exchange leads from either to the other."""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.boxes import chunk_range
from shardckpt.core.params.buffer_layout import FlatPacking
from shardckpt.core.params.full_params import Staging
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.state.redistribute.flat_to_rows import Rows, plan_exchange, rows_to_flat, start_flat_to_rows
from tests.kit.ranks.harness import run

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4)


@st.composite
def layouts(draw) -> FlatLayout:
    specs = []
    for index, shape in enumerate(draw(SHAPES)):
        turned = len(shape) > 1 and draw(st.booleans())
        specs.append(ParamSpec(f"p{index}", shape, "float32", tuple(reversed(range(len(shape)))) if turned else ()))
    return FlatLayout(tuple(specs), draw(st.integers(1, 5)), draw(st.sampled_from([1, 4])))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_every_element_travels_once_and_what_one_gives_the_other_takes(layout):
    plans = [plan_exchange(layout, rank) for rank in range(layout.world)]
    for giver, plan in enumerate(plans):
        for getter, spans in enumerate(plan.out):
            assert spans == plans[getter].into[giver]
    seen = {}
    for getter, plan in enumerate(plans):
        for spans in plan.into:
            for span in spans:
                start = plan.rows[span.index].starts[getter] + span.part
                for element in range(start, start + span.numel):
                    seen[span.index, element] = seen.get((span.index, element), 0) + 1
    assert seen == {(i, e): 1 for i, spec in enumerate(layout.specs) for e in range(spec.numel)}


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_rows_add_up_to_the_shape(layout):
    for spec in layout.specs:
        rows = Rows.from_spec(spec, layout.world)
        shapes = [rows.shape(spec, rank) for rank in range(layout.world)]
        assert sum(prod(shape) for shape in shapes) == spec.numel
        if spec.shape:
            assert sum(shape[rows.dim] for shape in shapes) == spec.shape[rows.dim]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_of_parameters_in_any_memory_order_become_flat_shards_and_rows_again(world):
    def body(rank, world):
        values = [torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(at)) for at in range(2)]
        values = [values[0], values[1].to(memory_format=torch.channels_last), torch.arange(20.0).view(4, 5).t()]
        packing = FlatPacking(["plain", "channels last", "transposed"], values, [(), (), ()], world, alignment=1)
        layout = packing.layout
        assert [bool(spec.order) for spec in layout.specs] == [False, True, True]
        shard = torch.empty(layout.chunk)
        packing.write_shard(values, rank, shard)
        splits = [Rows.from_spec(spec, world) for spec in layout.specs]
        parts = [
            value.narrow(
                split.dim, chunk_range(value.shape[split.dim], world, rank)[0], split.shape(spec, rank)[split.dim]
            )
            for value, split, spec in zip(values, splits, layout.specs, strict=True)
        ]
        found, staging = torch.empty(layout.chunk), Staging()
        how = {"dtype": found.dtype, "device": found.device}
        group = dist.group.WORLD
        rows_to_flat(parts, packing.split_shard(found, rank), layout, group, staging, **how)
        flats = packing.split_shard(shard, rank)
        is_flat = all(map(torch.equal, packing.split_shard(found, rank), flats))
        return is_flat, all(map(torch.equal, start_flat_to_rows(shard, layout, group, staging)(), parts))

    assert run(world, body) == [(True, True)] * world
