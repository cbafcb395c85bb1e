"""What ranks tell of boxes comes out as it went in, and names that are the same are put into words once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box
from shardckpt.plan.layout import box_codec
from shardckpt.plan.layout.box_codec import BoxRow, PackedRows, encode_rows


@st.composite
def rows(draw: st.DrawFn) -> BoxRow:
    shape = tuple(draw(st.lists(st.integers(0, 1 << 40), max_size=4)))
    numbers = st.tuples(*[st.integers(0, 1 << 40)] * len(shape))
    boxes = draw(st.lists(st.builds(Box, numbers, numbers), max_size=3))
    path = tuple(draw(st.lists(st.text(max_size=3) | st.integers(0, 9), min_size=1, max_size=3)))
    return BoxRow(path, shape, draw(st.sampled_from(["float32", "bfloat16"])), tuple(boxes))


@given(st.lists(rows(), max_size=4))
def test_rows_come_out_as_they_went_in(given_: list[BoxRow]) -> None:
    found = PackedRows.decode(encode_rows(given_)).unpack()
    assert found == given_
    assert all(type(box) is Box and type(row.path) is tuple for row in found for box in row.boxes)


def test_ranks_with_the_same_arrays_share_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    loads = box_codec.json.loads
    monkeypatch.setattr(box_codec.json, "loads", lambda data: parsed.append(data) or loads(data))
    names = [("only", "here", n) for n in range(50)]
    told = [encode_rows(BoxRow(p, (8, 4), "float32", (Box((rank, 0), (1, 4)),)) for p in names) for rank in range(8)]
    found = [PackedRows.decode(each).unpack() for each in told]
    assert [rank[7].boxes for rank in found] == [(Box((rank, 0), (1, 4)),) for rank in range(8)]
    assert len(parsed) == 1
    assert all(rank[7].path is found[0][7].path for rank in found)
