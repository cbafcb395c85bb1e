"""The memory tier of a run: start its holder, capture steps into it, keep the newest ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import Coordinator, get_channels
from shardckpt.checkpoint.run.step_finder import StepFinder
from shardckpt.checkpoint.run.step_retention import StepRetention
from shardckpt.checkpoint.save.async_save import CAPTURES, start_async_save
from shardckpt.checkpoint.save.handle import SaveHandle
from shardckpt.checkpoint.save.save import SaveParams
from shardckpt.checkpoint.save.staging import LEAST_BUDGET_BYTES, default_budget, memory_size
from shardckpt.checkpoint.tiers.peer_memory import PeerMemory, find_run_id
from shardckpt.errors import RankError, ShardckptError, StorageError
from shardckpt.events import FallbackEvent, OnEvent, OperationEvent, deliver, emit
from shardckpt.format.native.commit import COMMIT
from shardckpt.format.native.run_directory import step_name
from shardckpt.plan.retention import Retention
from shardckpt.storage.holder import SCHEME
from shardckpt.storage.holder.holders import start_holder

_MOST_SKIPPED = 64
"""Maximum number of captures that are left out after a failure, before the next attempt."""


class MemoryTier:
    """Captures of a run in the memory of this node's holder.

    A failure of the memory never fails the training: it is one warning, and steps are not captured until an attempt
    succeeds; after each failure in a row twice as many captures are left out.

    Args:
        config: Settings.
        root: Path or URL of the run.
        group: Process group of the ranks; None for all ranks.
        on_event: Called with the events of captures; None without a callback.

    Attributes:
        every: Steps whose number is a multiple of this are captured.
        finder: Finder of the captures.
    """

    def __init__(
        self, config: PeerMemory, root: str, group: dist.ProcessGroup | None, on_event: OnEvent | None
    ) -> None:
        self._config, self._group, self._on_event = config, group, on_event
        self._run = find_run_id(root)
        self.every = config.every
        self.finder = StepFinder(f"{SCHEME}://{self._run}", group)
        rules = Retention.from_params("PeerMemory", keep_last=config.keep_last)
        self._retention = StepRetention(rules, self.finder, on_event)
        self._failures = self._skipped = 0
        self._pending: tuple[int, SaveHandle] | None = None

    def prepare(self, nodes: set[str]) -> bool:
        """Start the holder unless it is there; return whether a step can be captured. On rank 0.

        Args:
            nodes: Ids of the nodes of all ranks.
        """
        if self._skipped < min((1 << self._failures) - 1, _MOST_SKIPPED):
            self._skipped += 1
            return False
        self._skipped = 0
        try:
            if len(nodes) > 1:
                raise StorageError("PeerMemory captures the ranks of one node", found=f"ranks on {len(nodes)} nodes")
            start_holder(self._run, self._config.limit(memory_size()), last=COMMIT, idle_s=self._config.idle_s)
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
            Exception: The state cannot be saved; an error of the memory is a warning.
        """
        path = self.finder.path(step_name(number))
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
            handle = start_async_save(CAPTURES, state, path, given, **options)
        except Exception as error:
            coordinator = get_channels(self._group).main
            if coordinator.has_lost_rank or not _is_fault_of_memory(coordinator, error):
                raise
            self._withdraw(number, error)
        else:
            self._pending = number, handle

    def settle(self) -> None:
        """Wait for the last capture. Collective.

        Raises:
            Exception: The state could not be saved; an error of the memory is a warning.
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

    def _withdraw(self, number: int, error: Exception) -> None:
        """Emit that a step is not in memory; on rank 0 warn too."""
        self._emit_fallback(number, str(error))
        if get_channels(self._group).main.rank == 0:
            self._note_failure(error)

    def _emit_fallback(self, number: int, reason: str) -> None:
        rank, path = get_channels(self._group).main.rank, self.finder.path(step_name(number))
        emit(FallbackEvent(path, step=number, rank=rank, warnings=(reason,)), self._on_event)

    def _note_failure(self, error: Exception) -> None:
        """Count a failure; warn about the first one in a row. On rank 0."""
        self._failures += 1
        if self._failures == 1:
            warnings.warn(f"steps are not captured in memory, training goes on: {error}", stacklevel=6)


def _is_fault_of_memory(coordinator: Coordinator, error: Exception) -> bool:
    """Return True if a capture failed on all ranks since the memory of one of them failed. Collective."""
    kind = b"memory" if isinstance(error, StorageError) else b"" if isinstance(error, RankError) else b"state"

    def decide(messages: list[bytes]) -> list[bytes]:
        return [b"" if b"state" in messages else b"memory"] * len(messages)

    return bool(coordinator.coordinate("finding out why a capture failed", kind, decide))
