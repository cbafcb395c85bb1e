"""Find the steps of a run with tiers: the newest one that can be loaded, in a tier or in the root."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from shardckpt.checkpoint.coordinator import get_channels
from shardckpt.checkpoint.peers.node_files import NodeCatalog, NodeReport, report_files
from shardckpt.checkpoint.peers.open_peers import NodeTier, OpenedTiers, open_peers
from shardckpt.checkpoint.run.last_start import LastStart
from shardckpt.checkpoint.run.step_finder import (
    NO_STEP,
    FoundStep,
    PlaceReads,
    StepFinder,
    StepKey,
    find_next_branch,
)
from shardckpt.checkpoint.tiers.capture_tier import TierPlace
from shardckpt.checkpoint.tiers.peer_memory import find_node
from shardckpt.errors import CheckpointError, MissingFileError, RankError, ShardckptError
from shardckpt.format.durability.step_copies import (
    FAILURES,
    StepCopy,
    decode_durability,
    describe_copy,
    encode_copies,
)
from shardckpt.format.native.run_directory import AFTER, StepFolder, delete_steps, read_about, step_name
from shardckpt.storage.store import Store

_LOG = logging.getLogger("shardckpt")


def choose_newest(found: Sequence[FoundStep]) -> FoundStep:
    """Return the newest of some steps; of equal ones the nearest.

    Args:
        found: Newest step of each place that can be loaded, the nearest first, that of the root last.
    """
    root, newest = found[-1], max(each.newest for each in found)
    loadable = [each for each in found if each.save is not None]
    if not loadable:
        return root._replace(newest=newest)
    chosen = max(loadable, key=lambda each: each.order)  # the first of equal ones
    branch = find_next_branch(chosen.order, newest)
    return chosen._replace(faults=root.faults, unreadable=root.unreadable, branch=branch, newest=newest)


_MOST_STARTED = 4096
"""Maximum number of steps whose last saves are remembered."""


class RootPosition(NamedTuple):
    """Steps of the root that a run knows: its captures follow them.

    Attributes:
        committed: Order of the newest complete step.
        started: Order of the step whose save was started last; it may be complete meanwhile.
    """

    committed: tuple[int, int] = NO_STEP
    started: tuple[int, int] = NO_STEP

    def encode(self, attempt: str) -> str:
        """Return the position as text, for the custom metadata of a capture and of the same step in the root.

        Args:
            attempt: Text that no other save has, from `LastStart`.
        """
        return json.dumps([*self, attempt])

    @classmethod
    def decode(cls, text: str) -> RootPosition | None:
        """Return the position from the text of `encode`; None for other text."""
        try:
            (branch, number), (started_branch, started), *_ = json.loads(text)
            return cls((int(branch), int(number)), (int(started_branch), int(started)))
        except (ValueError, TypeError):
            return None

    @staticmethod
    def read_attempt(text: str) -> str:
        """Return the attempt from the text of `encode`; empty for other text."""
        try:
            _, _, attempt, *_ = json.loads(text)
            return str(attempt)
        except (ValueError, TypeError):
            return ""

    def leads_to(self, newest: tuple[int, int], *, is_empty: bool) -> bool:
        """Return True if the root is that of this run, or has lost steps since.

        Otherwise it was emptied, or another process saved steps without knowing of the captures: then they belong to
        a course of the training that was given up.

        Args:
            newest: Order of the newest complete step of the root now.
            is_empty: Whether the root has no step, complete or not.
        """
        if newest == NO_STEP:
            return self.committed == NO_STEP or not is_empty
        return newest in self or newest < self.committed


class _Capture(NamedTuple):
    """A capture in a tier, as rank 0 reads it at a restore.

    Attributes:
        save: Id of its save.
        order: Branch and number of its step.
        attempt: Attempt to save that it comes from; empty if unknown.
        is_of_run: Whether it belongs to the steps of the root.
    """

    save: str
    order: tuple[int, int]
    attempt: str
    is_of_run: bool = True


class TierReads(PlaceReads):
    """Reads of this rank from the tiers of all nodes.

    Args:
        opened: The tiers.
    """

    def __init__(self, opened: OpenedTiers) -> None:
        self._opened = opened
        self._before: Mapping[str, int] = {}

    @property
    def tier_bytes(self) -> Mapping[str, int]:
        """Bytes that this rank has read since `reset`, by tier."""
        read = {tier: nbytes - self._before.get(tier, 0) for tier, nbytes in self._opened.tier_bytes.items()}
        return {tier: nbytes for tier, nbytes in read.items() if nbytes}

    @property
    def faults(self) -> tuple[str, ...]:
        """Reasons why this rank read a copy in place of a nearer one."""
        return self._opened.faults

    def reset(self) -> None:
        """Count from here on."""
        self._before = self._opened.tier_bytes


class TieredFinder(StepFinder):
    """Finder of the steps of a run with tiers.

    Args:
        root: Path or URL of the run's folder.
        group: Process group of the ranks; None for all ranks.
        places: The tiers, the nearest first.

    Attributes:
        position: Steps of the root that this process knows; None before it has looked. On rank 0.
        last_start: The start of the run that captured last. On rank 0.
    """

    def __init__(
        self, root: str | os.PathLike[str], group: dist.ProcessGroup | None, places: Sequence[TierPlace]
    ) -> None:
        super().__init__(root, group)
        self._places = tuple(places)
        for place in self._places:
            place.finder.tier = place.name
        self.has_other_places = True
        self.position: RootPosition | None = None
        self.last_start = LastStart(super().open_store)
        self._least_branch = 0
        self._own_saves: dict[int, set[str]] = {}
        self._found_saves: tuple[int, set[str]] | None = None
        self._damaged_files: frozenset[str] = frozenset()

    def find_on_rank0(
        self, wanted: int | None, passed: Collection[StepKey], avoided: Collection[tuple[int, int]] = ()
    ) -> FoundStep:
        """Return the newest step that can be loaded, in a tier or in the root. On rank 0."""
        root = super().find_on_rank0(wanted, passed, avoided)
        self.position = RootPosition(root.newest)
        in_root = {(step.branch, step.number): step for step in super().read().complete}
        captures: list[_Capture] = []

        def find(place: TierPlace) -> FoundStep:
            captures.extend(self._drop_captures_of_another_run(place, root, in_root))
            return place.finder.find_on_rank0(wanted, passed, avoided)._replace(faults=[], unreadable="")

        held = [_read_tier(place, partial(find, place), FoundStep([])) for place in self._places]
        found = choose_newest([*held, root])
        self._least_branch = self.last_start.find_least_branch(each.attempt for each in captures)
        if self._least_branch:
            shown = " or ".join(place.name for place in self._places)
            reason = "its machines are missing, or their holders have ended or do not answer"
            _LOG.warning("no capture of the last start of %s was found in %s: %s", self.root, shown, reason)
        self._found_saves = found.number, _list_saves(found, captures, in_root.get(found.order))
        return found._replace(branch=max(found.branch, self._least_branch))

    def find_position(self) -> RootPosition:
        """Return the steps of the root that this process knows; read them if it has not looked. On rank 0."""
        if self.position is None:
            self.position = RootPosition(super().find_on_rank0(None, ()).newest)
        return self.position

    def _drop_captures_of_another_run(
        self, place: TierPlace, root: FoundStep, in_root: Mapping[tuple[int, int], StepFolder]
    ) -> list[_Capture]:
        """Delete the captures of a tier that do not belong to the steps of the root; return all that it had."""
        captures = []
        store, run = place.finder.open_store(), place.finder.read()
        is_empty = root.newest == NO_STEP and not root.faults
        for step in run.complete:
            order = step.branch, step.number
            text = _read_about(store, step).get(AFTER, "")
            position, capture = RootPosition.decode(text), _Capture(step.save, order, RootPosition.read_attempt(text))
            captures.append(capture)
            if position is None:
                continue
            if order in in_root:  # the root may have it from a process that did not know of the capture
                is_of_run = self._is_same_attempt(in_root[order], text, order in position)
            else:  # under a newer step of the root it is never the newest
                is_of_run = order < root.newest or position.leads_to(root.newest, is_empty=is_empty)
            if not is_of_run:
                shown = f"step {step.number} in {place.finder.root}"
                _LOG.warning("%s does not belong to the steps in %s: dropped", shown, self.root)
                delete_steps(store, run, [step.name])
                captures[-1] = capture._replace(is_of_run=False)
        return captures

    def _is_same_attempt(self, step: StepFolder, text: str, was_started: bool) -> bool:
        """Return True if a step of the root and a capture come from one attempt to save. On rank 0.

        Args:
            step: The step of the root.
            text: Position that the capture has.
            was_started: Whether the process that captured it saved it in the root too, which counts if the step of
                the root is damaged or cannot be read now.
        """
        try:
            return read_about(super().open_store(), step).get(AFTER) == text
        except ShardckptError:
            return was_started

    def find_finder(self, path: str) -> StepFinder:
        """Return the finder of the place that a step is in."""
        run = path.rpartition("/")[0]
        return next((place.finder for place in self._places if place.finder.root == run), self)

    def list_keys(self) -> list[StepKey]:
        """Return the keys of the complete steps in the tiers and in the root. On rank 0."""
        held = [_read_tier(place, place.finder.list_keys, list[StepKey]()) for place in self._places]
        return [*chain.from_iterable(held), *super().list_keys()]

    def newest_branch(self) -> int:
        """Return the branch of the newest complete step, in a tier or in the root. On rank 0."""
        held = [_read_tier(place, place.finder.newest_branch, 0) for place in self._places]
        return max(*held, super().newest_branch(), self._least_branch)

    def record_start(self, number: int) -> None:
        """Record that a step is saved now: other copies of this number have another state. On rank 0."""
        self._own_saves.pop(number, None)
        self._own_saves[number] = set()
        if len(self._own_saves) > _MOST_STARTED:
            del self._own_saves[next(iter(self._own_saves))]

    def record_save(self, number: int, save: str) -> None:
        """Record the id of a save of a step that was started: its capture, or its save in the root. On rank 0."""
        self._own_saves.setdefault(number, set()).add(save)

    def record_restore(self, number: int) -> None:
        """Record that a step was restored: only copies of the attempt that was found last have its state."""
        if self._found_saves is not None and self._found_saves[0] == number:
            self.record_start(number)
            self._own_saves[number] |= self._found_saves[1]

    @contextmanager
    def open_places(self) -> Iterator[PlaceReads]:
        """Read the steps that nodes and tiers have together, within the context. Collective."""
        tiers = [NodeTier(place.name, place.finder.root, partial(_open_own, place)) for place in self._places]
        with ExitStack() as stack:
            opened = stack.enter_context(open_peers(tiers, find_node(), self.group))
            if opened is None:
                yield PlaceReads()
                return
            for place in self._places:
                stack.enter_context(place.finder.at(opened.stores[place.name].url))
            yield TierReads(opened)
            self._damaged_files |= opened.share_rejected(get_channels(self.group).main)

    def find_copies(self, number: int) -> Sequence[StepCopy]:
        """Return the complete copies of a step, the nearest first. Collective.

        If this process has saved or restored the step, only the copies of that attempt count: a copy of an earlier
        save, or of another job, has another state. A capture that a new process would not find is none.
        """
        folder = step_name(number)
        reports = [_report_step(place, folder, self._damaged_files).encode().decode() for place in self._places]

        def decide(messages: list[bytes]) -> list[bytes]:
            parts = [[NodeReport.decode(text.encode()) for text in json.loads(message)] for message in messages]
            catalogs = [NodeCatalog.from_reports(column) for column in zip(*parts, strict=True)]
            return [json.dumps(encode_copies(self._list_all_copies(number, catalogs))).encode()] * len(messages)

        coordinator = get_channels(self.group).main
        answer = coordinator.coordinate(f"asking for copies of {self.root}", json.dumps(reports).encode(), decide)
        return decode_durability(number, json.loads(answer)).copies

    def _list_all_copies(self, number: int, catalogs: Sequence[NodeCatalog]) -> list[StepCopy]:
        """Return the complete copies of a step, from what the nodes have of it in each tier. On rank 0."""
        held: list[StepCopy] = []
        for place, catalog in zip(self._places, catalogs, strict=True):
            held += _read_tier(place, partial(_list_node_copies, place, catalog, number), [])
        copies = [*held, *self.list_copies(number)]
        own = self._own_saves.get(number)
        return [copy for copy in copies if own is None or copy.save in own]


def _list_saves(found: FoundStep, captures: Sequence[_Capture], in_root: StepFolder | None) -> set[str]:
    """Return the ids of all saves of the attempt that a found step comes from.

    Args:
        found: The step.
        captures: Captures in all tiers.
        in_root: Step of the same order in the root, of whose attempt all captures of the run are; None without one.
    """
    of_step = [each for each in captures if each.order == found.order and each.is_of_run and each.attempt]
    attempts = {each.attempt for each in of_step if each.save == found.save or in_root is not None}
    saves = {each.save for each in of_step if each.attempt in attempts}
    return {found.save or "", *saves, *([] if in_root is None else [in_root.save])}


_T = TypeVar("_T")


def _read_tier(place: TierPlace, read: Callable[[], _T], otherwise: _T) -> _T:
    """Return what a function reads from a tier; another value if the tier cannot be read, which is logged once.

    Raises:
        RankError: A rank is lost, whose files another start may read: an older step would be the wrong answer.
    """
    try:
        return read()
    except RankError:
        raise
    except ShardckptError as error:
        if place.finder.logged != str(error):
            place.finder.logged = str(error)
            _LOG.warning("steps in %s cannot be read: %s", place.finder.root, error)
        return otherwise


def _open_own(place: TierPlace) -> Store | None:
    """Return the store of this node's steps in a tier; None if it cannot be opened."""
    return _read_tier(place, place.open_own, None)


