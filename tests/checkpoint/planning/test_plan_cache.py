"""A cached plan is used only by ranks that hold what it was made for, and that have their tasks of that very plan."""

from __future__ import annotations

from dataclasses import replace

from shardckpt.boxes import full_box
from shardckpt.checkpoint.planning.cached_save import PlanCache, collect_local_plans, is_cached
from shardckpt.checkpoint.planning.rank_report import RankReport
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan, create_global_plan
from shardckpt.plan.layout.write_plan import LocalTensor


def local_plan(count: int) -> LocalSavePlan:
    return LocalSavePlan((LocalTensor(("w",), (count,), "float32", (full_box((count,)),)),), frozenset(), {})


SENT = RankReport("", local_plan(5).encode(), "", {}, {})
CACHED = RankReport("save-1", b"", "", {}, {})
MISSED = RankReport("save-0", b"", "", {}, {})
DRAFTS = (local_plan(4), local_plan(4))
CACHE = PlanCache("save-1", DRAFTS, create_global_plan(DRAFTS))


def test_a_plan_is_used_again_where_every_rank_has_its_task_of_it() -> None:
    assert is_cached([CACHED, CACHED], CACHE)
    assert not is_cached([CACHED, SENT], CACHE), "one holds something else now"
    assert not is_cached([CACHED, MISSED], CACHE), "one has its task of an older plan"
    assert not is_cached([CACHED, CACHED], replace(CACHE, save="save-2"))
    assert not is_cached([CACHED, CACHED], None)


def test_drafts_are_those_that_were_sent_or_are_cached_of_the_same_save() -> None:
    assert collect_local_plans([CACHED, SENT], CACHE) == (local_plan(4), local_plan(5))
    assert collect_local_plans([SENT, SENT], None) == (local_plan(5), local_plan(5))
    assert collect_local_plans([MISSED, SENT], CACHE) is None, "the first rank has another draft of that rank"
    assert collect_local_plans([CACHED, SENT], None) is None
