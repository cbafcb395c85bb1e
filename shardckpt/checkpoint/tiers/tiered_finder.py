"""Find the steps of a run with a memory tier: the newest one that can be loaded, in memory or in the root."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.run.durability import PROCESS, StepCopy
from shardckpt.checkpoint.run.step_finder import NO_STEP, FoundStep, StepFinder, find_next_branch
from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError
from shardckpt.format.native.run_directory import AFTER, StepFolder, read_about
from shardckpt.storage.holder.holders import is_reachable
from shardckpt.storage.store import Store

_LOG = logging.getLogger("shardckpt")


def choose_newest(held: FoundStep, root: FoundStep) -> FoundStep:
    """Return the newer of two steps; of equal ones that in memory, which is nearer.

    Args:
        held: Newest step in memory that can be loaded.
        root: The same of the root.
    """
    newest = max(held.newest, root.newest)
    if held.save is None and root.save is None:
        return root._replace(newest=newest)
    is_held = held.save is not None and (root.save is None or held.order >= root.order)
    chosen = held if is_held else root
    branch = find_next_branch(chosen.order, newest)
    return chosen._replace(faults=root.faults, unreadable=root.unreadable, branch=branch, newest=newest)


_MOST_STARTED = 4096
"""Maximum number of steps whose last save is remembered."""


class RootPosition(NamedTuple):
    """Steps of the root that a run knows: its captures follow them.

    Attributes:
        committed: Order of the newest complete step.
        started: Order of the step whose save was started last; it may be complete meanwhile.
    """

    committed: tuple[int, int] = NO_STEP
    started: tuple[int, int] = NO_STEP

    def encode(self) -> str:
        """Return the position as text, for the custom metadata of a capture."""
        return json.dumps(self)

    @classmethod
    def decode(cls, text: str) -> RootPosition | None:
        """Return the position from the text of `encode`; None for other text."""
        try:
            (branch, number), (started_branch, started) = json.loads(text)
            return cls((int(branch), int(number)), (int(started_branch), int(started)))
        except (ValueError, TypeError):
            return None

    def leads_to(self, newest: tuple[int, int], *, is_empty: bool) -> bool:
        """Return True if the root is that of this run, or has lost steps since.

        Otherwise it was emptied, or another process saved steps without knowing of the captures: then they belong to
        a course of the training that was given up.

        Args:
            newest: Order of the newest complete step of the root now.
            is_empty: Whether the root has no step, complete or not.
        """
        if newest in self:
            return True
        return not is_empty if newest == NO_STEP else newest < self.committed


class TieredFinder(StepFinder):
    """Finder of the steps of a run with a memory tier.

    Args:
        root: Path or URL of the run's folder.
        group: Process group of the ranks; None for all ranks.
        memory: Finder of the captures.

    Attributes:
        position: Steps of the root that this process knows; None before it has looked. On rank 0.
    """

    def __init__(self, root: str | os.PathLike[str], group: dist.ProcessGroup | None, memory: StepFinder) -> None:
        super().__init__(root, group)
        self._memory = memory
        self.has_other_places = True
        self.position: RootPosition | None = None
        memory.damaged = self.damaged
        self._run = memory.root.partition("://")[2]
        self._started: dict[int, float] = {}

    def find_on_rank0(self, wanted: int | None, passed: Collection[str]) -> FoundStep:
        """Return the newest step that can be loaded, in memory or in the root. On rank 0."""
        root = super().find_on_rank0(wanted, passed)
        self.position = RootPosition(root.newest)
        return choose_newest(self._find_held(wanted, passed, root), root)

    def find_position(self) -> RootPosition:
        """Return the steps of the root that this process knows; read them if it has not looked. On rank 0."""
        if self.position is None:
            self.position = RootPosition(super().find_on_rank0(None, ()).newest)
        return self.position

    def _find_held(self, wanted: int | None, passed: Collection[str], root: FoundStep) -> FoundStep:
        """Return the newest capture that can be loaded; without one if the memory cannot be read."""
        try:
            self._drop_captures_of_another_run(root)
            return self._memory.find_on_rank0(wanted, passed)._replace(faults=[], unreadable="")
        except ShardckptError as error:
            _LOG.warning("captures in memory cannot be read: %s", error)
            return FoundStep([])

    def _drop_captures_of_another_run(self, root: FoundStep) -> None:
        store = self._memory.open_store()
        is_empty = root.newest == NO_STEP and not root.faults
        for step in self._memory.read().complete:
            if (step.branch, step.number) <= root.newest:
                continue  # the root has a newer step, which may have been complete before the next capture
            position = RootPosition.decode(_read_about(store, step).get(AFTER, ""))
            if position is not None and not position.leads_to(root.newest, is_empty=is_empty):
                _LOG.warning("step %d in memory does not belong to the steps in %s: dropped", step.number, self.root)
                store.delete_folder(step.name)

    def list_saves(self) -> list[str]:
        """Return the ids of the saves of the complete steps in memory and in the root. On rank 0."""
        return [*self._list_held_saves(), *super().list_saves()]

    def _list_held_saves(self) -> list[str]:
        try:
            return self._memory.list_saves()
        except ShardckptError:
            return []

    def newest_branch(self) -> int:
        """Return the branch of the newest complete step, in memory or in the root. On rank 0."""
        try:
            held = self._memory.newest_branch()
        except ShardckptError:
            held = 0
        return max(held, super().newest_branch())

    def record_start(self, number: int) -> None:
        """Record that a save of a step starts now: an older copy of this number has another state. On rank 0."""
        self._started.pop(number, None)
        self._started[number] = time.time_ns() // 1_000_000 / 1000  # milliseconds, as in the id of a save
        if len(self._started) > _MOST_STARTED:
            del self._started[next(iter(self._started))]

    def list_copies(self, number: int) -> list[StepCopy]:
        """Return the complete copies of a step, the nearest first. On rank 0.

        A copy that is older than this process's last save of the step is not one of it, and a capture that a new
        process would not find is none.
        """
        copies = [*self._list_held_copies(number), *super().list_copies(number)]
        started = self._started.get(number, 0.0)
        return [copy for copy in copies if not started or (copy.saved_at or 0.0) >= started]

    def _list_held_copies(self, number: int) -> list[StepCopy]:
        try:
            held = [step for step in self._memory.read().complete if step.number == number and self.is_good(step)]
            if not held or not is_reachable(self._run):
                return []
        except ShardckptError as error:
            _LOG.warning("captures in memory cannot be read: %s", error)
            return []
        return [StepCopy("memory", self._memory.path(step.name), (PROCESS,), step.saved_at) for step in held]


def _read_about(store: Store, step: StepFolder) -> Mapping[str, str]:
    """Return the custom metadata of a capture; empty if it is damaged, which a load finds."""
    try:
        return read_about(store, step)
    except (CheckpointError, MissingFileError):
        return {}
