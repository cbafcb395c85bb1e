"""Find the newest step that can be loaded, in a tier or in the root."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch.distributed as dist

from shardckpt.checkpoint.run.step_finder import (
    NO_STEP,
    FoundStep,
    PlaceReads,
    StepFinder,
    StepKey,
)
from shardckpt.errors import ShardckptError
from shardckpt.events import OnEvent
from shardckpt.events.warn_user import warn_user
from shardckpt.native.commit import find_save
from shardckpt.native.run_directory import (
    StepFolder,
    step_name,
)
from shardckpt.native.step_copies import (
    LOCAL,
    MEMORY,
    StepCopy,
    decode_durability,
    encode_copies,
    find_survived,
)
from shardckpt.ranks.process_group import get_ranks
from shardckpt.tiers.capture_tier import TierPlace
from shardckpt.tiers.lineage.known_root import KnownRoot
from shardckpt.tiers.lineage.root_position import RootSteps
from shardckpt.tiers.part_finder import TierFault, select_faults
from shardckpt.tiers.peer_memory import find_node
from shardckpt.tiers.peers.node_files import NodeCatalog, NodeReport, find_sharing_hosts
from shardckpt.tiers.peers.open_peers import NodeFault, NodeTier, open_peers
from shardckpt.tiers.tier_steps import (
    Capture,
    TierReads,
    choose_newest,
    describe_missing_captures,
    drop_capture,
    find_attempt,
    find_earlier_attempts,
    find_unknown,
    list_node_copies,
    open_own,
    read_captures,
    read_own_capture,
    read_tier,
    report_step,
)

_LOG = logging.getLogger("shardckpt")

_MAX_HOSTS = 10  # machines that a warning names


class TieredFinder(StepFinder):
    """Finds steps in a run with tiers."""

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
        local = next((place.finder.root for place in self._places if place.name == LOCAL), "")
        self.known = KnownRoot(self, local, on_event)  # on rank 0
        self.own = OwnAttempts()  # attempts that this process made or restored; on rank 0
        self._least_branch = 0
        self._found: FoundStep | None = None
        self._damaged_files: frozenset[str] = frozenset()
        self._node_faults: Sequence[NodeFault] = ()
        self._has_peers = False
        self._logged, self._has_warned = "", False

    def find_on_rank0(
        self, wanted: int | None, passed: Collection[StepKey], avoided: Collection[tuple[int, int]] = ()
    ) -> FoundStep:
        """Return the newest step that can be loaded, in a tier or in the root. On rank 0."""
        root, state = super().find_on_rank0(wanted, passed, avoided), RootSteps.from_run(super().read())
        self.known.begin_restore(state)
        last_start = self.known.last_start
        captures: list[Capture] = []
        unused: set[str] = set()
        seen: dict[str, set[str]] = {}
        for place in self._places:
            captures += (here := self._drop_captures_of_another_run(place, state, passed))
            seen[place.name] = {each.save for each in here}
            unused |= find_unknown(here, last_start, self.root) if place.name == MEMORY else set()
        unused |= {each.save for each in captures if not each.is_of_run}
        last_start.add_found(each.attempt for each in captures if each.save not in unused)
        left_out = unused.union(self._find_replaced(captures, wanted, passed))
        faults: dict[str, Sequence[TierFault]] = {}

        def find(place: TierPlace) -> FoundStep:
            run = place.finder.read()
            faults[place.name] = place.finder.list_faults(run, self._node_faults)
            usable = seen[place.name] - left_out  # others are unknown: that tier could not be read before
            unwanted = {(place.finder.path(step.name), step.save) for step in run.complete if step.save not in usable}
            return place.finder.find_on_rank0(wanted, {*unwanted, *passed}, avoided)._replace(faults=[], unreadable="")

        held = [read_tier(place, partial(find, place), FoundStep([])) for place in self._places]
        found = choose_newest([*held, root], find_earlier_attempts(captures))
        self._least_branch = last_start.find_least_branch(each.attempt for each in captures)
        if self._least_branch:
            self._log_missing_captures()
        self.own.note_found(found.number, found.order, *find_attempt(found, captures, state.steps.get(found.order)))
        self._found = found
        passed_over = select_faults(faults, found, self.find_finder(found.path).tier, wanted)
        return found._replace(branch=max(found.branch, self._least_branch), tier_faults=passed_over)

    def _check_found(self) -> None:
        """Claim no copies of the found step if another job has replaced it, and perhaps that was loaded."""
        found, save = self._found, None
        if found is None or found.save is None:  # on other ranks, or without a step
            return
        with suppress(ShardckptError):
            save = find_save(self.find_finder(found.path).open_store(), found.name)
        if save != found.save:
            self.own.forget_saves()

    def _log_missing_captures(self) -> None:
        """Log once that the last start's captures are missing. On rank 0."""
        text = describe_missing_captures(self._places, self.root)
        if text != self._logged:
            self._logged = text
            _LOG.warning("%s", text)

    def _find_replaced(
        self, captures: Sequence[Capture], wanted: int | None, passed: Collection[StepKey]
    ) -> Collection[str]:
        """Return the saves of captures that the last start's captures replace. On rank 0."""
        tried = {save for _, save in passed}
        untried = [each for each in captures if each.is_of_run and each.save not in tried]
        matching = [each for each in untried if wanted in (None, each.order[1])]
        return self.known.last_start.find_replaced({each.save: (each.order, each.attempt) for each in matching})

    def _drop_captures_of_another_run(
        self, place: TierPlace, root: RootSteps, passed: Collection[StepKey]
    ) -> list[Capture]:
        """Delete captures in a tier that do not belong to the root's steps; return all that it had."""
        captures = list[Capture]()
        for step, text in read_tier(place, partial(read_captures, place), list[tuple[StepFolder, str]]()):
            order = (step.branch, step.number)
            is_of_run, is_in_root = self.known.compare(order, text, root, passed)
            captures.append(Capture(step.save, order, text, is_of_run, is_in_root))
            if not is_of_run and not (order in root.steps and captures[-1].is_overwrite):  # that step may be damaged
                drop_capture(place, step, self.root)
        return captures

    def find_finder(self, path: str) -> StepFinder:
        """Return the finder for the place that a step is in."""
        run = path.rpartition("/")[0]
        return next((place.finder for place in self._places if place.finder.root == run), self)

    def locate_damage(self, path: str, text: str) -> str:
        """Return a step's fault with its place, unless it has the places already, as with several nodes."""
        place = self.find_finder(path)
        is_of_root, here = place is self, f"{place.tier} tier on the node of rank 0, {platform.node()}"
        return text if is_of_root or self._has_peers else f"{here}: {text}"

    def list_keys(self) -> list[StepKey]:
        """Return the keys for complete steps in the tiers and in the root. On rank 0."""
        held = [read_tier(place, place.finder.list_keys, list[StepKey]()) for place in self._places]
        return [*chain.from_iterable(held), *super().list_keys()]

    def newest_branch(self) -> int:
        """Return the newest complete step's branch, in a tier or in the root. On rank 0."""
        held = [read_tier(place, place.finder.newest_branch, 0) for place in self._places]
        return max(*held, super().newest_branch(), self._least_branch)

    @contextmanager
    def open_places(self) -> Iterator[PlaceReads]:
        """Within the context, read the steps that nodes and tiers have together. Collective."""
        tiers = [NodeTier(place.name, place.finder.root, partial(open_own, place)) for place in self._places]
        with ExitStack() as stack:
            opened = stack.enter_context(open_peers(tiers, find_node(), self.group, self.known.choose_saves))
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
        """Return a step's complete copies, the nearest first. Collective."""
        folder = step_name(number)
        reports = [report_step(place, folder, self._damaged_files).encode().decode() for place in self._places]
        removed = [[save for save, of in list(place.finder.removed.items()) if of == number] for place in self._places]

        def decide(messages: list[bytes]) -> list[bytes]:
            decoded = [json.loads(message) for message in messages]
            for _, removed_there in decoded:
                for place, saves in zip(self._places, removed_there, strict=True):
                    place.finder.removed.update(dict.fromkeys(saves, number))
            parts = [[NodeReport.decode(text.encode()) for text in texts] for texts, _ in decoded]
            # Copies of an earlier save, or of another job, have another state: only this process's attempt counts.
            own = self.own.find(number)
            wanted = {} if own is None else {folder: own.saves}
            self._warn_of_shared_folder(parts)
            catalogs = [NodeCatalog.from_reports(column, wanted) for column in zip(*parts, strict=True)]
            return [json.dumps(encode_copies(self._list_all_copies(number, catalogs))).encode()] * len(messages)

        coordinator, message = get_ranks(self.group), json.dumps([reports, removed]).encode()
        answer = coordinator.ask_rank0(f"asking for copies of {self.root}", message, decide)
        return decode_durability(number, json.loads(answer)).copies

    def _warn_of_shared_folder(self, parts: Sequence[Sequence[NodeReport]]) -> None:
        """Warn once if machines share the folder of `Local`. On rank 0."""
        for place, reports in zip(self._places, zip(*parts, strict=True), strict=True):
            hosts = [] if self._has_warned or place.name != LOCAL else find_sharing_hosts(reports)
            if hosts:
                self._has_warned = True
                warn_user(
                    f"machines share the folder of Local, {place.finder.root}: its steps are one copy, and do not "
                    "survive a lost machine. Choose a folder on each machine's own disk, or save into the root. "
                    f"Machines: {', '.join(hosts[:_MAX_HOSTS])}"
                )

    def _list_all_copies(self, number: int, catalogs: Sequence[NodeCatalog]) -> list[StepCopy]:
        """Return a step's complete copies, from the nodes' reports about each tier. On rank 0."""
        held: list[StepCopy] = []
        for place, catalog in zip(self._places, catalogs, strict=True):
            held += read_tier(place, partial(list_node_copies, place, catalog, number), [])
        run = super().read()
        root, own = RootSteps.from_run(run), self.own.find(number)
        saves = self._find_last_saves(number, held) if own is None else own.saves
        held = [copy for copy in held if copy.save in saves]
        if held:
            self.known.follow(root)
        kept = [copy for copy in held if self._is_found_again(number, copy, root)]
        if not find_survived(self.root, mounts=""):  # a new process finds an empty root, and drops captures
            kept = [replace(copy, survives=()) for copy in kept]
        copies = [*kept, *self.select_copies(run, number)]
        return [copy for copy in copies if own is None or copy.save in own.saves]

    def _find_last_saves(self, number: int, held: Sequence[StepCopy]) -> set[str]:
        """Return each start's last save with copies of a step: a restore takes it. On rank 0."""
        captures = [Capture(copy.save, *self._read_capture(number, copy.tier)) for copy in held]
        return {copy.save for copy in held} - find_earlier_attempts(captures)

    def _read_capture(self, number: int, tier: str) -> tuple[tuple[int, int], str]:
        """Return a capture's order in a tier, and its position as text; `NO_STEP` if it cannot be read."""
        place = next(place for place in self._places if place.name == tier)
        return read_tier(place, partial(read_own_capture, place, number), (NO_STEP, ""))

    def _is_found_again(self, number: int, copy: StepCopy, root: RootSteps) -> bool:
        """Return True if a new start would keep a step's copy in a tier. On rank 0."""
        own = self.own.find(number)
        if own is None:
            order, after = self._read_capture(number, copy.tier)
            return order != NO_STEP and self.known.compare(order, after, root)[0]
        is_own = own.order in root.steps and root.steps[own.order].save in own.saves
        return is_own or self.known.compare(own.order, own.after, root)[0]


