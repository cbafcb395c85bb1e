"""A run's tier in a local folder: claim it, capture steps into it, keep the steps that the rules select."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist

from shardckpt.checkpoint.save.async_save import LOCAL_CAPTURES
from shardckpt.errors import ShardckptError, StorageError, escape
from shardckpt.events import OnEvent
from shardckpt.native.run_directory import step_name
from shardckpt.native.step_copies import LOCAL
from shardckpt.storage.local import LocalStore
from shardckpt.storage.node_folder import name_folder
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import Store
from shardckpt.tiers.capture_tier import CaptureTier, TierPlace
from shardckpt.tiers.durability.run_record import find_run_id, read_run_record, write_run_record
from shardckpt.tiers.durability.tier_folder import claim_folder, read_folder_id, require_own_folder
from shardckpt.tiers.local_folder import Local
from shardckpt.tiers.part_finder import PartFinder
from shardckpt.tiers.peer_memory import find_node
from shardckpt.tiers.peers.node_files import Node

_LOG = logging.getLogger("shardckpt")


class LocalFinder(PartFinder):
    """Finds steps in a tier's folder, and refuses another run's folder."""

    def __init__(self, config: Local, root: str, group: dist.ProcessGroup | None) -> None:
        super().__init__(config.folder, group)
        self._folder, self._root_of_run = config.folder, root
        self._is_opened = False

    @contextmanager
    def at(self, root: str) -> Iterator[None]:
        """Find steps as the base class; each node's folder is checked when it is opened."""
        self._is_opened = True
        try:
            with super().at(root):
                yield
        finally:
            self._is_opened = False

    def open_store(self) -> Store:
        """Return the store for the tier's folder, after a check that it is this run's."""
        store = super().open_store()
        if not self._is_opened:
            require_own_folder(store, self._root_of_run)
        return store

    def open_own(self) -> Store:
        """Return the store for this node's folder. Raises as `open_store`."""
        store = LocalStore(self._folder)
        require_own_folder(store, self._root_of_run)
        return store


class LocalTier(CaptureTier):
    """A run's captures in a local folder."""

    def __init__(self, config: Local, root: str, group: dist.ProcessGroup | None, on_event: OnEvent | None) -> None:
        config.require_apart(root)
        self._folder, self._root, self._rack, self._is_recorded = config.folder, root, config.rack, False
        finder = LocalFinder(config, root, group)
        place = TierPlace(LOCAL, finder, lambda: True, self._find_place, finder.open_own)
        shown = escape(config.folder)
        super().__init__(place, shown, LOCAL_CAPTURES, config.every, config.rules, group, on_event, config.copies)

    def open_node(self) -> None:
        """Claim the folder for this run."""
        claim_folder(LocalStore(self._folder), self._root)
        if not os.access(self._folder, os.W_OK | os.X_OK):  # a file system may be read-only, for root too
            raise StorageError(
                "the folder of Local cannot be written",
                where=self._folder,
                expected="a folder that this user may write",
            )

    def open(self, nodes: set[str]) -> None:
        """Claim the folder on rank 0's node, and record it in the root. On rank 0; as `CaptureTier.open`."""
        super().open(nodes)
        if not self._is_recorded:
            self._is_recorded = True
            self._record_folder()

    def target(self, number: int) -> str:
        """Return the path where all ranks capture a step; on several nodes a URL that each maps to its folder."""
        url = name_folder(find_run_id(self._root), self._folder)
        return f"{url}/{step_name(number)}" if self.is_spread else self.path(number)

    def _find_place(self) -> Node:
        """Return this rank's node; nodes that share the folder are one."""
        node = find_node(self._rack)
        return node._replace(name=read_folder_id(LocalStore(self._folder)) or node.name)

    def _record_folder(self) -> None:
        """Write the folder to the run's record, where `ls` finds it; if this fails, training continues."""
        try:
            store = open_store(self._root)
            record = read_run_record(store)
            if record.local != self._folder:
                write_run_record(store, replace(record, local=self._folder))
        except ShardckptError as error:
            _LOG.warning("the folder of Local is not recorded in the root: %s", error)
