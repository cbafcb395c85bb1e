"""What ranks keep of the last committed save, so that a save like it sends no drafts and is not planned again.

A cache is replaced only once its rank knows that all ranks have committed the save. A rank can miss that, so each cache
carries the id of the save that its plan was made for: caches of different saves are never used together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardckpt.checkpoint.planning.rank_report import Report
from shardckpt.checkpoint.planning.save_plan import Draft, Plan, Task


@dataclass(frozen=True)
class TaskCache:
    """What every rank keeps.

    Attributes:
        save: Id of the save that the plan was made for.
        draft: What this rank held then.
        task: What it had to write.
    """

    save: str
    draft: Draft
    task: Task


@dataclass(frozen=True)
class PlanCache:
    """What the first rank keeps.

    Attributes:
        save: Id of the save that the plan was made for.
        drafts: What each rank held then.
        plan: Who wrote what.
    """

    save: str
    drafts: tuple[Draft, ...]
    plan: Plan


def is_cached(reports: Sequence[Report], cache: PlanCache | None) -> bool:
    """Return whether every rank holds what it held for the cached plan, and has its task of that plan.

    Args:
        reports: One for each rank.
        cache: What the first rank keeps.
    """
    return cache is not None and all(not report.draft and report.cached == cache.save for report in reports)


def collect_drafts(reports: Sequence[Report], cache: PlanCache | None) -> tuple[Draft, ...] | None:
    """Return every rank's draft, as it was sent or as it is cached; None if one is neither.

    Args:
        reports: One for each rank.
        cache: What the first rank keeps.
    """
    drafts = []
    for rank, report in enumerate(reports):
        if report.draft:
            drafts.append(Draft.decode(report.draft))
        elif cache is not None and report.cached == cache.save:
            drafts.append(cache.drafts[rank])
        else:
            return None
    return tuple(drafts)
