"""A run's captures and copies in its tiers, and reads from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from shardckpt.checkpoint.run.step_finder import FoundStep, PlaceReads, StepFault, find_next_branch
from shardckpt.errors import RankError, ShardckptError
from shardckpt.native.commit import SaveMark
from shardckpt.native.run_directory import StepFolder, step_name
from shardckpt.native.step_copies import FAILURES, StepCopy, describe_copy
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.store import Store
from shardckpt.tiers.capture_tier import TierPlace
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


def find_earlier_saves(captures: Sequence[StepFolder]) -> set[str]:
    """Return the ids of captures whose step the same start has saved again."""
    # A tier that could not take the step the second time keeps the first capture.
    last: dict[tuple[tuple[int, int], str], int] = {}
    marked = [(step.save, (step.order, step.mark.start), step.mark.sequence) for step in captures if step.mark]
    for _, key, sequence in marked:
        last[key] = max(sequence, last.get(key, 0))
    return {save for save, key, sequence in marked if sequence < last[key]}


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


def find_identity(save: str, mark: SaveMark | None) -> str:
    """Return text that copies of one save share: its mark, or its id without one."""
    return save if mark is None else mark.encode()


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


def list_saves(reports: Sequence[NodeReport], number: int) -> dict[str, StepFolder]:
    """Return the saves of a step that nodes have committed, by id."""
    name = step_name(number)
    found = [report.steps[name] for report in reports if name in report.steps]
    return {step.save: StepFolder(number, name, step.save, step.branch, step.mark) for step in found}


def list_node_copies(place: TierPlace, catalog: NodeCatalog, number: int) -> list[StepCopy]:
    """Return the copy that the nodes have together: it survives one machine fewer than each file is on."""
    folder = step_name(number)
    machines, step = catalog.count_machines(folder), StepFolder(number, folder, save=catalog.saves.get(folder, ""))
    if not machines or not place.finder.is_good(step):
        return []
    return [describe_copy(place.open_own(), step, place.name, FAILURES[:machines])]


def describe_other_run(root: str) -> str:
    """Return the message that captures are not of this run."""
    return (
        f"captures of another run are not used: its root has the path {root} elsewhere, as in another container (set a "
        "different SHARDCKPT_NODE for each run), or this root was emptied"
    )


def describe_missing_captures(places: Sequence[TierPlace], root: str) -> str:
    """Return the message that some tiers lack the last start's captures."""
    shown = " or ".join(place.name for place in places)
    return (
        f"no capture of the last start of {root} is in {shown}: it completed none (see its log), this start has other "
        "machines, or they were removed from memory; steps saved from now on count as newer"
    )
