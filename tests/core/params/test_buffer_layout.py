"""Any parameters, any world: what is packed and gathered comes back, gradients land where their parts are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.core.params.buffer_layout import DimPacking, FlatPacking, Packing

SHAPES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


def values(shapes, turned) -> list[torch.Tensor]:
    found = []
    for index, shape in enumerate(shapes):
        value = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 100 * (index + 1)
        found.append(value.transpose(0, -1).contiguous().transpose(0, -1) if turned else value)
    return found


@st.composite
def packings(draw) -> tuple[Packing, list[torch.Tensor]]:
    shapes, world = draw(SHAPES), draw(st.integers(1, 5))
    given_values = values(shapes, draw(st.booleans()))
    names, aliases = [f"p{i}" for i in range(len(shapes))], [()] * len(shapes)
    alignment = draw(st.sampled_from([1, 4, 8]))
    if draw(st.booleans()):
        return FlatPacking(names, given_values, aliases, world, alignment=alignment), given_values
    dims = [draw(st.integers(0, len(shape) - 1)) for shape in shapes]
    return DimPacking(names, given_values, aliases, world, dims=dims, alignment=alignment), given_values


def shards(packing: Packing, full: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for rank in range(packing.layout.world):
        shard = torch.full((packing.layout.chunk,), -1.0)
        packing.write_shard(full, rank, shard)
        found.append(shard)
    return found


@settings(max_examples=150, deadline=None)
@given(packings())
def test_gathered_shards_are_the_full_parameters(case):
    packing, full = case
    gathered = torch.cat(shards(packing, full))
    assert gathered.numel() == packing.all_gather_numel
    whole = gathered if isinstance(packing, FlatPacking) else torch.full((packing.all_gather_numel,), -2.0)
    packing.unpack(gathered.view(packing.layout.world, -1), whole)
    for view, value in zip(packing.views(whole), full, strict=True):
        assert torch.equal(view, value)
        assert view.stride() == value.stride() or value.numel() == 0 or 1 in value.shape


@settings(max_examples=150, deadline=None)
@given(packings(), st.integers(0, 3))
def test_gradients_are_packed_as_shards_are_with_zeros_for_the_missing(case, missing):
    packing, full = case
    grads = [None if index == missing else value for index, value in enumerate(full)]
    rows = torch.full((packing.layout.world, packing.layout.chunk + 2), 7.0)
    packing.pack(grads, rows)
    zeroed = [torch.zeros_like(value) if grad is None else value for grad, value in zip(grads, full, strict=True)]
    assert torch.equal(rows[:, : packing.layout.chunk], torch.stack(shards(packing, zeroed)))
    assert bool((rows[:, packing.layout.chunk :] == 7).all())
    chunks = packing.list_chunks(grads)
    if chunks:
        at_once = torch._chunk_cat(chunks, 0, packing.layout.world)
        assert torch.equal(at_once, rows[:, : packing.layout.chunk])


@settings(max_examples=100, deadline=None)
@given(packings())
def test_parts_of_a_shard_are_what_was_cut_and_cover_everything(case):
    packing, full = case
    seen = 0
    for rank, shard in enumerate(shards(packing, full)):
        for part, cut in zip(packing.split_shard(shard, rank), packing.shard_values(full, rank), strict=True):
            assert torch.equal(part, cut)
            seen += part.numel()
    assert seen == sum(value.numel() for value in full)


@pytest.mark.parametrize(("world", "direct"), [(1, True), (2, False)])
def test_one_rank_copies_nothing_after_a_gather(world, direct):
    value = [torch.zeros(4, 2)]
    assert DimPacking(["p"], value, [()], world, dims=[0]).is_direct is direct
