"""A run's memory tier: start its holder, capture steps into it, keep the newest ones."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property, partial

import torch.distributed as dist

from shardckpt.checkpoint.save.async_save import CAPTURES
from shardckpt.checkpoint.save.staging import memory_size
from shardckpt.events import OnEvent, ReplicateEvent, emit
from shardckpt.events.warn_user import warn_user
from shardckpt.native.commit import COMMIT
from shardckpt.native.run_directory import step_name
from shardckpt.native.step_copies import MEMORY
from shardckpt.plan.retention import Retention
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.resolve_url import open_remote
from shardckpt.tiers.capture_tier import CaptureTier, TierPlace
from shardckpt.tiers.durability.run_record import find_run_id
from shardckpt.tiers.holder import SCHEME
from shardckpt.tiers.holder.holders import is_reachable, start_holder
from shardckpt.tiers.part_finder import PartFinder
from shardckpt.tiers.peer_memory import PeerMemory, find_node
from shardckpt.tiers.peers.copy_step import CopiedStep, copy_step
from shardckpt.tiers.peers.open_peers import report_or_nothing, share_most_copied


class MemoryTier(CaptureTier):
    """A run's captures in the memory of this node's holder."""

    def __init__(
        self, config: PeerMemory, root: str, group: dist.ProcessGroup | None, on_event: OnEvent | None
    ) -> None:
        self._config, self._run = config, find_run_id(root)
        self._copied = ""
        self._is_warned = self._has_failed = False
        finder = PartFinder(f"{SCHEME}://{self._run}", group)
        place = TierPlace(
            MEMORY,
            finder,
            lambda: is_reachable(self._run),
            partial(find_node, config.rack),
            partial(open_remote, finder.root),
        )
        rules = Retention.from_params("PeerMemory", keep_last=config.keep_last)
        super().__init__(place, "memory", CAPTURES, config.every, rules, group, on_event)

    def open(self, nodes: set[str]) -> None:
        """Start the holder on rank 0's node unless it runs. On rank 0; as `CaptureTier.open`."""
        super().open(nodes)
        self._warn_of_copies(len(nodes))

    def _warn_of_copies(self, machines: int) -> None:
        """Warn once if there are too few machines for the copies. On rank 0."""
        if self._config.copies >= machines and not self._is_warned:
            self._is_warned = True
            found = f"{machines} machine{'s' * (machines != 1)} for copies={self._config.copies}"
            warn_user(f"captures in memory get fewer copies than asked for: {found}")

    def open_node(self) -> None:
        """Start this node's holder unless it runs; replace one that does not answer, with a warning."""
        replaced = start_holder(self._run, self._max_bytes, last=COMMIT, idle_s=self._config.idle_s)
        if replaced:
            warn_user(
                f"the holder of captures in memory did not answer: process {replaced} was ended, with its captures"
            )

    @cached_property
    def _max_bytes(self) -> int:
        return self._config.limit(memory_size())

    def replicate(self, coordinator: LinkedGroup, number: int) -> None:
        """Copy a capture to other nodes. Collective."""
        if self._config.copies:
            own, node, folder = self.place.open_own(), find_node(self._config.rack), step_name(number)
            copied = copy_step(coordinator, own, node, folder, self._config.copies)
            self._note_copies(coordinator.rank, number, copied)
            self._copied = folder
            # The newest capture on more machines is kept too: another start may have captured it.
            if copied.faults:
                self._copied = share_most_copied(coordinator, report_or_nothing(own, node), folder)

    def list_copied(self) -> Collection[str]:
        """Return the folder of the newest capture with all its copies, or with the most."""
        return (self._copied,) if self._copied else ()

    def _note_copies(self, rank: int, number: int, copied: CopiedStep) -> None:
        """Record and emit whether a capture has all its copies; warn about the first failure in a row."""
        if rank == 0:
            self._warn_of_copies(copied.machines)
        path = self.place.finder.path(step_name(number))
        event = ReplicateEvent(path, copied.seconds, number, rank, copied.nbytes, warnings=copied.faults)
        emit(event, self._on_event)
        had_failed, self._has_failed = self._has_failed, bool(copied.faults)
        if copied.faults and rank == 0 and not had_failed:
            warn_user(f"a capture has fewer copies than asked for: {copied.faults[0]}")
