"""`CaptureTier`: base class of the tiers into which a run captures steps, beside its root."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import Coordinator, get_channels, has_lost_rank
from shardckpt.checkpoint.peers.node_files import Node
from shardckpt.checkpoint.peers.node_retention import NodeRetention
from shardckpt.checkpoint.peers.node_steps import give_marks
from shardckpt.checkpoint.run.step_retention import StepRetention
from shardckpt.checkpoint.save.async_save import SaveLane, start_async_save
from shardckpt.checkpoint.save.handle import StepTask
from shardckpt.checkpoint.save.save import RunNotes, SaveParams
from shardckpt.checkpoint.save.staging import LEAST_BUDGET_BYTES, default_budget
from shardckpt.checkpoint.tiers.node_opening import NodeOpening, NodeShare
from shardckpt.checkpoint.tiers.part_finder import PartFinder
from shardckpt.errors import RankError, ShardckptError, StorageError, UsageError, describe
from shardckpt.events import BackpressureEvent, FallbackEvent, OnEvent, OperationEvent, deliver, emit
from shardckpt.events.warn_user import warn_user
from shardckpt.format.native.run_directory import step_name
from shardckpt.plan.retention import Retention
from shardckpt.storage.holder.holder_connection import STALL_S, HolderBusyError
from shardckpt.storage.store import Store

_MOST_SKIPPED = 64  # maximum number of captures that are left out after a failure, before the next attempt


class TierPlace(NamedTuple):
    """A tier, as restores and claims see it."""

    name: str  # `memory`, `local`
    finder: PartFinder
    # Returns True if a new process on this node would find the steps.
    is_found_again: Callable[[], bool]
    find_node: Callable[[], Node]  # copies on equal nodes are one copy
    # Returns the store of this node's steps, also during a restore, which sees all nodes. Raises ShardckptError.
    open_own: Callable[[], Store]


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
        opening: Opening of the tier on all nodes.
        promoted: Steps that this node has copied to the tier, if each node has a part of them.
        is_spread: Whether the ranks were on several nodes at the last capture: each node has a part of it.
        pending: The last capture; None once it was settled.
        list_needed: Returns the numbers of steps that stay whatever the rules. On the ranks that act for nodes.
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
        self.list_needed: Callable[[], Collection[int]] = tuple
        self._begun: int | None = None
        self._retention = StepRetention(rules, place.finder, on_event, lambda: _list_kept(self))
        self._parts = NodeRetention(rules, place.open_own, place.finder.damaged, place.finder.removed)
        self.promoted = self._parts.promoted
        self._attempts = _CaptureAttempts()
        self.is_spread = False
        self.opening = NodeOpening(place.finder.root, self.open_node, self.refuse, group)
        self.pending: StepTask | None = None
        self._left: StepTask | None = None

    @abstractmethod
    def open_node(self) -> None:
        """Make the tier ready for a capture on the node of this rank, unless it is.

        Raises:
            ShardckptError: Nothing can be captured.
        """

    def open(self, nodes: set[str]) -> None:  # noqa: ARG002  (a tier may refuse several)
        """Make the tier ready on rank 0's node, unless it is. On rank 0.

        Args:
            nodes: Ids of the nodes of all ranks.

        Raises:
            ShardckptError: Nothing can be captured.
        """
        self.open_node()

    def open_nodes(self, number: int, share: NodeShare, *, is_open: bool) -> bool:
        """Make the tier ready on all nodes, as `NodeOpening.open_nodes`. Collective."""
        self.is_spread = share.nodes > 1
        return self.opening.open_nodes(number, share, is_open=is_open)

    def finish(self, coordinator: Coordinator, number: int, share: NodeShare) -> None:
        """Complete a capture that rank 0 has committed, on several nodes; remove older ones. Collective.

        Args:
            coordinator: Coordinator of the thread of the capture.
            number: Number of the step.
            share: Part of this rank.

        Raises:
            StorageError: The capture is not complete; RankError on other ranks.
        """
        give_marks(coordinator, self.place.open_own(), step_name(number), is_first=share.is_first)
        self.replicate(coordinator, number)
        if share.is_first:
            self.promoted.count_all()
            self.apply_rules(number, is_idle=True)

    def replicate(self, coordinator: Coordinator, number: int) -> None:  # noqa: B027  (most tiers have no copies)
        """Copy a capture to other nodes, if the tier does. Collective."""

    def list_copied(self) -> Collection[str]:
        """Return the folders of captures that stay since newer ones have fewer copies."""
        return ()

    def takes(self, number: int) -> bool:
        """Return True if a step belongs into this tier."""
        return not number % self.every

    def prepare(self, number: int, nodes: set[str], other: str = "") -> bool:
        """Make the tier ready; return whether a step can be captured. On rank 0.

        Args:
            number: Number of the step.
            nodes: Ids of the nodes of all ranks.
            other: Ranks of one node that have different places, as text; empty without such ranks.
        """
        if self._attempts.is_left_out():
            return False
        try:
            if other:
                raise UsageError("the ranks of a node must have one folder for steps", found=other)
            self.open(nodes)
        except ShardckptError as error:
            self.refuse(number, error)
            return False
        return True

    def refuse(self, number: int, error: Exception) -> None:
        """Emit that a step is not captured, and warn. On rank 0."""
        self._emit_fallback(number, error)
        self.note_failure(error)

    def capture(
        self,
        number: int,
        state: Any,
        notes: RunNotes,
        options: Mapping[str, Any],
        share: NodeShare,
        on_committed: Callable[[int], object],
    ) -> None:
        """Capture a step in the background. Collective.

        Args:
            number: Number of the step.
            state: As for `shardckpt.save`.
            notes: Custom metadata.
            options: Options of `shardckpt.async_save` for the copy.
            share: Part of this rank.
            on_committed: Called with the number on each rank that acts for its node, once the capture is complete.

        Raises:
            Exception: The state cannot be saved; an error of the tier is a warning.
        """
        has_retention = get_channels(self._group).main.rank == 0 and share.nodes == 1

        def finish(coordinator: Coordinator) -> None:
            if share.is_first and notes.require_replaceable is not None:
                notes.require_replaceable()
            self.finish(coordinator, number, share)
            if share.is_first:
                on_committed(number)

        if share.nodes > 1:
            notes.is_shared, notes.after_commit = False, finish

        def on_event(event: OperationEvent) -> None:
            deliver(event, self._on_event)
            if event.error is None and has_retention:
                on_committed(number)
                self.apply_rules(number)

        given: SaveParams = {
            "overwrite": True,
            "custom_metadata": notes,
            "process_group": self._group,
            "on_event": on_event,
        }
        self._begun = number
        try:
            handle = start_async_save(self._lane, state, self.target(number), given, **_limit_staging(options))
        except Exception as error:
            self._begun = None
            if has_lost_rank(self._group) or not _is_fault_of_tier(get_channels(self._group).main, error):
                raise
            self._withdraw(number, error)
        else:
            self.pending, self._begun = StepTask(number, handle), None

    def is_over(self, number: int) -> bool:
        """Return True if the capture of a step has ended on this rank."""
        return self.pending is None or self.pending.number != number or self.pending.handle.done()

    def settle_before_next(self, *, can_be_left: bool = False) -> None:
        """Wait for the last capture, since the next one begins; an event records a wait.

        Args:
            can_be_left: Whether this step may be left out. Then no save waits longer than `STALL_S` seconds for one
                capture, which may be in a holder that hangs.

        Raises:
            Exception: As for `settle`.
        """
        if self.pending is None:
            return
        pending, start, has_waited = self.pending, time.monotonic(), not self.pending.handle.done()
        if not can_be_left or pending.is_over_within(0.0 if pending is self._left else STALL_S):
            self.settle()
        self._left = pending
        if has_waited:
            rank, seconds = get_channels(self._group).main.rank, time.monotonic() - start
            emit(BackpressureEvent(self.path(pending.number), seconds, pending.number, rank), self._on_event)

    def settle(self) -> None:
        """Wait for the last capture. Collective.

        Raises:
            Exception: The state could not be saved; an error of the tier is a warning.
        """
        if self.pending is None:
            return
        number, handle = self.pending
        try:
            handle.result()  # after Ctrl-C the capture is still pending
        except Exception as error:
            self.pending = None
            if not isinstance(error, (StorageError, RankError)) or has_lost_rank(self._group):
                raise
            self._withdraw(number, error)
        else:
            self.pending = None
            self.note_success()

    def path(self, number: int) -> str:
        """Return the path or URL of a step in this tier."""
        return self.place.finder.path(step_name(number))

    def target(self, number: int) -> str:
        """Return the path or URL into which all ranks capture a step."""
        return self.path(number)

    def apply_rules(self, saved: int | None = None, *, is_idle: bool = False) -> None:
        """Delete the steps that no rule keeps. On the ranks that act for nodes.

        Args:
            saved: Number of a step that is new here; None if a step is not needed any more.
            is_idle: As for `NodeRetention.apply`, if each node has a part of the steps.
        """
        if not self.is_spread:
            self._retention.apply(saved)
            return
        needed = {*_list_kept(self), *([] if saved is None else [saved])}
        try:
            self._parts.apply(needed, self.list_copied(), is_idle=is_idle)
        except ShardckptError as error:
            warn_user(f"old steps in {self._shown} could not be removed: {error}")

    def _withdraw(self, number: int, error: Exception) -> None:
        """Emit that a step is not in this tier; on rank 0 warn too."""
        self.opening.is_ready = False
        self._emit_fallback(number, error)
        if get_channels(self._group).main.rank == 0:
            self.note_failure(error)

    def _emit_fallback(self, number: int, error: Exception) -> None:
        """Emit that a step is not captured."""
        rank = get_channels(self._group).main.rank
        emit(FallbackEvent(self.path(number), step=number, rank=rank, warnings=(describe(error),)), self._on_event)

    def note_success(self) -> None:
        """Reset the count of failures."""
        self._attempts = _CaptureAttempts()

    def note_failure(self, error: Exception) -> None:
        """Count a failure; warn about the first one in a row. On rank 0."""
        if self._attempts.note_failure(error):
            warn_user(f"steps are not captured in {self._shown}, training goes on: {describe(error)}")


def _list_kept(tier: CaptureTier) -> set[int]:
    """Return the steps that retention must not delete, including the one being captured."""
    begun, pending = tier._begun, tier.pending
    # The folder of a step that is captured again has files of its earlier save.
    running = [] if pending is None or pending.handle.done() else [pending.number]
    return {*tier.list_needed(), *running, *([] if begun is None else [begun])}


class _CaptureAttempts:
    """Failures since the last success, which decide how many captures are left out before the next attempt."""

    def __init__(self) -> None:
        self._failures = self._left_out = 0
        self._was_busy = False

    def is_left_out(self) -> bool:
        """Return True if a capture is left out, and count it."""
        if self._left_out < min((1 << self._failures) - 1, _MOST_SKIPPED):
            self._left_out += 1
            return True
        self._left_out = 0
        return False

    def note_failure(self, error: Exception) -> bool:
        """Count a failure; return True for the first one in a row."""
        is_first = self._failures == 0
        if isinstance(error, HolderBusyError):  # the holder is slow: the next capture is tried
            is_first, self._was_busy, self._left_out = is_first and not self._was_busy, True, _MOST_SKIPPED
        else:
            self._failures += 1
        return is_first


def _limit_staging(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options with a limit of pinned memory, of which a save in the root may use all of its own budget."""
    budget = default_budget()
    if budget is None:
        return options
    return {"max_staging_bytes": max(budget // 4, LEAST_BUDGET_BYTES), **options}


def _is_fault_of_tier(coordinator: Coordinator, error: Exception) -> bool:
    """Return True if a capture failed on all ranks since the tier of one of them failed. Collective."""
    kind = b"tier" if isinstance(error, StorageError) else b"" if isinstance(error, RankError) else b"state"

    def decide(messages: list[bytes]) -> list[bytes]:
        return [b"" if b"state" in messages else b"tier"] * len(messages)

    return bool(coordinator.coordinate("finding out why a capture failed", kind, decide))
