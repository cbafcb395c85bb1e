"""A run's tier in a local folder: claim it, capture steps into it, keep the steps that the rules select."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardckpt.checkpoint.save.async_save import LOCAL_CAPTURES
from shardckpt.errors import StorageError, escape
from shardckpt.events import OnEvent
from shardckpt.native.run_directory import step_name
from shardckpt.native.step_copies import LOCAL
from shardckpt.storage.local import LocalStore
from shardckpt.storage.node_folder import name_folder
from shardckpt.storage.store import Store
from shardckpt.tiers.capture_tier import CaptureTier, TierPlace
from shardckpt.tiers.durability.tier_folder import claim_folder, find_run_id, read_folder_id, require_own_folder
from shardckpt.tiers.local_folder import Local
from shardckpt.tiers.part_finder import PartFinder
from shardckpt.tiers.peer_memory import find_node
from shardckpt.tiers.peers.node_files import Node


class LocalFinder(PartFinder):
    """Finds steps in a tier's folder, and refuses another run's folder."""

    def __init__(self, config: Local, root: str, group: dist.ProcessGroup | None) -> None:
        super().__init__(config.folder, group, tier=LOCAL)
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

    def __init__(
        self,
        config: Local,
        root: str,
        group: dist.ProcessGroup | None,
        on_event: OnEvent | None,
        list_needed: Callable[[CaptureTier], Collection[int]],
    ) -> None:
        config.require_apart(root)
        self._folder, self._root, self._rack = config.folder, root, config.rack
        finder = LocalFinder(config, root, group)
        place = TierPlace(LOCAL, finder, lambda: True, self._find_place, finder.open_own)
        shown = escape(config.folder)
        super().__init__(
            place, shown, LOCAL_CAPTURES, config.every, config.rules, group, on_event, config.copies, list_needed
        )

    def open_node(self) -> None:
        """Claim the folder for this run."""
        claim_folder(LocalStore(self._folder), self._root)
        if not os.access(self._folder, os.W_OK | os.X_OK):  # a file system may be read-only, for root too
            raise StorageError(
                "the folder of Local cannot be written",
                where=self._folder,
                expected="a folder that this user may write",
            )

    def target(self, number: int) -> str:
        """Return the path where all ranks capture a step; on several nodes a URL that each maps to its folder."""
        url = name_folder(find_run_id(self._root), self._folder)
        return f"{url}/{step_name(number)}" if self.is_spread else self.path(number)

    def _find_place(self) -> Node:
        """Return this rank's node; nodes that share the folder are one."""
        node = find_node(self._rack)
        return node._replace(name=read_folder_id(LocalStore(self._folder)) or node.name)
