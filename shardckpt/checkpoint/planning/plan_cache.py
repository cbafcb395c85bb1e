"""Cache the plan of the last committed save, so that a save like it sends no local plans and is not planned again.

A cache is replaced only once its rank knows that all ranks have committed the save. A rank can miss that, so each cache
carries the id of the save that its plan was made for: caches of different saves are never used together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardckpt.checkpoint.planning.rank_report import RankReport
from shardckpt.checkpoint.planning.save_plan import GlobalSavePlan, LocalSavePlan, RankSavePlan


@dataclass(frozen=True)
class RankPlanCache:
    """A rank's part of the last committed plan.

    Attributes:
        save: Id of the save that the plan was made for.
        local_plan: The arrays that this rank held then.
        rank_plan: The chunks that it wrote.
    """

    save: str
    local_plan: LocalSavePlan
    rank_plan: RankSavePlan


@dataclass(frozen=True)
class PlanCache:
    """The last committed plan, on rank 0.

    Attributes:
        save: Id of the save that the plan was made for.
        local_plans: The arrays that each rank held then.
        plan: Which rank wrote which chunks.
    """

    save: str
    local_plans: tuple[LocalSavePlan, ...]
    plan: GlobalSavePlan


def is_cached(reports: Sequence[RankReport], cache: PlanCache | None) -> bool:
    """Return True if every rank holds the arrays of the cached plan, and has its part of that plan.

    Args:
        reports: One for each rank.
        cache: The cached plan of rank 0.
    """
    return cache is not None and all(not report.local_plan and report.cached == cache.save for report in reports)


def collect_local_plans(reports: Sequence[RankReport], cache: PlanCache | None) -> tuple[LocalSavePlan, ...] | None:
    """Return every rank's local plan, as it was sent or as it is cached; None if one is neither.

    Args:
        reports: One for each rank.
        cache: The cached plan of rank 0.
    """
    local_plans = []
    for rank, report in enumerate(reports):
        if report.local_plan:
            local_plans.append(LocalSavePlan.decode(report.local_plan))
        elif cache is not None and report.cached == cache.save:
            local_plans.append(cache.local_plans[rank])
        else:
            return None
    return tuple(local_plans)
