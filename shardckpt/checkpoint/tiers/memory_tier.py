"""The memory tier of a run: start its holder, capture steps into it, keep the newest ones."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import Coordinator
from shardckpt.checkpoint.peers.node_steps import read_commits, remove_old_steps
from shardckpt.checkpoint.run.step_finder import StepFinder
from shardckpt.checkpoint.save.async_save import CAPTURES
from shardckpt.checkpoint.save.staging import memory_size
from shardckpt.checkpoint.tiers.capture_tier import CaptureTier, NodeShare, TierPlace
from shardckpt.checkpoint.tiers.peer_memory import PeerMemory, find_node, find_run_id
from shardckpt.errors import StorageError
from shardckpt.events import OnEvent
from shardckpt.format.native.commit import COMMIT
from shardckpt.format.native.run_directory import step_name
from shardckpt.plan.retention import Retention
from shardckpt.storage.holder import SCHEME
from shardckpt.storage.holder.holders import is_reachable, start_holder
from shardckpt.storage.store import Store


class MemoryFinder(StepFinder):
    """Finder of captures, of which each node has a part."""

    def newest_branch(self) -> int:
        """Return the branch of the newest step on this node, which may have only a part of it. On rank 0."""
        return max((commit.branch for commit in read_commits(self.open_store()).values()), default=0)


class MemoryTier(CaptureTier):
    """Captures of a run in the memory of this node's holder.

    Args:
        config: Settings.
        root: Path or URL of the run.
        group: Process group of the ranks; None for all ranks.
        on_event: Called with the events of captures; None without a callback.
    """

    def __init__(
        self, config: PeerMemory, root: str, group: dist.ProcessGroup | None, on_event: OnEvent | None
    ) -> None:
        self._config, self._run = config, find_run_id(root)
        finder = MemoryFinder(f"{SCHEME}://{self._run}", group)
        place = TierPlace("memory", finder, lambda: is_reachable(self._run), find_node)
        rules = Retention.from_params("PeerMemory", keep_last=config.keep_last)
        super().__init__(place, "memory", CAPTURES, config.every, rules, group, on_event)

    def open_node(self) -> None:
        """Start the holder of this node unless it is there.

        Raises:
            StorageError: It cannot be started.
            NoMemoryError: The machine has too little memory.
        """
        start_holder(self._run, self._config.limit(memory_size()), last=COMMIT, idle_s=self._config.idle_s)

    def finish(self, coordinator: Coordinator, number: int, share: NodeShare) -> None:
        """Give the capture's marks to all nodes, then remove older captures. Collective.

        Args:
            coordinator: Coordinator of the thread of the capture.
            number: Number of the step.
            share: Part of this rank.

        Raises:
            StorageError: This node did not get the marks; RankError on other ranks.
        """
        super().finish(coordinator, number, share)
        if share.is_first:
            self._remove_old(self.place.finder.open_store(), step_name(number))

    def _remove_old(self, own: Store, saved: str) -> None:
        """Remove the captures of this node that are not kept; an error is a warning."""
        try:
            remove_old_steps(own, self._config.keep_last, {saved}, self.place.finder.damaged)
        except StorageError as error:
            warnings.warn(f"{saved} is captured, but old captures could not be removed: {error}", stacklevel=2)
