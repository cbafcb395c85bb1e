"""A cached plan is used only by ranks that hold what it was made for, and that have their tasks of that very plan."""

from __future__ import annotations

from dataclasses import replace

from shardckpt.boxes import full_box
from shardckpt.checkpoint.planning.cached_save import CachedSave, collect_local_plans, find_cached
from shardckpt.checkpoint.planning.rank_report import RankReport
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan, create_global_plan
from shardckpt.plan.layout.write_plan import LocalTensor


def local_plan(count: int) -> LocalSavePlan:
    return LocalSavePlan((LocalTensor(("w",), (count,), "float32", (full_box((count,)),)),), frozenset(), {})


def cached_save(save: str, count: int) -> CachedSave:
    plan = create_global_plan((local_plan(count), local_plan(count)))
    return CachedSave(save, local_plan(count), local_plan(count), plan.rank_plans[0], plan)


SENT = RankReport("", local_plan(5).encode(), "", {}, {})
CACHED = RankReport("save-1", b"", "", {}, {})
MISSED = RankReport("save-0", b"", "", {}, {})
OLDER = RankReport("save-9", b"", "", {}, {})
SAVES = (cached_save("save-1", 4), cached_save("save-9", 3))


def test_a_plan_is_used_again_where_every_rank_has_its_task_of_it() -> None:
    assert find_cached([CACHED, CACHED], SAVES) is SAVES[0]
    assert find_cached([OLDER, OLDER], SAVES) is SAVES[1]
    assert not find_cached([CACHED, SENT], SAVES), "one holds something else now"
    assert not find_cached([CACHED, MISSED], SAVES), "one has its task of an older plan"
    assert not find_cached([CACHED, OLDER], SAVES), "one has its task of another plan"
    assert not find_cached([CACHED, CACHED], [replace(SAVES[0], save="save-2")])
    assert not find_cached([CACHED, CACHED], [])


def test_drafts_are_those_that_were_sent_or_are_cached_of_the_same_save() -> None:
    assert collect_local_plans([CACHED, SENT], SAVES) == (local_plan(4), local_plan(5))
    assert collect_local_plans([CACHED, OLDER], SAVES) == (local_plan(4), local_plan(3))
    assert collect_local_plans([SENT, SENT], []) == (local_plan(5), local_plan(5))
    assert collect_local_plans([MISSED, SENT], SAVES) is None, "the first rank has another draft of that rank"
    assert collect_local_plans([CACHED, SENT], []) is None
