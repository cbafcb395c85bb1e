"""`KnownRoot`: a run's root as this start knows it, and which captures belong to its steps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress

from shardckpt.checkpoint.run.step_finder import NO_STEP, StepFinder, StepKey
from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError
from shardckpt.events import FallbackEvent, OnEvent, emit
from shardckpt.events.warn_user import warn_user
from shardckpt.native.run_directory import AFTER, StepFolder, read_about, step_name
from shardckpt.tiers.durability.run_record import NOTHING_LOST, RECORD
from shardckpt.tiers.lineage.last_start import LastStart
from shardckpt.tiers.lineage.root_position import RootPosition, RootSteps

_LOG = logging.getLogger("shardckpt")


class KnownRoot:
    """A run's root as this start knows it. On rank 0."""

    # Captures follow steps of the root. Another process may have saved other steps there since, or removed them.

    def __init__(self, finder: StepFinder, local: str = "", on_event: OnEvent | None = None) -> None:
        self._finder, self._on_event = finder, on_event
        self.position: RootPosition | None = None  # steps of the root that this start knows; None before it has looked
        self.last_start = LastStart(finder.open_store, local)  # the start of the run that captured last
        self._is_in_doubt = False

    def find_position(self) -> RootPosition:
        """Return the root's steps that this start knows; read them if it has not looked."""
        if self.position is None:
            self.position = RootPosition(RootSteps.from_run(self._finder.read()).newest)
        return self.position

    def follow(self, root: RootSteps) -> None:
        """Record that this start continues, if the root has lost all its steps meanwhile."""
        committed = self.find_position().committed
        if not root.is_empty or (committed == NO_STEP and self.last_start.lost == NOTHING_LOST):
            return
        text = f"all steps in {self._finder.root} are gone while the run continues"
        try:
            if self.last_start.record_lost(committed):
                text += ": what this start has captured is restored all the same, unless its record there goes too"
            elif not self.last_start.is_recorded and committed != NO_STEP:  # it has captured nothing that follows these
                text += ": its captures follow the empty root from now on"
                self.position = self.find_position()._replace(committed=NO_STEP)
            else:
                return
            emit(FallbackEvent(self._finder.root, warnings=(text,)), self._on_event)
            warn_user(text)
        except ShardckptError as error:
            self._is_in_doubt = True  # the next save tries again, before captures follow steps that are gone
            _LOG.warning("%s, and it cannot be recorded that captures are still needed: %s", text, error)

    def begin_restore(self, root: RootSteps) -> None:
        """Follow the root and count its steps as known, since a restore starts."""
        if self.position is not None:
            self.follow(root)
        # A save that is under way in the root may complete after the next captures.
        self.position = (self.position or RootPosition())._replace(committed=root.newest)
        self.last_start.read()

    def choose_saves(self, positions: Mapping[str, str]) -> list[str]:
        """Return which captures of one step may count, before a restore starts."""
        self.last_start.read()
        return self.last_start.select_saves({save: RootPosition.read_attempt(text) for save, text in positions.items()})

    def look(self) -> None:
        """Look if the root still has the run's record and its newest step: one list. In the background."""
        # If the root has lost them, the next save reads it, and records there that this start continues.
        position = self.position or RootPosition()
        needed = {RECORD, *([step_name(position.committed[1])] if position.committed != NO_STEP else [])}
        with suppress(ShardckptError):  # a root that cannot be listed is seen by the saves into it
            if not needed <= {entry.name for entry in self._finder.open_store().list()}:
                self._is_in_doubt = True

    def record_captures(self, branch: int) -> None:
        """Record in the root that this start captures; first read it if `look` missed something there."""
        if self._is_in_doubt:
            self._is_in_doubt, self.last_start.is_in_doubt = False, True
            with suppress(ShardckptError):
                self.follow(RootSteps.from_run(self._finder.read()))
        self.last_start.record(branch)

    def compare(
        self, order: tuple[int, int], after: str, root: RootSteps, passed: Collection[StepKey] = ()
    ) -> tuple[bool, bool]:
        """Return whether a capture fits the root's steps, so may be loaded, and whether one is from its attempt."""
        position = RootPosition.decode(after)
        if position is None:
            return True, False
        if order in root.steps:  # the root may have it from a process that did not know of the capture
            step = root.steps[order]
            if position.committed == order and (self._finder.path(step.name), step.save) in passed:
                return True, False  # an overwrite that the root does not have
            is_same = self._is_same_attempt(step, after)
            return (order in position if is_same is None else is_same), is_same is True
        if order < root.newest or position.leads_to(root.newest, is_empty=root.is_empty):
            return True, False  # under a newer step of the root it is never the newest
        return root.is_empty and self.last_start.has_lost(position.committed, RootPosition.read_attempt(after)), False

    def _is_same_attempt(self, step: StepFolder, text: str) -> bool | None:
        """Return True if a root step and a capture come from one attempt to save."""
        # None if the step of the root is damaged: it may come from any attempt that the run began to save in the root.
        try:
            return read_about(self._finder.open_store(), step).get(AFTER) == text
        except (CheckpointError, MissingFileError):
            return None
