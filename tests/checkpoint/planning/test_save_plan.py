"""Drafts and tasks travel as bytes; only what several ranks hold is looked at by several."""

from __future__ import annotations

from shardckpt.boxes import Box, whole
from shardckpt.checkpoint.planning.save_plan import Draft, Task, plan_of
from shardckpt.format.native.payload import PayloadChunk
from shardckpt.plan.layout.write_plan import LocalTensor

ROWS = (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)))


def draft(rank: int) -> Draft:
    arrays = (
        LocalTensor(("model", "w"), (4, 3), "float32", (ROWS[rank],)),
        LocalTensor(("model", "b"), (3,), "bfloat16", (whole((3,)),)),
        LocalTensor(("model", "seen"), (), "int64", (whole(()),)),
        LocalTensor(("model", "frozen"), (2,), "float32", (whole((2,)),)),
        LocalTensor(("none", 0), (0, 2), "float32", (whole((0, 2)),) if rank else ()),
    )
    return Draft(
        arrays, frozenset({("model", "seen")}), {("tied", 1): ("model", "w")}, frozenset({("model", "frozen")})
    )


def test_a_draft_comes_out_as_it_went_in() -> None:
    for rank in (0, 1):
        assert Draft.decode(draft(rank).encode()) == draft(rank)
    assert draft(0).encode() != draft(1).encode()
    assert Draft.decode(Draft((), frozenset(), {}).encode()) == Draft((), frozenset(), {})


def test_tasks_of_a_plan_come_out_as_they_went_in() -> None:
    plan = plan_of([draft(0), draft(1)])
    for task in plan.tasks:
        assert Task.decode(task.encode()) == task
    assert {chunk.path for task in plan.tasks for chunk in task.frozen} == {("model", "frozen")}
    sharded = [chunk for task in plan.tasks for chunk in task.chunks if chunk.path == ("model", "w")]
    assert sharded == [PayloadChunk(("model", "w"), (4, 3), "float32", box) for box in ROWS]


def test_ranks_that_hold_the_same_are_known_and_those_that_do_not_are_not() -> None:
    plan = plan_of([draft(0), draft(1)])
    assert list(plan.classes) == [(0, 1)]
    for rank, task in enumerate(plan.tasks):
        held = [draft(rank).arrays[at].path for at, _ in task.classes[0]]
        assert held == [("model", "b"), ("model", "frozen")], "no shard, no buffer, nothing empty"
    alone = [Draft((LocalTensor(("w",), (4, 3), "float32", (box,)),), frozenset(), {}) for box in ROWS]
    assert list(plan_of(alone).classes) == []
