"""Flat shards and rows are two cuts of the same parameters: one exchange leads from either to the other."""

from __future__ import annotations

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.state.redistribute.flat_to_rows import Rows, plan_exchange

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
