"""A run's tier in memory: find its folder on this node, hold the lease, capture steps into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import torch.distributed as dist

from shardckpt.checkpoint.save.async_save import CAPTURES
from shardckpt.checkpoint.save.staging import memory_size
from shardckpt.events import OnEvent
from shardckpt.events.warn_user import warn_user
from shardckpt.native.commit import COMMIT
from shardckpt.native.step_copies import MEMORY
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.plan.retention import Retention
from shardckpt.storage.orphans import is_partial, remove, remove_orphan
from shardckpt.storage.resolve_url import open_remote
from shardckpt.storage.store import Store
from shardckpt.tiers.capture_tier import CaptureTier, TierPlace
from shardckpt.tiers.durability.tier_folder import find_run_id
from shardckpt.tiers.memory import SCHEME
from shardckpt.tiers.memory.janitor import keep_janitor
from shardckpt.tiers.memory.lease import hold_lease
from shardckpt.tiers.memory.memory_store import MemoryPlace, name_place
from shardckpt.tiers.memory.place_choice import ChosenPlace, choose_place
from shardckpt.tiers.memory.run_folders import find_base, find_first_mount, find_run_folder
from shardckpt.tiers.part_finder import PartFinder
from shardckpt.tiers.peer_memory import PeerMemory, find_node


class MemoryTier(CaptureTier):
    """A run's captures in a folder of this node's memory."""

    def __init__(
        self,
        config: PeerMemory,
        root: str,
        group: dist.ProcessGroup | None,
        on_event: OnEvent | None,
        list_needed: Callable[[CaptureTier], Collection[int]],
    ) -> None:
        self._config, self._run, self._has_warned = config, find_run_id(root), False
        finder = PartFinder(f"{SCHEME}://{self._run}", group, tier=MEMORY)
        place = TierPlace(MEMORY, finder, self._is_found_again, lambda: find_node(config.rack), self._open_own)
        rules = Retention.from_params("PeerMemory", keep_last=config.keep_last)
        super().__init__(place, "memory", CAPTURES, config.every, rules, group, on_event, config.copies, list_needed)

    def open_node(self) -> None:
        """Hold the lease of this node's folder, which may have to be made; warn once if it is on a disk."""
        place, warning = self._find_place()
        self._hold(place)
        if warning and not self._has_warned:
            self._has_warned = True
            warn_user(warning)

    def target(self, number: int) -> str:
        """Return the URL where all ranks capture a step; each node maps it to its folder."""
        self._find_place()
        return super().target(number)

    def _open_own(self) -> Store:
        """Return the store for this node's folder; hold its lease if it exists, since captures are about to be read."""
        place, _ = self._find_place()
        if os.path.isdir(place.folder):
            self._hold(place)
        return open_remote(f"{SCHEME}://{self._run}")

    def _find_place(self) -> ChosenPlace:
        """Return this node's folder, and let the URL stand for it in this process."""
        config = self._config
        max_bytes = None if config.max_bytes is None else parse_size(config.max_bytes)
        found = choose_place(self._run, config.mount, max_bytes, memory_size())
        name_place(self._run, found.place)
        return found

    def _hold(self, place: MemoryPlace) -> None:
        hold_lease(place.folder, self._config.idle_s, place.max_bytes, _remove_unfinished)
        keep_janitor(find_base(find_first_mount()))

    def _is_found_again(self) -> bool:
        """Return True if a new process on this node would find the captures."""
        place, _ = self._find_place()
        return find_run_folder(self._run, self._config.mount) == place.folder


def _remove_unfinished(folder: str) -> None:
    """Remove what killed processes have not committed. While no other process uses the folder."""
    for step in os.listdir(folder):
        inside = os.path.join(folder, step)
        if os.path.isdir(inside) and not os.path.exists(os.path.join(inside, COMMIT)):
            remove(inside)
        elif os.path.isdir(inside):
            for name in filter(is_partial, os.listdir(inside)):
                remove_orphan(os.path.join(inside, name))