def _report_step(place: TierPlace, folder: str, damaged: Collection[str]) -> NodeReport:
    """Return what this rank's node has of a step, if a new process would find it.

    Args:
        place: The tier.
        folder: Name of the step's folder.
        damaged: Files of this node that were found damaged, such as `memory/step-00000010/x`.
    """
    node = place.find_node()

    def report() -> NodeReport:
        found = report_files(place.open_own(), node, [folder])
        if not found.steps or not place.is_found_again():
            return NodeReport(node)
        step = found.steps[folder]
        files = {name: size for name, size in step.files.items() if f"{place.name}/{folder}/{name}" not in damaged}
        return NodeReport(node, {folder: step._replace(files=files)})

    return _read_tier(place, report, NodeReport(node))


def _list_node_copies(place: TierPlace, catalog: NodeCatalog, number: int) -> list[StepCopy]:
    """Return the copy of a step that the nodes have together: it survives one machine fewer than each file is on."""
    folder = step_name(number)
    machines, step = catalog.count_machines(folder), StepFolder(number, folder, save=catalog.saves.get(folder, ""))
    if not machines or not place.finder.is_good(step):
        return []
    return [describe_copy(place.open_own(), step, place.name, FAILURES[:machines])]


def _read_about(store: Store, step: StepFolder) -> Mapping[str, str]:
    """Return the custom metadata of a capture; empty if it is damaged, which a load finds."""
    try:
        return read_about(store, step)
    except (CheckpointError, MissingFileError):
        return {}
