"""The memory tier of a run: start its holder, capture steps into it, keep the newest ones."""

from __future__ import annotations

import torch.distributed as dist

from shardckpt.checkpoint.run.step_finder import StepFinder
from shardckpt.checkpoint.save.async_save import CAPTURES
from shardckpt.checkpoint.save.staging import memory_size
from shardckpt.checkpoint.tiers.capture_tier import CaptureTier, TierPlace
from shardckpt.checkpoint.tiers.peer_memory import PeerMemory, find_run_id
from shardckpt.errors import StorageError
from shardckpt.events import OnEvent
from shardckpt.format.native.commit import COMMIT
from shardckpt.plan.retention import Retention
from shardckpt.storage.holder import SCHEME
from shardckpt.storage.holder.holders import is_reachable, start_holder


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
        finder = StepFinder(f"{SCHEME}://{self._run}", group)
        place = TierPlace("memory", finder, lambda: is_reachable(self._run))
        rules = Retention.from_params("PeerMemory", keep_last=config.keep_last)
        super().__init__(place, "memory", CAPTURES, config.every, rules, group, on_event)

    def open(self, nodes: set[str]) -> None:
        """Start the holder unless it is there. On rank 0.

        Args:
            nodes: Ids of the nodes of all ranks.

        Raises:
            StorageError: The ranks are on several nodes, or the holder cannot be started.
            NoMemoryError: The machine has too little memory.
        """
        if len(nodes) > 1:
            raise StorageError("PeerMemory captures the ranks of one node", found=f"ranks on {len(nodes)} nodes")
        start_holder(self._run, self._config.limit(memory_size()), last=COMMIT, idle_s=self._config.idle_s)
