"""`CaptureTier`: base class for the tiers into which a run captures steps, in addition to its root."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.run.save_schedule import StepRetention
from shardckpt.checkpoint.save.async_save import SaveLane, start_async_save
from shardckpt.checkpoint.save.handle import StepTask
from shardckpt.checkpoint.save.planner import SaveHooks
from shardckpt.checkpoint.save.save import SaveParams
from shardckpt.checkpoint.save.staging import LEAST_BUDGET_BYTES, default_budget
from shardckpt.errors import RankError, ShardckptError, StorageError, UsageError, describe
from shardckpt.events import (
    BackpressureEvent,
    FallbackEvent,
    OnEvent,
    OperationEvent,
    ReplicateEvent,
    deliver,
    emit,
)
from shardckpt.events.warn_user import warn_user
from shardckpt.native.apply_retention import StepClock
from shardckpt.native.run_directory import step_name
from shardckpt.plan.retention import Retention
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks, has_lost_rank
from shardckpt.storage.store import Store
from shardckpt.tiers.node_opening import NodeOpening, NodeShare
from shardckpt.tiers.part_finder import PartFinder
from shardckpt.tiers.peers.copy_step import CopiedStep, copy_step
from shardckpt.tiers.peers.node_files import Node
from shardckpt.tiers.peers.node_steps import find_orders, give_marks, read_commits, remove_old_steps, remove_older_files
from shardckpt.tiers.peers.open_peers import report_or_nothing, share_most_copied
from shardckpt.tiers.peers.promoted_steps import PromotedSteps

_MAX_SKIPPED = 64  # captures left out after a failure, before the next attempt


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
    """A run's captures in one tier.

    A tier failure never fails the training. It is one warning, and no step is captured until an attempt succeeds. Each
    failure in a row doubles the captures that are left out.

    Args:
        place: The tier as restores and claims see it.
        shown: Where the captures are, for messages.
        lane: Background saves, for this kind of tier alone.
        every: Captures steps whose number is a multiple of this.
        rules: Rules that select the captures to keep.
        group: Ranks that save; None for all ranks.
        on_event: Called with capture events; None without a callback.
        copies: How many other machines keep a copy of each capture.
        list_needed: Returns the steps of a tier that retention must not delete. On ranks that act for nodes.

    Attributes:
        place: The tier as restores and claims see it.
        every: Captures steps whose number is a multiple of this.
        opening: Makes the tier ready on all nodes.
        promoted: Steps that this node has copied to the tier, if each node has a part.
        is_spread: Whether the last capture was on several nodes, each with a part.
        pending: The last capture; None once it was settled.
        copies: How many other machines keep a copy of each capture.
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
        copies: int = 0,
        list_needed: Callable[[CaptureTier], Collection[int]] = lambda _: (),
    ) -> None:
        self.place, self.every, self._list_needed = place, every, list_needed
        self._shown, self._lane, self._group, self._on_event = shown, lane, group, on_event
        self._started: int | None = None
        self._retention = StepRetention(rules, place.finder, on_event, lambda: _list_kept(self))
        self._parts = NodeRetention(rules, place.open_own, place.finder.damaged, place.finder.removed)
        self.promoted = self._parts.promoted
        self._attempts = _CaptureAttempts()
        self.is_spread = False
        self.opening = NodeOpening(place.finder.root, self.open_node, self.refuse, group)
        self.pending: StepTask | None = None
        self.copies, self._copied = copies, ""
        self._has_warned_of_copies = self._lacks_copies = False

    @abstractmethod
    def open_node(self) -> None:
        """Make the tier ready for a capture on this rank's node, unless it is.

        Raises:
            ShardckptError: Nothing can be captured.
        """

    def open(self, nodes: set[str]) -> None:
        """Make the tier ready on rank 0's node, unless it is; warn once of too few machines. On rank 0.

        Args:
            nodes: Ids of all ranks' nodes.

        Raises:
            ShardckptError: Nothing can be captured.
        """
        self.open_node()
        self._warn_of_copies(len(nodes))

    def _warn_of_copies(self, machines: int) -> None:
        """Warn once if there are too few machines for the copies. On rank 0."""
        if self.copies >= machines and not self._has_warned_of_copies:
            self._has_warned_of_copies = True
            found = f"{machines} machine{'s' * (machines != 1)} for copies={self.copies}"
            warn_user(f"captures in {self._shown} get fewer copies than asked for: {found}")

    def open_nodes(self, number: int, share: NodeShare, *, is_open: bool) -> bool:
        """Make the tier ready on all nodes, as `NodeOpening.open_nodes`. Collective."""
        self.is_spread = share.nodes > 1
        return self.opening.open_nodes(number, share, is_open=is_open)

    def finish(self, coordinator: LinkedGroup, number: int, share: NodeShare) -> None:
        """Complete a capture on all nodes after rank 0 committed it; remove older ones. Collective.

        Args:
            coordinator: Ranks for the capture's thread.
            number: Step number.
            share: This rank's part.

        Raises:
            StorageError: The capture is not complete; RankError on other ranks.
        """
        give_marks(coordinator, self.place.open_own(), step_name(number), is_first=share.is_first)
        self.replicate(coordinator, number, share.leaving)
        if share.is_first:
            self.promoted.count_all()
            self.apply_rules(number, is_idle=True)

    def replicate(self, coordinator: LinkedGroup, number: int, leaving: Collection[str] = ()) -> None:
        """Copy a capture to nodes that stay; a leaving node's files at least once. Collective."""
        if self.copies or leaving:
            own, node, folder = self.place.open_own(), self.place.find_node(), step_name(number)
            copied = copy_step(coordinator, own, node, folder, self.copies, leaving)
            self._note_copies(coordinator.rank, number, copied)
            self._copied = folder
            # The newest capture on more machines is kept too: another start may have captured it.
            if copied.faults:
                self._copied = share_most_copied(coordinator, report_or_nothing(own, node), folder)

    def _note_copies(self, rank: int, number: int, copied: CopiedStep) -> None:
        """Record and emit whether a capture has all its copies; warn about the first failure in a row."""
        if rank == 0:
            self._warn_of_copies(copied.machines)
        event = ReplicateEvent(self.path(number), copied.seconds, number, rank, copied.nbytes, warnings=copied.faults)
        emit(event, self._on_event)
        lacked_copies, self._lacks_copies = self._lacks_copies, bool(copied.faults)
        if copied.faults and rank == 0 and not lacked_copies:
            warn_user(f"a capture has fewer copies than asked for: {copied.faults[0]}")

    def takes(self, number: int) -> bool:
        """Return True if a step belongs into this tier."""
        return not number % self.every

    def prepare(self, number: int, nodes: set[str], other: str = "") -> bool:
        """Make the tier ready; return whether a step can be captured. On rank 0.

        Args:
            number: Step number.
            nodes: Ids of all ranks' nodes.
            other: Text that names ranks on one node with different places; empty without such ranks.
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
        hooks: SaveHooks,
        options: Mapping[str, Any],
        share: NodeShare,
        on_committed: Callable[[int], object],
    ) -> None:
        """Capture a step in the background. Collective.

        Args:
            number: Step number.
            state: As for `shardckpt.save`.
            hooks: What the save adds and calls.
            options: Options for `shardckpt.async_save` that apply to the copy.
            share: This rank's part.
            on_committed: Called with the step number once the capture is complete, on each rank that acts for its node.

        Raises:
            Exception: The state cannot be saved. If the tier fails, this is a warning.
        """
        has_retention = get_ranks(self._group).rank == 0 and share.nodes == 1

        def finish(coordinator: LinkedGroup) -> None:
            if share.is_first and hooks.before_commit is not None:
                hooks.before_commit()
            self.finish(coordinator, number, share)
            if share.is_first:
                on_committed(number)

        asked = hooks._replace(is_shared=False, after_commit=finish) if share.nodes > 1 else hooks

        def on_event(event: OperationEvent) -> None:
            deliver(event, self._on_event)
            if event.error is None and has_retention:
                on_committed(number)
                self.apply_rules(number)

        given: SaveParams = {
            "overwrite": True,
            "process_group": self._group,
            "on_event": on_event,
            "model_files": options.get("model_files"),
        }
        limits = _limit_staging({name: value for name, value in options.items() if name != "model_files"})
        self._started = number
        try:
            handle = start_async_save(self._lane, asked, state, self.target(number), given, **limits)
        except Exception as error:
            self._started = None
            if has_lost_rank(self._group) or not _is_fault_of_tier(get_ranks(self._group), error):
                raise
            self._withdraw(number, error)
        else:
            self.pending, self._started = StepTask(number, handle), None

    def is_over(self, number: int) -> bool:
        """Return True if this rank has ended a step's capture."""
        return self.pending is None or self.pending.number != number or self.pending.handle.done()

    def settle_before_next(self) -> None:
        """Wait for the last capture before the next one starts; an event records a wait.

        Raises:
            Exception: As for `settle`.
        """
        if self.pending is None:
            return
        pending, start, has_waited = self.pending, time.monotonic(), not self.pending.handle.done()
        self.settle()
        if has_waited:
            rank, seconds = get_ranks(self._group).rank, time.monotonic() - start
            emit(BackpressureEvent(self.path(pending.number), seconds, pending.number, rank), self._on_event)

    def settle(self) -> None:
        """Wait for the last capture. Collective.

        Raises:
            Exception: The state could not be saved. If the tier failed, this is a warning.
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
        """Return a step's path or URL in this tier."""
        return self.place.finder.path(step_name(number))

    def target(self, number: int) -> str:
        """Return the path or URL into which all ranks capture a step."""
        return self.path(number)

    def apply_rules(self, saved: int | None = None, *, is_idle: bool = False) -> None:
        """Delete the steps that no rule keeps. On ranks that act for nodes.

        Args:
            saved: Number of a new step here; None if an old step is not needed any more.
            is_idle: As for `NodeRetention.apply`, if each node has a part.
        """
        if not self.is_spread:
            self._retention.apply(saved)
            return
        needed = {*_list_kept(self), *([] if saved is None else [saved])}
        try:
            self._parts.apply(needed, [self._copied] if self._copied else [], is_idle=is_idle)
        except ShardckptError as error:
            warn_user(f"old steps in {self._shown} could not be removed: {error}")

    def _withdraw(self, number: int, error: Exception) -> None:
        """Emit that a step is not in this tier; on rank 0 warn too."""
        self.opening.is_ready = False
        self._emit_fallback(number, error)
        if get_ranks(self._group).rank == 0:
            self.note_failure(error)

    def _emit_fallback(self, number: int, error: Exception) -> None:
        """Emit that a step is not captured."""
        rank = get_ranks(self._group).rank
        emit(FallbackEvent(self.path(number), step=number, rank=rank, warnings=(describe(error),)), self._on_event)

    def note_success(self) -> None:
        """Reset the failure count."""
        self._attempts = _CaptureAttempts()

    def note_failure(self, error: Exception) -> None:
        """Count a failure; warn about the first one in a row. On rank 0."""
        if self._attempts.note_failure():
            warn_user(f"steps are not captured in {self._shown}, training continues: {describe(error)}")


