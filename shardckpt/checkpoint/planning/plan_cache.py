"""Cache the last committed save plan, for later saves with the same arrays.

Such saves do not send local plans and are not planned again. A rank replaces its cache only when it knows that all
ranks have committed the save. A rank can miss that, so each cache contains its save's id: caches from different
saves are never used together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardckpt.checkpoint.planning.rank_report import RankReport
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, LocalSavePlan, RankSavePlan


@dataclass(frozen=True)
class RankPlanCache:
    """One rank's last committed plan."""

    save: str  # id of the save with this plan
    local_plan: LocalSavePlan  # arrays of this rank in that save
    rank_plan: RankSavePlan  # chunks that this rank wrote


@dataclass(frozen=True)
class PlanCache:
    """The last committed plan for all ranks, on rank 0."""

    save: str  # id of the save with this plan
    local_plans: tuple[LocalSavePlan, ...]  # arrays of each rank in that save, in rank order
    plan: GlobalSavePlan  # chunks that each rank wrote


def is_cached(reports: Sequence[RankReport], cache: PlanCache | None) -> bool:
    """Return True if every rank has the cached plan's arrays, and its own part cached."""
    return cache is not None and all(not report.local_plan and report.cached == cache.save for report in reports)


def collect_local_plans(reports: Sequence[RankReport], cache: PlanCache | None) -> tuple[LocalSavePlan, ...] | None:
    """Return all ranks' local plans, received or cached; None if one is neither."""
    local_plans = []
    for rank, report in enumerate(reports):
        if report.local_plan:
            local_plans.append(LocalSavePlan.decode(report.local_plan))
        elif cache is not None and report.cached == cache.save:
            local_plans.append(cache.local_plans[rank])
        else:
            return None
    return tuple(local_plans)
