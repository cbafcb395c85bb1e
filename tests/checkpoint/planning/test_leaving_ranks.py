"""Plans of saves that the last ranks leave: who writes what, what is sent, and what needs them after all."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import PerRank
from shardckpt.boxes import Box
from shardckpt.checkpoint.planning import leaving_ranks
from shardckpt.checkpoint.planning.leaving_ranks import collect_own_tensors, plan_for_staying, take_tensors
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, LocalSavePlan, create_local_plan
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.plan.layout.write_plan import LocalTensor


def plan_rows(*rows: tuple[int, int]) -> LocalSavePlan:
    """Return the plan of a rank with ranges of 12 rows, as rank 0 receives it."""
    boxes = tuple(Box((start, 0), (stop - start, 2)) for start, stop in rows)
    plan = LocalSavePlan((LocalTensor(("w",), (12, 2), "float32", boxes),), frozenset(), {})
    return LocalSavePlan.decode(plan.encode())


def list_written(plan: GlobalSavePlan) -> list[tuple[int, int]]:
    chunks = [chunk for each in plan.rank_plans for chunk in each.chunks]
    return sorted((chunk.box.offset[0], chunk.box.offset[0] + chunk.box.size[0]) for chunk in chunks)


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_ranks_that_stay_write_everything_if_they_have_a_replica(staying, leaving, is_packed):
    cuts = [12 * at // staying for at in range(staying + 1)]
    plans = [plan_rows(each) for each in itertools.pairwise(cuts)]
    plans += [plan_rows((0, 12))] * leaving
    if not is_packed:
        plans = [replace(each, arrays=tuple(each.arrays)) for each in plans]
    plan = plan_for_staying(plans, staying)
    assert isinstance(plan, GlobalSavePlan) and len(plan.rank_plans) == staying
    assert list_written(plan) == [each for each in itertools.pairwise(cuts) if each[0] < each[1]]
    assert not plan.replica_groups or max(map(max, plan.replica_groups)) < staying


@given(st.integers(0, 11), st.booleans())
def test_rows_that_only_a_leaving_rank_has_are_named(missing, is_packed):
    plans = [plan_rows((0, missing), (missing + 1, 12)), plan_rows((0, 12))]
    if not is_packed:
        plans = [replace(each, arrays=tuple(each.arrays)) for each in plans]
    found = plan_for_staying(plans, 1)
    assert isinstance(found, str) and found.startswith("w") and "no rank holds these elements" in found


def test_a_tensor_without_elements_that_only_a_leaving_rank_has_is_named():
    empty = LocalTensor(("e",), (0, 2), "float32", (Box((0, 0), (0, 2)),))
    plans = [LocalSavePlan((), frozenset(), {}), LocalSavePlan((empty,), frozenset(), {})]
    assert plan_for_staying(plans, 1) == "e: no other rank has it"


def flatten(rank: int, held: object) -> FlattenedState:
    return flatten_state({"w": torch.ones(3), "own": PerRank(held)}, rank, 2)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([True, False]),
    ],
    ids=["transposed", "scalar", "empty", "conjugate", "bool"],
)
def test_rank_0_writes_what_a_leaving_rank_alone_keeps(value):
    states = [flatten(rank, {"value": value, "text": "x"}) for rank in range(2)]
    plans = [create_local_plan(state) for state in states]
    sent = collect_own_tensors(states[1], 1)
    assert [*sent] == [("own", 1, "value")], "values that are equal on all ranks are not sent"
    taken = take_tensors(states[0], plans, [{}, sent])
    plan = plan_for_staying(taken, 1)
    assert isinstance(plan, GlobalSavePlan)
    paths = {chunk.path for chunk in plan.rank_plans[0].chunks}
    assert paths == {("w",), ("own", 0, "value"), ("own", 1, "value")}
    (shard,) = states[0].arrays["own", 1, "value"].shards
    assert torch.equal(shard.tensor, value) and shard.tensor.dtype == value.dtype


def test_large_tensors_are_not_sent(monkeypatch):
    state = flatten(1, {"large": torch.ones(100), "small": torch.ones(2)})
    small, large = ("own", 1, "small"), ("own", 1, "large")
    monkeypatch.setattr(leaving_ranks, "MAX_SENT_BYTES", 407)
    assert [*collect_own_tensors(state, 1)] == [small]
    monkeypatch.setattr(leaving_ranks, "MAX_SENT_BYTES", 408)
    assert [*collect_own_tensors(state, 1)] == [small, large]
    monkeypatch.setattr(leaving_ranks, "MAX_TAKEN_BYTES", 800)
    assert [*collect_own_tensors(state, 2)] == [small], "many ranks share what one rank takes"
