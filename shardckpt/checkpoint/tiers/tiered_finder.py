"""Find the steps of a run with tiers: the newest one that can be loaded, in a tier or in the root."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import get_channels
from shardckpt.checkpoint.peers.node_files import NodeCatalog, NodeReport
from shardckpt.checkpoint.peers.open_peers import NodeFault, NodeTier, open_peers
from shardckpt.checkpoint.run.last_start import LastStart
from shardckpt.checkpoint.run.own_attempts import OwnAttempts
from shardckpt.checkpoint.run.root_position import RootPosition, RootSteps
from shardckpt.checkpoint.run.step_finder import (
    NO_STEP,
    FoundStep,
    PlaceReads,
    StepFinder,
    StepKey,
)
from shardckpt.checkpoint.tiers.capture_tier import TierPlace
from shardckpt.checkpoint.tiers.part_finder import TierFault, select_faults
from shardckpt.checkpoint.tiers.peer_memory import find_node
from shardckpt.checkpoint.tiers.tier_steps import (
    Capture,
    TierReads,
    choose_newest,
    describe_missing_captures,
    drop_capture,
    find_attempt,
    find_unknown,
    list_node_copies,
    open_own,
    read_captures,
    read_own_capture,
    read_tier,
    report_step,
)
from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError
from shardckpt.events import FallbackEvent, OnEvent, emit
from shardckpt.events.warn_user import warn_user
from shardckpt.format.durability.run_record import NOTHING_LOST, RECORD
from shardckpt.format.durability.step_copies import (
    LOCAL,
    MEMORY,
    StepCopy,
    decode_durability,
    encode_copies,
    find_survived,
)
from shardckpt.format.native.commit import find_save
from shardckpt.format.native.run_directory import (
    AFTER,
    StepFolder,
    read_about,
    step_name,
)

_LOG = logging.getLogger("shardckpt")


class TieredFinder(StepFinder):
    """Finder of the steps of a run with tiers.

    Args:
        root: Path or URL of the run's folder.
        group: Process group of the ranks; None for all ranks.
        places: The tiers, the nearest first.
        on_event: Called with the event of a root that was emptied; None without a callback.

    Attributes:
        position: Steps of the root that this process knows; None before it has looked. On rank 0.
        last_start: The start of the run that captured last. On rank 0.
        own: Attempts to save steps that this process made or restored. On rank 0.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        group: dist.ProcessGroup | None,
        places: Sequence[TierPlace],
        on_event: OnEvent | None = None,
    ) -> None:
        super().__init__(root, group)
        self._places = tuple(places)
        for place in self._places:
            place.finder.tier = place.name
        self.has_other_places = True
        self.position: RootPosition | None = None
        local = next((place.finder.root for place in self._places if place.name == LOCAL), "")
        self.last_start = LastStart(super().open_store, local)
        self.own = OwnAttempts()
        self._on_event = on_event
        self._least_branch = 0
        self._found: FoundStep | None = None
        self._is_root_in_doubt = False
        self._damaged_files: frozenset[str] = frozenset()
        self._node_faults: Sequence[NodeFault] = ()
        self._has_peers = False
        self._logged = ""

    def find_on_rank0(
        self, wanted: int | None, passed: Collection[StepKey], avoided: Collection[tuple[int, int]] = ()
    ) -> FoundStep:
        """Return the newest step that can be loaded, in a tier or in the root. On rank 0."""
        root, state = super().find_on_rank0(wanted, passed, avoided), RootSteps.from_run(super().read())
        if self.position is not None:
            self._follow_root(state)
        # A save that is under way in the root may complete behind the next captures.
        self.position = (self.position or RootPosition())._replace(committed=state.newest)
        self.last_start.read()
        captures: list[Capture] = []
        unused: set[str] = set()
        for place in self._places:
            captures += (here := self._drop_captures_of_another_run(place, state, passed))
            unused |= find_unknown(here, self.last_start, self.root) if place.name == MEMORY else set()
        unused |= {each.save for each in captures if not each.is_of_run}
        self.last_start.add_found(each.attempt for each in captures if each.save not in unused)
        left_out = unused.union(self._find_replaced(captures, wanted, passed))
        faults: dict[str, Sequence[TierFault]] = {}

        def find(place: TierPlace) -> FoundStep:
            run = place.finder.read()
            faults[place.name] = place.finder.list_faults(run, self._node_faults)
            unwanted = {(place.finder.path(step.name), step.save) for step in run.complete if step.save in left_out}
            return place.finder.find_on_rank0(wanted, {*unwanted, *passed}, avoided)._replace(faults=[], unreadable="")

        held = [read_tier(place, partial(find, place), FoundStep([])) for place in self._places]
        found = choose_newest([*held, root])
        self._least_branch = self.last_start.find_least_branch(each.attempt for each in captures)
        if self._least_branch:
            self._log_missing_captures()
        self.own.note_found(found.number, found.order, *find_attempt(found, captures, state.steps.get(found.order)))
        self._found = found
        passed_over = select_faults(faults, found, self.find_finder(found.path).tier, wanted)
        return found._replace(branch=max(found.branch, self._least_branch), tier_faults=passed_over)

    def _check_found(self) -> None:
        """Claim no copies of a step that was found, if another job has replaced it: that may be what was loaded."""
        found, save = self._found, None
        if found is None or found.save is None:  # on other ranks, or without a step
            return
        with suppress(ShardckptError):
            save = find_save(self.find_finder(found.path).open_store(), found.name)
        if save != found.save:
            self.own.forget_saves()

    def _log_missing_captures(self) -> None:
        """Log once that no capture of the last start is here. On rank 0."""
        text = describe_missing_captures(self._places, self.root)
        if text != self._logged:
            self._logged = text
            _LOG.warning("%s", text)

    def find_position(self) -> RootPosition:
        """Return the steps of the root that this process knows; read them if it has not looked. On rank 0."""
        if self.position is None:
            self.position = RootPosition(super().find_on_rank0(None, ()).newest)
        return self.position

    def look_at_root(self) -> None:
        """Look if the root still has the record of the run and its newest step: one list. On rank 0, in the background.

        If it has not, the next save reads it, and records there that this start goes on.
        """
        position = self.position or RootPosition()
        needed = {RECORD, *([step_name(position.committed[1])] if position.committed != NO_STEP else [])}
        with suppress(ShardckptError):  # a root that cannot be listed is seen by the saves into it
            if not needed <= {entry.name for entry in super().open_store().list()}:
                self._is_root_in_doubt = True

    def check_root(self) -> None:
        """Read the root if `look_at_root` missed something there, and record again what was lost. On rank 0."""
        if self._is_root_in_doubt:
            self._is_root_in_doubt, self.last_start.is_in_doubt = False, True
            with suppress(ShardckptError):  # without its record nothing is captured
                self._follow_root(RootSteps.from_run(super().read()))

    def _follow_root(self, root: RootSteps) -> None:
        """Record that this start goes on, if the root has lost all its steps meanwhile. On rank 0."""
        committed = self.find_position().committed
        if not root.is_empty or (committed == NO_STEP and self.last_start.lost == NOTHING_LOST):
            return
        text = f"all steps in {self.root} are gone while the run goes on"
        try:
            if self.last_start.record_lost(committed):
                text += ": what this start has captured is restored all the same, unless its record there goes too"
            elif not self.last_start.is_recorded and committed != NO_STEP:  # it has captured nothing that follows these
                text += ": its captures follow the empty root from now on"
                self.position = self.find_position()._replace(committed=NO_STEP)
            else:
                return
            emit(FallbackEvent(self.root, warnings=(text,)), self._on_event)
            warn_user(text)
        except ShardckptError as error:
            _LOG.warning("%s, and it cannot be recorded that captures are still needed: %s", text, error)

    def _find_replaced(
        self, captures: Sequence[Capture], wanted: int | None, passed: Collection[StepKey]
    ) -> Collection[str]:
        """Return the saves of captures for which those of the last start count. On rank 0.

        Args:
            captures: Captures of all tiers.
            wanted: Number of the step that is looked for; None for any.
            passed: Copies that were tried already.
        """
        tried = {save for _, save in passed}
        untried = [each for each in captures if each.is_of_run and each.save not in tried]
        matching = [each for each in untried if wanted in (None, each.order[1])]
        return self.last_start.find_replaced({each.save: (each.order, each.attempt) for each in matching})

    def _drop_captures_of_another_run(
        self, place: TierPlace, root: RootSteps, passed: Collection[StepKey]
    ) -> list[Capture]:
        """Delete the captures of a tier that do not belong to the steps of the root; return all that it had."""
        captures = list[Capture]()
        for step, text in read_tier(place, partial(read_captures, place), list[tuple[StepFolder, str]]()):
            order = (step.branch, step.number)
            is_of_run, is_in_root = self._compare(order, text, root, passed)
            captures.append(Capture(step.save, order, text, is_of_run, is_in_root))
            if not is_of_run and not (order in root.steps and captures[-1].is_overwrite):  # that step may be damaged
                drop_capture(place, step, self.root)
        return captures

    def _compare(
        self, order: tuple[int, int], after: str, root: RootSteps, passed: Collection[StepKey] = ()
    ) -> tuple[bool, bool]:
        """Compare a capture with the steps of the root. On rank 0.

        Args:
            order: Branch and number of its step.
            after: Text of its `RootPosition`; other text if it has none.
            root: Steps of the root now.
            passed: Copies that were tried already, and are damaged.

        Returns:
            Whether it belongs to them, so that a restore may load it, and whether one comes from the same attempt.
        """
        position = RootPosition.decode(after)
        if position is None:
            return True, False
        if order in root.steps:  # the root may have it from a process that did not know of the capture
            step = root.steps[order]
            if position.committed == order and (self.path(step.name), step.save) in passed:
                return True, False  # an overwrite that the root does not have
            is_same = self._is_same_attempt(step, after)
            return (order in position if is_same is None else is_same), is_same is True
        if order < root.newest or position.leads_to(root.newest, is_empty=root.is_empty):
            return True, False  # under a newer step of the root it is never the newest
        return root.is_empty and self.last_start.has_lost(position.committed, RootPosition.read_attempt(after)), False

    def _is_same_attempt(self, step: StepFolder, text: str) -> bool | None:
        """Return True if a step of the root and a capture come from one attempt to save. On rank 0.

        Args:
            step: The step of the root.
            text: Position that the capture has.

        Returns:
            None if the step of the root is damaged: then captures of all attempts that the run began to save in the
            root belong to it.

        Raises:
            StorageError: The root cannot be read now: the capture may be older than the step there.
        """
        try:
            return read_about(super().open_store(), step).get(AFTER) == text
        except (CheckpointError, MissingFileError):
            return None

    def find_finder(self, path: str) -> StepFinder:
        """Return the finder of the place that a step is in."""
        run = path.rpartition("/")[0]
        return next((place.finder for place in self._places if place.finder.root == run), self)

    def locate_damage(self, path: str, text: str) -> str:
        """Return the fault of a step with the place where it is; those of several nodes have it."""
        place = self.find_finder(path)
        is_of_root, here = place is self, f"{place.tier} tier on the node of rank 0, {platform.node()}"
        return text if is_of_root or self._has_peers else f"{here}: {text}"

    def list_keys(self) -> list[StepKey]:
        """Return the keys of the complete steps in the tiers and in the root. On rank 0."""
        held = [read_tier(place, place.finder.list_keys, list[StepKey]()) for place in self._places]
        return [*chain.from_iterable(held), *super().list_keys()]

    def newest_branch(self) -> int:
        """Return the branch of the newest complete step, in a tier or in the root. On rank 0."""
        held = [read_tier(place, place.finder.newest_branch, 0) for place in self._places]
        return max(*held, super().newest_branch(), self._least_branch)

    @contextmanager
    def open_places(self) -> Iterator[PlaceReads]:
        """Read the steps that nodes and tiers have together, within the context. Collective."""
        tiers = [NodeTier(place.name, place.finder.root, partial(open_own, place)) for place in self._places]
        with ExitStack() as stack:
            opened = stack.enter_context(open_peers(tiers, find_node(), self.group))
            self._node_faults, self._has_peers = opened.node_faults, bool(opened.stores)
            if not opened.stores:
                yield PlaceReads()
                self._check_found()
                return
            for place in self._places:
                stack.enter_context(place.finder.at(opened.stores[place.name].url))
            reads = TierReads(opened)
            yield reads
            self._check_found()
            self._damaged_files |= reads.damaged

    def find_copies(self, number: int) -> Sequence[StepCopy]:
        """Return the complete copies of a step, the nearest first. Collective.

        If this process has saved or restored the step, only the copies of that attempt count: a copy of an earlier
        save, or of another job, has another state. A capture that a new process would not find, or would drop, is none.
        """
        folder = step_name(number)
        reports = [report_step(place, folder, self._damaged_files).encode().decode() for place in self._places]
        removed = [[save for save, of in list(place.finder.removed.items()) if of == number] for place in self._places]

        def decide(messages: list[bytes]) -> list[bytes]:
            decoded = [json.loads(message) for message in messages]
            for _, removed_there in decoded:
                for place, saves in zip(self._places, removed_there, strict=True):
                    place.finder.removed.update(dict.fromkeys(saves, number))
            parts = [[NodeReport.decode(text.encode()) for text in texts] for texts, _ in decoded]
            catalogs = [NodeCatalog.from_reports(column) for column in zip(*parts, strict=True)]
            return [json.dumps(encode_copies(self._list_all_copies(number, catalogs))).encode()] * len(messages)

        coordinator, message = get_channels(self.group).main, json.dumps([reports, removed]).encode()
        answer = coordinator.coordinate(f"asking for copies of {self.root}", message, decide)
        return decode_durability(number, json.loads(answer)).copies

    def _list_all_copies(self, number: int, catalogs: Sequence[NodeCatalog]) -> list[StepCopy]:
        """Return the complete copies of a step, from what the nodes have of it in each tier. On rank 0."""
        held: list[StepCopy] = []
        for place, catalog in zip(self._places, catalogs, strict=True):
            held += read_tier(place, partial(list_node_copies, place, catalog, number), [])
        run = super().read()
        root, own = RootSteps.from_run(run), self.own.find(number)
        if own is not None:
            held = [copy for copy in held if copy.save in own.saves]
        if held:
            self._follow_root(root)
        kept = [copy for copy in held if self._is_found_again(number, copy, root)]
        if not find_survived(self.root, mounts=""):  # a new process finds an empty root, and drops captures
            kept = [replace(copy, survives=()) for copy in kept]
        copies = [*kept, *self.select_copies(run, number)]
        return [copy for copy in copies if own is None or copy.save in own.saves]

    def _is_found_again(self, number: int, copy: StepCopy, root: RootSteps) -> bool:
        """Return True if a new start would not drop a copy of a step in a tier. On rank 0."""
        own = self.own.find(number)
        if own is None:
            place = next(place for place in self._places if place.name == copy.tier)
            order, after = read_tier(place, partial(read_own_capture, place, number), (NO_STEP, ""))
            return order != NO_STEP and self._compare(order, after, root)[0]
        is_own = own.order in root.steps and root.steps[own.order].save in own.saves
        return is_own or self._compare(own.order, own.after, root)[0]
