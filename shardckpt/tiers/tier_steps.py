"""A run's captures and copies in its tiers, and reads from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from shardckpt.checkpoint.run.step_finder import FoundStep, PlaceReads, StepFault, find_next_branch
from shardckpt.errors import CheckpointError, MissingFileError, RankError, ShardckptError
from shardckpt.native.run_directory import AFTER, StepFolder, delete_steps, read_about, read_step, step_name
from shardckpt.native.step_copies import FAILURES, StepCopy, describe_copy
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.store import Store
from shardckpt.tiers.capture_tier import TierPlace
from shardckpt.tiers.lineage.last_start import LastStart, read_number, read_start
from shardckpt.tiers.lineage.root_position import RootPosition
from shardckpt.tiers.peers.node_files import NodeCatalog, NodeReport, report_files
from shardckpt.tiers.peers.open_peers import OpenedTiers

_LOG = logging.getLogger("shardckpt")


def choose_newest(found: Sequence[FoundStep], earlier: Collection[str] = ()) -> FoundStep:
    """Return the newest step. Break ties by last attempt, then by nearest tier."""
    root, newest = found[-1], max(each.newest for each in found)
    loadable = [each for each in found if each.save is not None]
    if not loadable:
        return root._replace(newest=newest)
    chosen = max(loadable, key=lambda each: (each.order, each.save not in earlier))  # the first of equal ones
    branch = find_next_branch(chosen.order, newest)
    return chosen._replace(faults=root.faults, unreadable=root.unreadable, branch=branch, newest=newest)


class Capture(NamedTuple):
    """A capture in a tier, as rank 0 reads it at a restore."""

    save: str  # id
    order: tuple[int, int]  # branch and number of the step
    after: str  # text of its `RootPosition`; empty if unknown
    is_of_run: bool = True  # belongs to the steps of the root
    is_in_root: bool = False  # the root has a step of this order from the same attempt

    @property
    def attempt(self) -> str:
        """Save attempt that made it; empty if unknown."""
        return RootPosition.read_attempt(self.after)

    @property
    def is_overwrite(self) -> bool:
        """Whether the root had a step with this order when it was captured."""
        position = RootPosition.decode(self.after)
        return position is not None and position.committed == self.order


def find_earlier_attempts(captures: Sequence[Capture]) -> set[str]:
    """Return the saves of captures whose step the same start has saved again."""
    # A tier that could not take the step the second time keeps the first capture.
    numbers: dict[tuple[tuple[int, int], str], dict[str, int]] = {}
    for capture in captures:
        number = read_number(capture.attempt)
        if number:
            numbers.setdefault((capture.order, read_start(capture.attempt)), {})[capture.save] = number
    return {save for of_step in numbers.values() for save in of_step if of_step[save] < max(of_step.values())}


class TierReads(PlaceReads):
    """This rank's reads from all nodes' tiers."""

    def __init__(self, opened: OpenedTiers) -> None:
        self._opened = opened
        self._before: Mapping[str, int] = {}
        self.damaged: frozenset[str] = frozenset()  # damaged files of this node, after `share_faults`

    @property
    def tier_bytes(self) -> Mapping[str, int]:
        """Bytes that this rank has read since `reset`, by tier."""
        read = {tier: nbytes - self._before.get(tier, 0) for tier, nbytes in self._opened.tier_bytes.items()}
        return {tier: nbytes for tier, nbytes in read.items() if nbytes}

    def share_faults(self, coordinator: LinkedGroup) -> list[StepFault]:
        """Return the faults of unread copies, on rank 0. Collective."""
        shared = self._opened.share_faults(coordinator)
        self.damaged = shared.files
        return [
            StepFault(int(folder.partition("-")[2]), f"{where}: {text}", where) for folder, where, text in shared.copies
        ]

    def reset(self) -> None:
        """Count bytes from here on."""
        self._before = self._opened.tier_bytes


def find_attempt(found: FoundStep, captures: Sequence[Capture], in_root: StepFolder | None) -> tuple[str, set[str]]:
    """Return the attempt that made a step: the text of its captures' position, and its save ids."""
    # If the step in the root is damaged, captures may come from other attempts.
    of_step = [each for each in captures if each.order == found.order and each.is_of_run and each.attempt]
    is_in_root = in_root is not None and in_root.save == found.save
    attempts = {each.attempt for each in of_step if each.save == found.save or (is_in_root and each.is_in_root)}
    same = [each for each in of_step if each.attempt in attempts]
    saves = {found.save or "", *(each.save for each in same)}
    if in_root is not None and any(each.is_in_root for each in same):
        saves.add(in_root.save)
    return next((each.after for each in same), ""), saves


