"""Drafts and tasks travel as bytes; only what several ranks hold is looked at by several."""

from __future__ import annotations

from shardckpt.boxes import Box, full_box
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan, RankSavePlan, create_global_plan
from shardckpt.format.native.payload import PayloadChunk
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


def test_ranks_that_hold_the_same_are_known_and_those_that_do_not_are_not() -> None:
    plan = create_global_plan([local_plan(0), local_plan(1)])
    assert list(plan.replica_groups) == [(0, 1)]
    for rank, rank_plan in enumerate(plan.rank_plans):
        held = [local_plan(rank).arrays[at].path for at, _ in rank_plan.replica_groups[0]]
        assert held == [("model", "b"), ("model", "frozen")], "no shard, no buffer, nothing empty"
    alone = [LocalSavePlan((LocalTensor(("w",), (4, 3), "float32", (box,)),), frozenset(), {}) for box in ROWS]
    assert list(create_global_plan(alone).replica_groups) == []
