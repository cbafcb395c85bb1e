"""`CaptureTier`: base class of the tiers into which a run captures steps, beside its root."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import Coordinator, get_channels
from shardckpt.checkpoint.run.step_finder import StepFinder
from shardckpt.checkpoint.run.step_retention import StepRetention
from shardckpt.checkpoint.save.async_save import SaveLane, start_async_save
from shardckpt.checkpoint.save.handle import SaveHandle
from shardckpt.checkpoint.save.save import SaveParams
from shardckpt.checkpoint.save.staging import LEAST_BUDGET_BYTES, default_budget
from shardckpt.errors import RankError, ShardckptError, StorageError
from shardckpt.events import FallbackEvent, OnEvent, OperationEvent, deliver, emit
from shardckpt.format.native.run_directory import step_name
from shardckpt.plan.retention import Retention

_MOST_SKIPPED = 64
"""Maximum number of captures that are left out after a failure, before the next attempt."""


class TierPlace(NamedTuple):
    """A tier, as restores and claims see it.

    Attributes:
        name: Name of the tier: `memory`, `local`.
        finder: Finder of its steps.
        is_found_again: Returns True if a new process would find its steps. On rank 0.
    """

    name: str
    finder: StepFinder
    is_found_again: Callable[[], bool]


class CaptureTier(ABC):
    """Captures of a run in one tier.

    A failure of the tier never fails the training: it is one warning, and steps are not captured until an attempt
    succeeds; after each failure in a row twice as many captures are left out.

    Args:
        place: The tier as restores and claims see it.
        shown: Place of the captures in messages.
        lane: Saves in the background, of this kind of tier alone.
        every: Steps whose number is a multiple of this are captured.
        rules: Rules that select the captures to keep.
        group: Process group of the ranks; None for all ranks.
        on_event: Called with the events of captures; None without a callback.

    Attributes:
        place: The tier as restores and claims see it.
        every: Steps whose number is a multiple of this are captured.
    """

    def __init__(
        self,
        place: TierPlace,
        shown: str,
        lane: SaveLane,
        every: int,
        rules: Retention,
        group: dist.ProcessGroup | None,
        on_event: OnEvent | None,
    ) -> None:
        self.place, self.every = place, every
        self._shown, self._lane, self._group, self._on_event = shown, lane, group, on_event
        self._retention = StepRetention(rules, place.finder, on_event)
        self._failures = self._skipped = 0
        self._pending: tuple[int, SaveHandle] | None = None

    @abstractmethod
    def open(self, nodes: set[str]) -> None:
        """Make the tier ready for a capture, unless it is. On rank 0.

        Args:
            nodes: Ids of the nodes of all ranks.

        Raises:
            ShardckptError: Nothing can be captured.
        """

    def takes(self, number: int) -> bool:
        """Return True if a step belongs into this tier."""
        return not number % self.every

    def prepare(self, nodes: set[str]) -> bool:
        """Make the tier ready; return whether a step can be captured. On rank 0.

        Args:
            nodes: Ids of the nodes of all ranks.
        """
        if self._skipped < min((1 << self._failures) - 1, _MOST_SKIPPED):
            self._skipped += 1
            return False
        self._skipped = 0
        try:
            self.open(nodes)
        except ShardckptError as error:
            self._note_failure(error)
            return False
        return True

    def capture(self, number: int, state: Any, notes: Mapping[str, str], options: Mapping[str, Any]) -> None:
        """Capture a step in the background. Collective.

        Args:
            number: Number of the step.
            state: As for `shardckpt.save`.
            notes: Custom metadata.
            options: Options of `shardckpt.async_save` for the copy.

        Raises:
            Exception: The state cannot be saved; an error of the tier is a warning.
        """
        is_first = get_channels(self._group).main.rank == 0

        def on_event(event: OperationEvent) -> None:
            deliver(event, self._on_event)
            if event.error is None and is_first:
                self._retention.apply(number)

        given: SaveParams = {
            "overwrite": True,
            "custom_metadata": notes,
            "process_group": self._group,
            "on_event": on_event,
        }
        budget = default_budget()
        if budget is not None:  # pinned memory, of which a save in the root may use all of its own budget
            options = {"max_staging_bytes": max(budget // 4, LEAST_BUDGET_BYTES), **options}
        try:
            handle = start_async_save(self._lane, state, self._path(number), given, **options)
        except Exception as error:
            coordinator = get_channels(self._group).main
            if coordinator.has_lost_rank or not _is_fault_of_tier(coordinator, error):
                raise
            self._withdraw(number, error)
        else:
            self._pending = number, handle

    def settle(self) -> None:
        """Wait for the last capture. Collective.

        Raises:
            Exception: The state could not be saved; an error of the tier is a warning.
        """
        if self._pending is None:
            return
        number, handle = self._pending
        try:
            handle.result()  # after Ctrl-C the capture is still pending
        except Exception as error:
            self._pending = None
            if not isinstance(error, (StorageError, RankError)) or get_channels(self._group).has_lost_rank:
                raise
            self._withdraw(number, error)
        else:
            self._pending, self._failures = None, 0

    def _path(self, number: int) -> str:
        return self.place.finder.path(step_name(number))

    def _withdraw(self, number: int, error: Exception) -> None:
        """Emit that a step is not in this tier; on rank 0 warn too."""
        rank = get_channels(self._group).main.rank
        emit(FallbackEvent(self._path(number), step=number, rank=rank, warnings=(str(error),)), self._on_event)
        if rank == 0:
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Count a failure; warn about the first one in a row. On rank 0."""
        self._failures += 1
        if self._failures == 1:
            warnings.warn(f"steps are not captured in {self._shown}, training goes on: {error}", stacklevel=6)


def _is_fault_of_tier(coordinator: Coordinator, error: Exception) -> bool:
    """Return True if a capture failed on all ranks since the tier of one of them failed. Collective."""
    kind = b"tier" if isinstance(error, StorageError) else b"" if isinstance(error, RankError) else b"state"

    def decide(messages: list[bytes]) -> list[bytes]:
        return [b"" if b"state" in messages else b"tier"] * len(messages)

    return bool(coordinator.coordinate("finding out why a capture failed", kind, decide))