def _list_kept(tier: CaptureTier) -> set[int]:
    """Return the steps that retention must not delete, including the one being captured."""
    started, pending = tier._started, tier.pending
    # The folder of a step that is captured again has files of its earlier save.
    running = [] if pending is None or pending.handle.done() else [pending.number]
    return {*tier._list_needed(tier), *running, *([] if started is None else [started])}


class _CaptureAttempts:
    """Counts failures since the last success, to leave out captures before the next attempt."""

    def __init__(self) -> None:
        self._failures = self._left_out = 0

    def is_left_out(self) -> bool:
        """Return True if a capture is left out, and count it."""
        if self._left_out < min((1 << self._failures) - 1, _MAX_SKIPPED):
            self._left_out += 1
            return True
        self._left_out = 0
        return False

    def note_failure(self) -> bool:
        """Count a failure; return True for the first one in a row."""
        self._failures += 1
        return self._failures == 1


def _limit_staging(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Limit a capture's pinned memory, since a save in the root has its own budget."""
    budget = default_budget()
    if budget is None:
        return options
    return {"max_staging_bytes": max(budget // 4, LEAST_BUDGET_BYTES), **options}


def _is_fault_of_tier(coordinator: LinkedGroup, error: Exception) -> bool:
    """Return True if a capture failed on all ranks because one rank's tier failed. Collective."""
    kind = b"tier" if isinstance(error, StorageError) else b"" if isinstance(error, RankError) else b"state"

    def decide(messages: list[bytes]) -> list[bytes]:
        return [b"" if b"state" in messages else b"tier"] * len(messages)

    return bool(coordinator.ask_rank0("finding out why a capture failed", kind, decide))


class NodeRetention:
    """Applies a tier's rules on one node."""

    def __init__(
        self, rules: Retention, open_own: Callable[[], Store], damaged: Collection[str], removed: dict[str, int]
    ) -> None:
        self._rules, self._open_own, self._damaged, self._removed = rules, open_own, damaged, removed
        self._clock, self.promoted = StepClock(), PromotedSteps()

    def apply(self, needed: Collection[int], copied: Collection[str], *, is_idle: bool) -> None:
        """Remove this node's steps that no rule keeps, and files of replaced saves."""
        uncounted = {step_name(step.number) for step in self.promoted.uncounted}
        own = self._open_own()
        for number, older in self.promoted.take_removable(needed):
            remove_older_files(own, step_name(number), older)
        commits = read_commits(own)
        saves = {name: (commits[name].save, number) for name, (_, number) in find_orders(commits).items()}
        numbers = {*needed, *self.promoted.list_protected([number for _, number in saves.values()])}
        protected = {*map(step_name, numbers), *copied}
        damaged = {*self._damaged, *(commits[name].save for name in uncounted & commits.keys())}

        def note(names: Collection[str]) -> None:
            self._removed.update(saves[name] for name in names if name in saves)

        remove_old_steps(own, self._rules, protected, damaged, is_idle=is_idle, on_removal=note, clock=self._clock)