def find_unknown(captures: Sequence[Capture], last_start: LastStart, root: str) -> set[str]:
    """Return the saves of captures in memory that no start of this run has made, and log them."""
    unknown = {each.save for each in captures if not (each.is_in_root or last_start.has_captured(each.attempt))}
    if unknown:
        _LOG.warning(
            "captures in memory of another run are not used: its root has the path %s elsewhere, as in another "
            "container (set a different SHARDCKPT_NODE for each run), or this root was emptied",
            root,
        )
    return unknown


_T = TypeVar("_T")


def read_tier(place: TierPlace, read: Callable[[], _T], otherwise: _T) -> _T:
    """Return what a function reads from a tier; if the tier cannot be read, log it once and return `otherwise`."""
    try:
        return read()
    except RankError:
        raise
    except ShardckptError as error:
        if place.finder.logged != str(error):
            place.finder.logged = str(error)
            _LOG.warning("steps in %s cannot be read: %s", place.finder.root, error)
        return otherwise


def open_own(place: TierPlace) -> Store | None:
    """Return the store with this node's steps in a tier; None if it cannot be opened."""
    return read_tier(place, place.open_own, None)


def report_step(place: TierPlace, folder: str, damaged: Collection[str]) -> NodeReport:
    """Report this node's files of a step, if a new process would find them."""
    node = place.find_node()

    def report() -> NodeReport:
        found = report_files(place.open_own(), node, [folder])
        if not found.steps or not place.is_found_again():
            return NodeReport(node)
        step = found.steps[folder]
        files = {name: size for name, size in step.files.items() if f"{place.name}/{folder}/{name}" not in damaged}
        return NodeReport(node, {folder: step._replace(files=files)})

    return read_tier(place, report, NodeReport(node))


def list_node_copies(place: TierPlace, catalog: NodeCatalog, number: int) -> list[StepCopy]:
    """Return the copy that the nodes have together: it survives one machine fewer than each file is on."""
    folder = step_name(number)
    machines, step = catalog.count_machines(folder), StepFolder(number, folder, save=catalog.saves.get(folder, ""))
    if not machines or not place.finder.is_good(step):
        return []
    return [describe_copy(place.open_own(), step, place.name, FAILURES[:machines])]


def read_captures(place: TierPlace) -> list[tuple[StepFolder, str]]:
    """Return a tier's complete captures, each with its `RootPosition` as text; empty if unknown."""
    store = place.finder.open_store()
    return [(step, read_capture_about(store, step).get(AFTER, "")) for step in place.finder.read().complete]


def read_own_capture(place: TierPlace, number: int) -> tuple[tuple[int, int], str]:
    """Return a capture's order on this node, and its `RootPosition` as text; empty if unknown."""
    store = place.open_own()
    step = read_step(store, number)
    return (step.branch, number), read_capture_about(store, step).get(AFTER, "")


def describe_missing_captures(places: Sequence[TierPlace], root: str) -> str:
    """Return the message that some tiers lack the last start's captures."""
    shown = " or ".join(place.name for place in places)
    return (
        f"no capture of the last start of {root} is in {shown}: it completed none (see its log), this start has other "
        "machines, or they were removed from memory; steps saved from now on count as newer"
    )


def drop_capture(place: TierPlace, step: StepFolder, root: str) -> None:
    """Delete a capture that does not belong to the root's steps; a failure is only logged: nothing loads it."""
    shown = f"step {step.number} in {place.finder.root}"
    _LOG.warning("%s does not belong to the steps in %s: dropped", shown, root)
    try:
        delete_steps(place.finder.open_store(), place.finder.read(), [step.name])
    except RankError:
        raise
    except ShardckptError as error:
        _LOG.warning("%s could not be removed: %s", shown, error)


def read_capture_about(store: Store, step: StepFolder) -> Mapping[str, str]:
    """Return a capture's custom metadata; empty if it is damaged, which a load finds."""
    try:
        return read_about(store, step)
    except (CheckpointError, MissingFileError):
        return {}
