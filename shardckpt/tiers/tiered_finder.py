"""Find the newest step that can be loaded, in a tier or in the root."""

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

from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.checkpoint.run.step_finder import FoundStep, PlaceReads, StepFinder, StepKey
from shardckpt.errors import ShardckptError
from shardckpt.events.warn_user import warn_user
from shardckpt.native.commit import find_save
from shardckpt.native.run_directory import RunDirectory, StepFolder, step_name
from shardckpt.native.run_record import select_captures
from shardckpt.native.step_copies import (
    LOCAL,
    StepCopy,
    decode_durability,
    encode_copies,
    find_survived,
)
from shardckpt.ranks.process_group import get_ranks
from shardckpt.tiers.capture_tier import TierPlace
from shardckpt.tiers.part_finder import TierFault, select_faults
from shardckpt.tiers.peer_memory import find_node
from shardckpt.tiers.peers.node_files import NodeCatalog, NodeReport, find_sharing_hosts
from shardckpt.tiers.peers.open_peers import NodeFault, NodeTier, open_peers
from shardckpt.tiers.tier_steps import (
    TierReads,
    choose_newest,
    describe_missing_captures,
    describe_other_run,
    find_earlier_saves,
    find_identity,
    list_node_copies,
    list_saves,
    open_own,
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
        lineage: Lineage,
    ) -> None:
        super().__init__(root, group, lineage)
        self._places, self._run_lineage = tuple(places), lineage
        self.has_other_places = True
        self.own = OwnSaves()  # saves that this process made or restored; on rank 0
        self._found: FoundStep | None = None
        self._damaged_files: frozenset[str] = frozenset()
        self._node_faults: Sequence[NodeFault] = ()
        self._has_peers = False
        self._logged, self._has_warned = set[str](), False

    def find_on_rank0(
        self, wanted: int | None, passed: Collection[StepKey], avoided: Collection[tuple[int, int]] = ()
    ) -> FoundStep:
        """Return the newest step that can be loaded, in a tier or in the root. On rank 0."""
        root, found_root = super().read(), super().find_on_rank0(wanted, passed, avoided)
        runs = {place.name: read_tier(place, place.finder.read, RunDirectory((), ())) for place in self._places}
        captures = [step for run in runs.values() for step in run.complete]
        usable = select_captures(captures, self._run_lineage.start_restore(root, captures))
        self._log_captures(captures, usable, root)
        saves = {step.save for step in usable}
        faults: dict[str, Sequence[TierFault]] = {}

        def find(place: TierPlace) -> FoundStep:
            run = place.finder.read()
            faults[place.name] = place.finder.list_faults(run, self._node_faults)
            unwanted = {(place.finder.path(step.name), step.save) for step in run.complete if step.save not in saves}
            return place.finder.find_on_rank0(wanted, {*unwanted, *passed}, avoided)._replace(faults=[], unreadable="")

        held = [read_tier(place, partial(find, place), FoundStep([])) for place in self._places]
        found = choose_newest([*held, found_root], find_earlier_saves([*usable, *root.complete]))
        self.own.note_found(found.number, find_identity(found.save or "", found.mark))
        self._found = found
        passed_over = select_faults(faults, found, self.find_finder(found.path).tier, wanted)
        return found._replace(tier_faults=passed_over)

    def _check_found(self) -> None:
        """Claim no copies of the found step if another job has replaced it, and perhaps that was loaded."""
        found, save = self._found, None
        if found is None or found.save is None:  # on other ranks, or without a step
            return
        with suppress(ShardckptError):
            save = find_save(self.find_finder(found.path).open_store(), found.name)
        if save != found.save:
            self.own.note_found(found.number, "")

    def _log_captures(self, captures: Sequence[StepFolder], usable: Sequence[StepFolder], root: RunDirectory) -> None:
        """Log once that captures are from another run, or missing. On rank 0."""
        texts = [describe_other_run(self.root)] if len(usable) < len(captures) else []
        if self._run_lineage.has_lost_last_start(step.branch for step in (*usable, *root.steps)):
            texts.append(describe_missing_captures(self._places, self.root))
        for text in texts:
            if text not in self._logged:
                self._logged.add(text)
                _LOG.warning("%s", text)

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
        return max(*held, super().newest_branch())

    @contextmanager
    def open_places(self) -> Iterator[PlaceReads]:
        """Within the context, read the steps that nodes and tiers have together. Collective."""
        tiers = [NodeTier(place.name, place.finder.root, partial(open_own, place)) for place in self._places]
        with ExitStack() as stack:
            opened = stack.enter_context(open_peers(tiers, find_node(), self.group, self._find_run))
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

    def _find_run(self) -> str:
        """Return the id of the run whose captures count. On rank 0."""
        return self._run_lineage.find_run(super().read())

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
            self._warn_of_shared_folder(parts)
            copies = self._list_all_copies(number, [*zip(*parts, strict=True)])
            return [json.dumps(encode_copies(copies)).encode()] * len(messages)

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

    def _list_all_copies(self, number: int, reports: Sequence[Sequence[NodeReport]]) -> list[StepCopy]:
        """Return a step's complete copies, from the nodes' reports about each tier. On rank 0."""
        own = self.own.find(number)
        held = list[tuple[StepCopy, StepFolder]]()
        for place, of_nodes in zip(self._places, reports, strict=True):
            saves = list_saves(of_nodes, number)
            # Copies of an earlier save, or of another job, have another state: only this process's save counts.
            wanted = [step.save for step in saves.values() if own in (None, _identify(step))]
            catalog = NodeCatalog.from_reports(of_nodes, {step_name(number): wanted})
            copies = read_tier(place, partial(list_node_copies, place, catalog, number), list[StepCopy]())
            held += [(copy, saves[copy.save]) for copy in copies]
        run = super().read()
        if held:
            self._run_lineage.follow(run)
        usable = self._run_lineage.select_found_again([step for _, step in held], run)
        last = {step.save for step in usable} - find_earlier_saves([*usable, *run.complete])
        kept = [copy for copy, _ in held if copy.save in last]
        if not find_survived(self.root, mounts=""):  # a new process finds an empty root, and uses no captures
            kept = [replace(copy, survives=()) for copy in kept]
        known = {step.save: _identify(step) for step in (*usable, *run.complete)}
        return [
            copy for copy in (*kept, *self.select_copies(run, number)) if own is None or known.get(copy.save) == own
        ]


def _identify(step: StepFolder) -> str:
    return find_identity(step.save, step.mark)


_MAX_REMEMBERED = 4096  # maximum number of steps whose last saves are remembered


class OwnSaves:
    """The last save of each step that this process saved or restored, by `find_identity`."""

    def __init__(self) -> None:
        self._by_number: dict[int, str] = {}
        self._found: tuple[int, str] | None = None

    def find(self, number: int) -> str | None:
        """Return a step's save; None if this process neither saved nor restored it."""
        return self._by_number.get(number)

    def record(self, number: int, save: str) -> None:
        """Record that a step is saved now: other copies with its number have another state."""
        self._by_number.pop(number, None)
        self._by_number[number] = save
        if len(self._by_number) > _MAX_REMEMBERED:
            del self._by_number[next(iter(self._by_number))]

    def note_found(self, number: int, save: str) -> None:
        """Record the step that a restore found, and may load; empty text if another job replaced it meanwhile."""
        self._found = number, save

    def record_restore(self, number: int) -> None:
        """Record that a step was restored: only copies of the save found last have its state."""
        if self._found is not None and self._found[0] == number:
            self.record(*self._found)
