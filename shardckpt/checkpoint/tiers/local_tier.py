"""The tier of a run in a folder of this node: claim it, capture steps into it, keep those that the rules name."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch.distributed as dist

from shardckpt.checkpoint.run.step_finder import StepFinder
from shardckpt.checkpoint.save.async_save import LOCAL_CAPTURES
from shardckpt.checkpoint.tiers.capture_tier import CaptureTier, TierPlace
from shardckpt.checkpoint.tiers.local_folder import Local
from shardckpt.errors import ShardckptError, StorageError, escape
from shardckpt.events import OnEvent
from shardckpt.format.durability.run_record import read_run_record, write_run_record
from shardckpt.format.durability.step_copies import LOCAL
from shardckpt.format.durability.tier_folder import claim_folder, require_own_folder
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import Store

_LOG = logging.getLogger("shardckpt")


class LocalFinder(StepFinder):
    """Finder of the steps in a tier's folder, which refuses the folder of another run.

    Args:
        config: Settings of the tier.
        root: Path or URL of the run.
        group: Process group of the ranks; None for all ranks.
    """

    def __init__(self, config: Local, root: str, group: dist.ProcessGroup | None) -> None:
        super().__init__(config.folder, group)
        self._root_of_run = root

    def open_store(self) -> Store:
        """Return the store of the tier's folder.

        Raises:
            UsageError: It is a file, or has steps of another run.
            StorageError: It cannot be read.
        """
        store = super().open_store()
        require_own_folder(store, self._root_of_run)
        return store


class LocalTier(CaptureTier):
    """Captures of a run in a folder of this node.

    Args:
        config: Settings.
        root: Path or URL of the run.
        group: Process group of the ranks; None for all ranks.
        on_event: Called with the events of captures; None without a callback.

    Raises:
        UsageError: The folder overlaps the root.
    """

    def __init__(self, config: Local, root: str, group: dist.ProcessGroup | None, on_event: OnEvent | None) -> None:
        config.require_apart(root)
        self._folder, self._root, self._is_recorded = config.folder, root, False
        place = TierPlace(LOCAL, LocalFinder(config, root, group), lambda: True)
        shown = escape(config.folder)
        super().__init__(place, shown, LOCAL_CAPTURES, config.every, config.rules, group, on_event)

    def open(self, nodes: set[str]) -> None:
        """Claim the folder for this run. On rank 0.

        Args:
            nodes: Ids of the nodes of all ranks.

        Raises:
            StorageError: The ranks are on several nodes, or the folder cannot be written.
            UsageError: It has steps of another run.
        """
        if len(nodes) > 1:
            raise StorageError("Local captures the ranks of one node", found=f"ranks on {len(nodes)} nodes")
        self.open_node()

    def open_node(self) -> None:
        """Claim the folder for this run. Raises as `open`."""
        claim_folder(open_store(self._folder), self._root)
        if not self._is_recorded:
            self._is_recorded = True
            self._record_folder()

    def _record_folder(self) -> None:
        """Write the folder to the record of the run, where `ls` finds it; without it training goes on."""
        try:
            store = open_store(self._root)
            record = read_run_record(store)
            if record.local != self._folder:
                write_run_record(store, replace(record, local=self._folder))
        except ShardckptError as error:
            _LOG.warning("the folder of Local is not recorded in the root: %s", error)
