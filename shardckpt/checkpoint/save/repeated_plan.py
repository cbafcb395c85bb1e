"""`RepeatedPlan`: plan of a state that fits an earlier save, on which ranks agree within another message of theirs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shardckpt.checkpoint.planning.cached_save import CachedSave, TracedState, digest_traced_values
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan
from shardckpt.checkpoint.save.session import PlanResponse, SaveOptions, SavePlanner, Saver
from shardckpt.checkpoint.stateful.state_trace import StateTrace
from shardckpt.format.native.payload import FileLayout


class RepeatedPlan:
    """Plan of a state that fits a cached save, which holds if the states of all ranks fit it.

    Args:
        saver: Saver of the group.
        path: Target path or URL.
        trace: Trace of the state.
        cached_save: The cached save.

    Attributes:
        state: The state, valid until it changes.
        report: Text that is equal on all ranks if all states fit this save, and have equal values and targets.
    """

    def __init__(self, saver: Saver, path: str, trace: StateTrace, cached_save: CachedSave) -> None:
        self._saver, self._trace, self._cached_save = saver, trace, cached_save
        self.state = TracedState(cached_save, trace)
        self.report = json.dumps([cached_save.rank.save, path, digest_traced_values(trace)])
        self._begun: SavePlanner | None = None

    @property
    def files(self) -> tuple[FileLayout, ...]:
        """Files that this rank writes, without headers, if the save has no base."""
        return self.state.rank_plan.arrange_files(None)

    def begin(self, options: SaveOptions) -> tuple[str, str]:
        """Begin the publication of a save without a base. On rank 0, if all ranks have equal reports.

        Args:
            options: Options of the save.

        Returns:
            Id of the save, and the location to write to.

        Raises:
            ShardckptError: The target cannot be written, or a value cannot be saved.
        """
        self._begun = SavePlanner(self._saver, options)
        response = self._begun.begin_again(self._trace, self._cached_save)[0]
        return response.save, response.place

    def accept(self, answer: tuple[str, str], options: SaveOptions) -> SavePlanner:
        """Return the planner of the save on which all ranks agree.

        Args:
            answer: Result of `begin` on rank 0.
            options: Options of the save.
        """
        planner = _AgreedPlanner(self._saver, options, self.state, self._cached_save, PlanResponse(*answer, None))
        if self._begun is not None:
            planner.publication, planner.begun = self._begun.publication, self._begun.begun
        return planner

    def rollback(self) -> None:
        """Remove what `begin` has written."""
        if self._begun is not None and self._begun.publication is not None:
            self._begun.publication.rollback()

    def leave(self) -> None:
        """Mark ranks as lost: all agree on the save, and this one does not take part in it."""
        self._saver.channels.main.leave()


class _AgreedPlanner(SavePlanner):
    """Planner of a save on which all ranks agree.

    Args:
        saver: Saver of the group.
        options: Options of the save.
        state: The state of this rank.
        cached_save: Cached save that it fits.
        response: Rank 0's answer.
    """

    def __init__(
        self, saver: Saver, options: SaveOptions, state: TracedState, cached_save: CachedSave, response: PlanResponse
    ) -> None:
        super().__init__(saver, options)
        self._state, self._response, self._local_plan = state, response, cached_save.rank.local_plan
        self.cached_save = cached_save

    def plan(
        self,
        state: Any,  # noqa: ARG002  (traced before)
        refusal: Exception | None,
    ) -> tuple[TracedState, LocalSavePlan, PlanResponse]:
        """Return the plan."""
        if refusal is not None:
            raise refusal
        return self._state, self._local_plan, self._response


def have_equal_reports(reports: Sequence[str | None]) -> bool:
    """Return True if the states of all ranks fit one save, and have equal values and targets.

    Args:
        reports: Reports of all ranks; None for a rank that has no plan.
    """
    return None not in reports and len(set(reports)) == 1
