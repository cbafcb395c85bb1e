"""Save steps to a run's tiers and its root."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsFloat

from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.checkpoint.run.save_schedule import SaveSchedule
from shardckpt.checkpoint.run.step_finder import StepFault, require_step_number
from shardckpt.checkpoint.run.step_saver import (
    OnSaved,
    SavedPlace,
    StepSaver,
    build_notes,
    build_place_notes,
    check_options,
    join_on_event,
    require_one_step,
)
from shardckpt.checkpoint.save.async_save import async_save
from shardckpt.checkpoint.save.handle import AsyncSaveTask, SaveHandle
from shardckpt.checkpoint.save.save import RunNotes, read_notes
from shardckpt.encodings.budget import gc_paused
from shardckpt.errors import ShardckptError, UsageError
from shardckpt.events import OperationEvent
from shardckpt.ranks.process_group import get_ranks
from shardckpt.tiers.capture_tier import CaptureTier
from shardckpt.tiers.node_opening import NodeShare
from shardckpt.tiers.peer_memory import find_node_id
from shardckpt.tiers.peers.promoted_steps import PromotedStep, find_common_steps
from shardckpt.tiers.promoter import Promoter, Promotion
from shardckpt.tiers.tiered_finder import TieredFinder

_FOR_COPY = ("max_staging_bytes", "on_busy")  # save options that apply to a capture too


RECORD_COPIES = 4  # maximum number of nodes with a copy of a step's witness record, including rank 0's node


class _Places(NamedTuple):
    """Places for a step on which the ranks have agreed."""

    number: int
    branch: int
    mark: str  # `SaveMark` as text, the same in all places
    tiers: list[int]  # indexes of the tiers that take the step: the first captures it, the others get copies
    opened: list[int]  # indexes of the tiers that all nodes have made ready
    in_root: bool
    share: tuple[int, bool] = (1, False)  # `NodeShare`
    has_own_record: bool = False  # the rank keeps a copy of the witness record on its node
    # Steps that all nodes have copied, by tier, if one is new.
    common: Mapping[str, Sequence[tuple[int, str]]] = MappingProxyType({})


class _CommitNote:
    """Called on the capture's thread before its commit; set later than the options, when the tier is known."""

    def __init__(self) -> None:
        self.act: Callable[[], object] = lambda: None

    def __call__(self) -> None:
        self.act()


