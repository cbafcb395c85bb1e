"""Commit a plan, or discard it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardckpt.events.progress import OnProgress
from shardckpt.offline.copy import Copied
from shardckpt.offline.results.comparison import Comparison
from shardckpt.offline.results.contents import Report, Verification
from shardckpt.offline.results.tensor_stats import History, Statistics
from shardckpt.offline.tasks.run_plan import PathText, open_plan

__all__ = ["commit_plan", "discard_plan"]

CommittedResult = Report | Copied | Verification | Statistics | Comparison | History


def commit_plan(
    plan: PathText,
    *,
    on_progress: OnProgress | None = None,
    on_result: Callable[[CommittedResult], object] | None = None,
) -> CommittedResult:
    """Publish the result of a plan once all of its tasks have ended.

    Args:
        plan: Path or URL of the plan.
        on_progress: As for the planned function.
        on_result: Called with the result. If it fails, the results of a plan without output files stay: commit again.

    Returns:
        Result of the planned function.

    Raises:
        UsageError: Tasks have not ended (the message has their numbers), or the source has changed. Nothing is written.
        TargetExistsError: Another process wrote the target meanwhile.
        FormatError: The plan is damaged.
        StorageError: The storage failed, or the plan was committed, or another process is committing or discarding it.
    """
    stored, work, results = open_plan(plan, to_end=True)
    with results.end_alone():
        found = results.read_all(partial(work.is_done, stored))
        result: CommittedResult = work.commit(stored, found, on_progress)
        if on_result is not None and not stored.staging:
            on_result(result)
        results.remove_committed()
    if on_result is not None and stored.staging:
        on_result(result)
    return result


def discard_plan(plan: PathText) -> None:
    """Remove the files that the tasks of a plan have written; what was in the target before stays.

    On a store without rename, files in the target stay too once a commit has published, or tried to. A task that still
    runs removes its file when it ends.

    Args:
        plan: Path or URL of the plan.

    Raises:
        FormatError: The plan is damaged.
        StorageError: The storage failed, or the plan was committed, or another process is committing or discarding it.
    """
    stored, work, results = open_plan(plan, to_end=True)
    with results.end_alone(or_discarded=True):
        work.discard(stored, has_commit=results.mark_discard())
        results.remove()
