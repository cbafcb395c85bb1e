"""Drafts and tasks travel as bytes; only what several ranks hold is looked at by several."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.boxes import Box, Shape, chunk_box, flat_to_boxes, full_box
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan, RankSavePlan, create_global_plan
from shardckpt.errors import IncompleteError, UsageError
from shardckpt.manifest import Path
from shardckpt.native.payload import PayloadChunk
from shardckpt.plan.layout.box_codec import PackedRows
from shardckpt.plan.layout.write_plan import LocalTensor

ROWS = (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)))


def local_plan(rank: int) -> LocalSavePlan:
    arrays = (
        LocalTensor(("model", "w"), (4, 3), "float32", (ROWS[rank],)),
        LocalTensor(("model", "b"), (3,), "bfloat16", (full_box((3,)),)),
        LocalTensor(("model", "seen"), (), "int64", (full_box(()),)),
        LocalTensor(("model", "frozen"), (2,), "float32", (full_box((2,)),)),
        LocalTensor(("none", 0), (0, 2), "float32", (full_box((0, 2)),) if rank else ()),
    )
    return LocalSavePlan(
        arrays, frozenset({("model", "seen")}), {("tied", 1): ("model", "w")}, frozenset({("model", "frozen")})
    )


def test_a_draft_comes_out_as_it_went_in() -> None:
    for rank in (0, 1):
        assert LocalSavePlan.decode(local_plan(rank).encode()) == local_plan(rank)
    assert local_plan(0).encode() != local_plan(1).encode()
    assert LocalSavePlan.decode(LocalSavePlan((), frozenset(), {}).encode()) == LocalSavePlan((), frozenset(), {})


def test_tasks_of_a_plan_come_out_as_they_went_in() -> None:
    plan = create_global_plan([local_plan(0), local_plan(1)])
    for rank_plan in plan.rank_plans:
        assert RankSavePlan.decode(rank_plan.encode()) == rank_plan
    assert {chunk.path for rank_plan in plan.rank_plans for chunk in rank_plan.frozen} == {("model", "frozen")}
    sharded = [chunk for rank_plan in plan.rank_plans for chunk in rank_plan.chunks if chunk.path == ("model", "w")]
    assert sharded == [PayloadChunk(("model", "w"), (4, 3), "float32", box) for box in ROWS]


def test_replicas_are_compared_by_sums_where_all_ranks_have_them_on_a_device() -> None:
    everywhere, somewhere = {("model", "b"), ("model", "frozen")}, {("model", "b")}
    local_plans = [
        replace(local_plan(rank), on_device=frozenset(on)) for rank, on in enumerate((everywhere, somewhere))
    ]
    assert LocalSavePlan.decode(local_plans[0].encode()) == local_plans[0]
    plan = create_global_plan(local_plans)
    for rank, rank_plan in enumerate(plan.rank_plans):
        (summed,) = rank_plan.summed
        paths = {
            number: [local_plan(rank).arrays[at].path for at, _ in positions]
            for number, positions in rank_plan.replica_groups.items()
        }
        assert paths == {summed: [("model", "b")], 1 - summed: [("model", "frozen")]}
        assert plan.replica_groups[summed] == plan.replica_groups[1 - summed] == (0, 1)
        assert RankSavePlan.decode(rank_plan.encode()) == rank_plan


def test_ranks_that_hold_the_same_are_known_and_those_that_do_not_are_not() -> None:
    plan = create_global_plan([local_plan(0), local_plan(1)])
    assert list(plan.replica_groups) == [(0, 1)]
    for rank, rank_plan in enumerate(plan.rank_plans):
        held = [local_plan(rank).arrays[at].path for at, _ in rank_plan.replica_groups[0]]
        assert held == [("model", "b"), ("model", "frozen")], "no shard, no buffer, nothing empty"
    alone = [LocalSavePlan((LocalTensor(("w",), (4, 3), "float32", (box,)),), frozenset(), {}) for box in ROWS]
    assert list(create_global_plan(alone).replica_groups) == []


def shard(kind: str, shape: Shape, world: int, rank: int) -> tuple[Box, ...]:
    """Return the boxes that a rank has of an array, sharded in one of the ways."""
    if kind == "full":
        return (full_box(shape),)
    if kind in ("rows", "columns") and shape:
        return (chunk_box(shape, 0 if kind == "rows" else len(shape) - 1, world, rank),)
    if kind == "pairs":  # two ranks have the same
        return shard("flat", shape, -(-world // 2), rank // 2)
    if kind == "reversed":
        rank = world - 1 - rank
    total = prod(shape)
    numel = -(-total // world)
    return tuple(flat_to_boxes(shape, min(rank * numel, total), min((rank + 1) * numel, total)))


KINDS = ("full", "rows", "columns", "pairs", "flat", "reversed")
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), SHAPES, st.sampled_from(["float32", "int8"])), max_size=6),
    st.integers(1, 5),
    st.sets(st.integers(0, 5), max_size=2),
    st.sets(st.integers(0, 5), max_size=1),
)
def test_packed_plans_give_what_unpacked_ones_give(
    arrays: list[tuple[str, Shape, str]], world: int, buffers: set[int], frozen: set[int]
) -> None:
    def names(numbers: set[int]) -> frozenset[Path]:
        return frozenset(("m", at) for at in numbers if at < len(arrays))

    plans = [
        LocalSavePlan(
            tuple(
                LocalTensor(("m", at), shape, dtype, shard(kind, shape, world, rank))
                for at, (kind, shape, dtype) in enumerate(arrays)
            ),
            names({at for at in buffers if arrays[at : at + 1] and arrays[at][0] == "full"}),
            {("tied", 0): ("m", 0), ("m", 6): ("m", 0)},
            names(frozen - buffers),
        )
        for rank in range(world)
    ]
    expected = create_global_plan(plans)
    found = create_global_plan([LocalSavePlan.decode(plan.encode()) for plan in plans])
    assert found == expected
    for ours, theirs in zip(found.rank_plans, expected.rank_plans, strict=True):
        assert RankSavePlan.decode(ours.encode()) == RankSavePlan.decode(theirs.encode()) == theirs


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (Box((1, 0), (1, 1)), IncompleteError),
        (Box((1, 0), (2, 2)), UsageError),
        (Box((0, 2), (1, 2)), UsageError),
        (Box((1, 0), (-1, -2)), UsageError),
        (Box((0, 1), (1, 1)), IncompleteError),
    ],
)
def test_packed_boxes_that_do_not_fill_an_array_are_refused(second: Box, error: type[Exception]) -> None:
    arrays = [LocalTensor(("w",), (2, 2), "int8", (box,)) for box in (Box((0, 0), (1, 2)), second)]
    plans = [LocalSavePlan((array,), frozenset(), {}) for array in arrays]
    for given_ in (plans, [LocalSavePlan.decode(plan.encode()) for plan in plans]):
        with pytest.raises(error, match="w"):
            create_global_plan(given_)


def test_boxes_that_need_no_decision_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number grows with ranks times arrays: 4,096 ranks have millions."""
    unpacked: list[int] = []
    unpack = PackedRows.unpack

    def count(self: PackedRows, rows: list[int] | None = None) -> object:
        found = unpack(self, rows)
        unpacked.append(len(found))
        return found

    monkeypatch.setattr(PackedRows, "unpack", count)
    world, kinds = 16, ["rows", "flat", "reversed"] * 10
    messages = [
        LocalSavePlan(
            (
                *(
                    LocalTensor(("m", at), (40, 3), "int8", shard(k, (40, 3), world, rank))
                    for at, k in enumerate(kinds)
                ),
                LocalTensor(("step",), (), "int64", (full_box(()),)),
            ),
            frozenset(),
            {},
        ).encode()
        for rank in range(world)
    ]
    plan = create_global_plan([LocalSavePlan.decode(message) for message in messages])
    assert sum(unpacked) == world, "that of the replicated number"
    assert all(rank_plan.encode() for rank_plan in plan.rank_plans)
    assert sum(unpacked) == world