_MAX_REMEMBERED = 4096  # maximum number of steps whose last attempts are remembered


@dataclass
class OwnAttempt:
    """An attempt to save a step."""

    order: tuple[int, int] = NO_STEP  # branch and number of the step
    after: str = ""  # text of `RootPosition.encode` that its captures have; empty if it has none
    saves: set[str] = field(default_factory=set)  # ids of its saves: its capture, and its save in the root


class OwnAttempts:
    """The last attempt for each step that this process saved or restored."""

    def __init__(self) -> None:
        self._by_number: dict[int, OwnAttempt] = {}
        self._found: tuple[int, OwnAttempt] | None = None

    def find(self, number: int) -> OwnAttempt | None:
        """Return a step's attempt; None if this process neither saved nor restored it."""
        return self._by_number.get(number)

    def begin(self, order: tuple[int, int], after: str) -> None:
        """Record that a step is saved now: other copies with its number have another state."""
        self._set(order[1], OwnAttempt(order, after))

    def add_save(self, number: int, save: str) -> None:
        """Record the id of a started save of a step."""
        self._by_number.setdefault(number, OwnAttempt()).saves.add(save)

    def note_found(self, number: int, order: tuple[int, int], after: str, saves: Collection[str]) -> None:
        """Record the attempt for a step that a restore found, and may load."""
        self._found = number, OwnAttempt(order, after, {*saves})

    def forget_saves(self) -> None:
        """Record that the step found last is from another attempt now: it may be the one that is loaded."""
        if self._found is not None:
            self._found[1].saves.clear()

    def restore(self, number: int) -> None:
        """Record that a step was restored: only copies from the attempt found last have its state."""
        if self._found is not None and self._found[0] == number:
            self._set(*self._found)

    def _set(self, number: int, attempt: OwnAttempt) -> None:
        self._by_number.pop(number, None)
        self._by_number[number] = attempt
        if len(self._by_number) > _MAX_REMEMBERED:
            del self._by_number[next(iter(self._by_number))]