class TieredSaver:
    """Saves steps in a run with tiers; every method is collective."""

    def __init__(
        self,
        saver: StepSaver,
        schedule: SaveSchedule,
        tiers: Sequence[CaptureTier],
        finder: TieredFinder,
        lineage: Lineage,
        promoter: Promoter,
        on_saved: OnSaved,
    ) -> None:
        self._saver, self._schedule, self._tiers, self._finder = saver, schedule, tuple(tiers), finder
        self._lineage, self._promoter, self._on_saved = lineage, promoter, on_saved
        self._captured_in: list[SavedPlace] = []
        self._is_first, self._last = False, -1
        self._process = os.getpid()
        saver.on_saved = self._add_saved
        for tier in self._tiers:
            tier.list_needed = partial(promoter.list_promoted, tier)

    def record_restore(self, number: int, branch: int, loaded: str) -> None:
        """Record that a step was restored; as `StepSaver.record_restore`."""
        self._saver.record_restore(number, branch, loaded)
        self._finder.own.record_restore(number)

    def save(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> None:
        """Capture a step, save it in the root, or both, in the background."""
        self.async_save(step, state, metrics, options)

    def async_save(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> SaveHandle:
        """Capture a step, save it in the root, or both, in the background; a capture's handle is done at once."""
        self._require_own_process()
        self._settle_tiers(step)
        with gc_paused():
            notes, before_commit = RunNotes(), _CommitNote()
            message: bytes | Exception
            try:
                given = check_options(async_save, options, self._finder.group)
                notes = build_notes(metrics, given.get("custom_metadata"))
                notes.require_replaceable = before_commit
                number = require_step_number(step)
                message = self._describe(number)
            except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
                message = error
            places = self._agree(message)
            self._last = places.number
            notes.update(build_place_notes(places.branch, places.mark))
            self._capture(places, state, notes, given, before_commit)
        if places.in_root:
            return self._save_in_root(places, state, metrics, options)
        self._saver.record_save(places.number, places.branch, None)
        self._add_saved(places.number, state, [])
        return SaveHandle(AsyncSaveTask(self._tiers[0].place.finder.root, None))

    def _require_own_process(self) -> None:
        """Refuse a forked process: it would count as the same start of the run as its parent."""
        if os.getpid() != self._process:
            raise UsageError(
                "a forked process cannot save with its parent's tiers",
                where=self._finder.root,
                fix="Make a Checkpointer in the process that saves.",
            )

    def _describe(self, number: int) -> bytes:
        """Return this rank's message: the step, the node, and what is ready there."""
        folders = {tier.place.name: tier.place.finder.root for tier in self._tiers}
        copied = {tier.place.name: tier.promoted.uncounted for tier in self._tiers if tier.promoted.uncounted}
        return json.dumps([number, find_node_id(), folders, self._open_again(number), copied]).encode()

    def _agree(self, message: bytes | Exception) -> _Places:
        """Agree where to save the step. Collective."""
        coordinator = get_ranks(self._finder.group)
        what = f"preparing to save a step of {self._finder.root}"
        return _Places(*json.loads(coordinator.ask_rank0(what, message, self._choose)))

    def _capture(
        self,
        places: _Places,
        state: Any,
        notes: RunNotes,
        given: Mapping[str, Any],
        before_commit: _CommitNote,
    ) -> None:
        """Capture a step in its first tier that is ready. Collective."""
        share = NodeShare(*places.share)
        self._captured_in = []
        for tier in self._tiers:
            if tier.place.name in places.common:
                tier.promoted.count([PromotedStep(*step) for step in places.common[tier.place.name]])
        coordinator = get_ranks(self._finder.group)
        with coordinator.in_step():  # the other ranks wait for the next message of this one
            opened = self._open_tiers(places, share)
            if opened:
                self._capture_in(opened, places, state, notes, given, before_commit)

    def _capture_in(
        self,
        opened: Sequence[CaptureTier],
        places: _Places,
        state: Any,
        notes: RunNotes,
        given: Mapping[str, Any],
        before_commit: _CommitNote,
    ) -> None:
        """Capture a step in the first of some tiers, and promote it to the others. Collective."""
        source, *targets = opened
        share, rank = NodeShare(*places.share), get_ranks(self._finder.group).rank
        capture = self._promoter.note_capture(places.number, source)
        before_commit.act = partial(self._promoter.note_commit, places.number, source, capture)

        def promote(number: int) -> None:
            for target in targets:
                if target.is_spread:
                    target.apply_rules()
                self._promoter.add(Promotion(number, source, target, rank, capture))
            if not rank:
                self._lineage.look()

        source.capture(places.number, state, notes, _choose_copy_options(given), share, promote)
        self._captured_in = self._list_captured(places, source, targets)

    def _open_again(self, number: int) -> dict[str, str]:
        """Make ready the tiers that were ready at the last step, so that ranks agree only on changes; return faults."""
        tiers = [tier for tier in self._tiers if self._is_first and tier.opening.is_ready and tier.takes(number)]
        return {tier.place.name: tier.opening.find_fault() for tier in tiers}

    def _open_tiers(self, places: _Places, share: NodeShare) -> list[CaptureTier]:
        """Make the chosen tiers ready on all nodes; return those that can take the step. Collective."""
        self._is_first = share.is_first and get_ranks(self._finder.group).rank > 0
        opened = []
        for index, tier in enumerate(self._tiers):
            if index not in places.tiers:
                tier.opening.is_ready = tier.opening.is_ready and not tier.takes(places.number)
            elif tier.open_nodes(places.number, share, is_open=index in places.opened):
                opened.append(tier)
        return opened

    def _list_captured(self, places: _Places, source: CaptureTier, targets: Sequence[CaptureTier]) -> list[SavedPlace]:
        """Return the tiers to which a step is captured or copied."""
        number, is_kept = places.number, places.has_own_record

        def is_captured() -> bool:
            return source.is_over(number)

        def is_promoted() -> bool:
            return is_captured() and number not in self._promoter.list_promoted(source)

        promoted = [SavedPlace(target.place.finder, is_promoted, is_kept) for target in targets]
        return [SavedPlace(source.place.finder, is_captured, is_kept), *promoted]

    def _add_saved(self, number: int, state: Any, places: Sequence[SavedPlace]) -> None:
        """Report that a step is saved to tiers and to other places, if it is saved anywhere."""
        saved = [*self._captured_in, *places]
        if saved:
            self._on_saved(number, state, saved)

    def _save_in_root(
        self, places: _Places, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> SaveHandle:
        def note_newest(event: OperationEvent) -> None:
            if event.error is None and get_ranks(self._finder.group).rank == 0:
                self._lineage.note_root_step(places.number)

        on_event = join_on_event(note_newest, options.get("on_event"))
        notes = RunNotes(
            {**read_notes(options.get("custom_metadata")), **build_place_notes(places.branch, places.mark)}
        )
        options = {**options, "on_event": on_event, "custom_metadata": notes}
        return self._saver.async_save(places.number, state, metrics, options)

    def settle(self) -> None:
        """Wait for the background saves, including promotions."""
        try:
            for tier in self._tiers:
                tier.settle()
            self._promoter.wait()
        finally:
            self._saver.settle()

    def await_saves(self, *, is_for_newest: bool) -> list[StepFault]:
        """Wait for the captures, and for the root's save unless the last step was captured; return their faults."""
        running = [tier.pending for tier in self._tiers if tier.pending is not None]
        ended = [(each.number, each.await_fault()) for each in running]
        captured = max((number for number, fault in ended if number == self._last and not fault), default=-1)
        in_root = self._saver.await_saves(is_for_newest=is_for_newest, captured=captured)
        return [*(StepFault(number, fault) for number, fault in ended if fault), *in_root]

    def _settle_tiers(self, step: Any) -> None:
        """Wait for the last captures in the tiers that take a step, which must be equal on all ranks."""
        with suppress(UsageError):  # all ranks raise it below
            number = require_step_number(step)
            for tier in self._tiers:
                if tier.takes(number):
                    tier.settle_before_next()  # before the ranks agree: a failure there counts for this step

    def _choose(self, messages: list[bytes]) -> list[bytes]:
        """Choose where to save a step. On rank 0."""
        numbers, nodes, folders, faults, copied = zip(*map(json.loads, messages), strict=True)
        number = require_one_step(numbers, self._finder.root)
        first = {node: rank for rank, node in reversed([*enumerate(nodes)])}
        ready, opened = [], []
        for index, tier in enumerate(self._tiers):
            name = tier.place.name
            other = _find_other_folder([first[node] for node in nodes], [each.get(name) for each in folders])
            found = {rank: faults[rank].get(name) for rank in first.values() if rank}
            if not tier.takes(number) or not tier.prepare(number, set(nodes), other):
                continue
            if tier.opening.refuse_on(number, ((rank, fault or "") for rank, fault in found.items())):
                continue
            ready.append(index)
            if None not in found.values():
                opened.append(index)
        in_root = self._schedule.is_for_root(number)
        branch = self._saver.find_branch(number)
        try:
            branch = self._lineage.open_epoch(branch)
        except ShardckptError as error:  # a save in the root finds by itself that it cannot be written
            for index in ready:
                self._tiers[index].refuse(number, error)
            ready, opened = [], []
        mark = self._lineage.make_mark()
        self._finder.own.record(number, mark)
        places = _Places(number, branch, mark, ready, opened, in_root)
        places = places._replace(common=find_common_steps([copied[rank] for rank in first.values()]))
        keepers = choose_record_keepers(list(first.values()))
        return [
            json.dumps(
                places._replace(share=(len(first), first[node] == rank), has_own_record=rank in keepers)
            ).encode()
            for rank, node in enumerate(nodes)
        ]


def choose_record_keepers(first: Sequence[int]) -> set[int]:
    """Choose the ranks that keep copies of a witness record, on a few distant nodes."""
    ranks = sorted(first)
    at = {len(ranks) * each // RECORD_COPIES for each in range(RECORD_COPIES)}
    return {ranks[each] for each in at} - {0}


def _choose_copy_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the save options that apply to a capture too."""
    return {name: given[name] for name in _FOR_COPY if name in given}


def _find_other_folder(first: Sequence[int], folders: Sequence[str | None]) -> str:
    """Return text that names a rank with another folder than its node's lowest rank; empty without one."""
    for rank, (other, folder) in enumerate(zip(first, folders, strict=True)):
        if folder != folders[other]:
            return f"rank {rank} has {folder}, and rank {other} of the same node {folders[other]}"
    return ""
