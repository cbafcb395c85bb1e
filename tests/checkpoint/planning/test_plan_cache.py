"""A cached plan is used only by ranks that hold what it was made for, and that have their tasks of that very plan."""

from __future__ import annotations

from dataclasses import replace

from shardckpt.boxes import whole
from shardckpt.checkpoint.planning.plan_cache import PlanCache, collect_drafts, is_cached
from shardckpt.checkpoint.planning.rank_report import Report
from shardckpt.checkpoint.planning.save_plan import Draft, plan_of
from shardckpt.plan.layout.write_plan import LocalTensor


def draft(count: int) -> Draft:
    return Draft((LocalTensor(("w",), (count,), "float32", (whole((count,)),)),), frozenset(), {})


SENT = Report("", draft(5).encode(), "", {}, {})
CACHED = Report("save-1", b"", "", {}, {})
MISSED = Report("save-0", b"", "", {}, {})
DRAFTS = (draft(4), draft(4))
CACHE = PlanCache("save-1", DRAFTS, plan_of(DRAFTS))


def test_a_plan_is_used_again_where_every_rank_has_its_task_of_it() -> None:
    assert is_cached([CACHED, CACHED], CACHE)
    assert not is_cached([CACHED, SENT], CACHE), "one holds something else now"
    assert not is_cached([CACHED, MISSED], CACHE), "one has its task of an older plan"
    assert not is_cached([CACHED, CACHED], replace(CACHE, save="save-2"))
    assert not is_cached([CACHED, CACHED], None)


def test_drafts_are_those_that_were_sent_or_are_cached_of_the_same_save() -> None:
    assert collect_drafts([CACHED, SENT], CACHE) == (draft(4), draft(5))
    assert collect_drafts([SENT, SENT], None) == (draft(5), draft(5))
    assert collect_drafts([MISSED, SENT], CACHE) is None, "the first rank has another draft of that rank"
    assert collect_drafts([CACHED, SENT], None) is None
