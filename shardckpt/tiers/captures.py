"""Capture steps in a run's tiers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsFloat

from shardckpt.checkpoint.notice.notice_saves import NoticeShare
from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.checkpoint.run.save_schedule import SaveSchedule
from shardckpt.checkpoint.run.step_finder import StepFault, require_step_number
from shardckpt.checkpoint.run.step_saver import (
    CapturedStep,
    NoCaptures,
    SavedPlace,
    build_run_notes,
    check_options,
    encode_metrics,
    list_given,
    require_one_step,
)
from shardckpt.checkpoint.save.async_save import async_save
from shardckpt.checkpoint.save.planner import SaveHooks
from shardckpt.checkpoint.save.save import read_notes
from shardckpt.encodings.budget import gc_paused
from shardckpt.errors import ShardckptError, UsageError
from shardckpt.native.step_copies import ROOT
from shardckpt.ranks.process_group import get_ranks
from shardckpt.tiers.capture_tier import CaptureTier
from shardckpt.tiers.node_opening import NodeShare
from shardckpt.tiers.peer_memory import find_node_id, parse_machine_id
from shardckpt.tiers.peers.promoted_steps import PromotedStep, find_common_steps
from shardckpt.tiers.promoter import Promoter, Promotion
from shardckpt.tiers.tiered_finder import TieredFinder

# Save options that apply to a capture too.
_FOR_COPY = ("max_staging_bytes", "on_busy", "overlap_staging", "model_files")


RECORD_COPIES = 4  # maximum number of nodes with a copy of a step's witness record, including rank 0's node


class _Places(NamedTuple):
    """Places for a step on which the ranks have agreed."""

    number: int
    branch: int
    mark: str  # `SaveMark` as text, the same in all places
    tiers: list[int]  # indexes of the tiers that take the step: the first captures it, the others get copies
    opened: list[int]  # indexes of the tiers that all nodes have made ready
    in_root: bool
    is_asked: bool = False  # a rank has a notice
    share: tuple[int, bool, Sequence[str]] = (1, False, ())  # `NodeShare`
    has_own_record: bool = False  # the rank keeps a copy of the witness record on its node
    staying: Sequence[int] = ()  # ranks that can commit the step alone; empty if all have to
    planned_notice: Sequence[Any] | None = None  # `PlannedNotice`, for the first of them
    # Steps that all nodes have copied, by tier, if one is new.
    common: Mapping[str, Sequence[tuple[int, str]]] = MappingProxyType({})


class Captures(NoCaptures):
    """Captures steps in a run's tiers; every method is collective."""

    has_tiers = True

    def __init__(
        self,
        tiers: Sequence[CaptureTier],
        schedule: SaveSchedule,
        finder: TieredFinder,
        lineage: Lineage,
        promoter: Promoter,
    ) -> None:
        self._schedule, self._tiers, self._finder = schedule, tuple(tiers), finder
        self._lineage, self._promoter = lineage, promoter
        self._is_first, self._last = False, -1
        self._is_needed_soon = False  # a deadline chooses the places of the step
        self._process = os.getpid()

    def record_restore(self, number: int) -> None:
        """Record that a step was restored."""
        self._finder.own.record_restore(number)

    def capture(
        self, step: int, state: Any, metrics: Mapping[str, SupportsFloat] | None, options: Mapping[str, Any]
    ) -> CapturedStep:
        """Capture a step in the tiers that take it, in the background; return where it belongs. Collective."""
        self._require_own_process()
        self._is_needed_soon = self._schedule.has_deadline
        self._settle_tiers(step)
        with gc_paused():
            given, about = dict[str, Any](), dict[str, str]()
            message: bytes | Exception
            try:
                given = check_options(async_save, options, self._finder.group)
                numbers = encode_metrics(metrics)
                about = {**read_notes(given.get("custom_metadata")), **numbers}
                message = self._describe(require_step_number(step), list_given(given, numbers))
            except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
                message = error
            places = self._agree(message)
            self._schedule.set_requested(places.is_asked)
            if places.planned_notice and get_ranks(self._finder.group).rank == places.staying[0]:
                self._schedule.notice_saves.take_over(places.planned_notice)
            self._last = places.number
            about.update(build_run_notes(places.branch, places.mark))
            captured = self._capture(places, state, SaveHooks(about, staying=tuple(places.staying)), given)
        root = self._tiers[0].place.finder.root
        return CapturedStep(places.number, places.in_root, places.branch, places.mark, root, captured)

    def _require_own_process(self) -> None:
        """Refuse a forked process: it would count as the same start of the run as its parent."""
        if os.getpid() != self._process:
            raise UsageError(
                "a forked process cannot save with its parent's tiers",
                where=self._finder.root,
                fix="Make a Checkpointer in the process that saves.",
            )

    def _describe(self, number: int, given: Sequence[str]) -> bytes:
        """Return this rank's message: the step, the node, and what is ready there."""
        folders = {tier.place.name: tier.place.finder.root for tier in self._tiers}
        copied = {tier.place.name: tier.promoted.uncounted for tier in self._tiers if tier.promoted.uncounted}
        notice = self._schedule.notice_saves.notices.describe()
        return json.dumps([number, find_node_id(), folders, self._open_again(number), copied, notice, given]).encode()

    def _takes(self, tier: CaptureTier, number: int) -> bool:
        """Return True if a step may go into a tier: it is its turn, or a deadline chooses the places."""
        return self._is_needed_soon or tier.takes(number)

    def _agree(self, message: bytes | Exception) -> _Places:
        """Agree where to save the step. Collective."""
        coordinator = get_ranks(self._finder.group)
        what = f"preparing to save a step of {self._finder.root}"
        return _Places(*json.loads(coordinator.ask_rank0(what, message, self._choose)))

    def _capture(self, places: _Places, state: Any, hooks: SaveHooks, given: Mapping[str, Any]) -> Sequence[SavedPlace]:
        """Capture a step in its first tier that is ready; return its places. Collective."""
        share = NodeShare(*places.share)
        for tier in self._tiers:
            if tier.place.name in places.common:
                tier.promoted.count([PromotedStep(*step) for step in places.common[tier.place.name]])
        coordinator = get_ranks(self._finder.group)
        with coordinator.in_step():  # the other ranks wait for the next message of this one
            opened = self._open_tiers(places, share)
            return self._capture_in(opened, places, state, hooks, given) if opened else ()

    def _capture_in(
        self,
        opened: Sequence[CaptureTier],
        places: _Places,
        state: Any,
        hooks: SaveHooks,
        given: Mapping[str, Any],
    ) -> Sequence[SavedPlace]:
        """Capture a step in the first of some tiers, and promote it to the others. Collective."""
        source, *targets = opened
        share, rank = NodeShare(*places.share), get_ranks(self._finder.group).rank
        capture = self._promoter.note_capture(places.number, source)
        hooks = hooks._replace(before_commit=partial(self._promoter.note_commit, places.number, source, capture))

        def promote(number: int) -> None:
            for target in targets:
                if target.is_spread:
                    target.apply_rules()
                self._promoter.add(Promotion(number, source, target, rank, capture))
            if not rank:
                self._lineage.look()

        source.capture(places.number, state, hooks, _choose_copy_options(given), share, promote)
        return self._list_captured(places, source, targets)

    def _open_again(self, number: int) -> dict[str, str]:
        """Make ready the tiers that were ready at the last step, so that ranks agree only on changes; return faults."""
        tiers = [tier for tier in self._tiers if self._is_first and tier.opening.is_ready and self._takes(tier, number)]
        return {tier.place.name: tier.opening.find_fault() for tier in tiers}

    def _open_tiers(self, places: _Places, share: NodeShare) -> list[CaptureTier]:
        """Make the chosen tiers ready on all nodes; return those that can take the step. Collective."""
        self._is_first = share.is_first and get_ranks(self._finder.group).rank > 0
        opened = []
        for index, tier in enumerate(self._tiers):
            if index not in places.tiers:
                tier.opening.is_ready = tier.opening.is_ready and not self._takes(tier, places.number)
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

    def settle(self) -> None:
        """Wait for the captures, including promotions. Collective."""
        for tier in self._tiers:
            tier.settle()
        self._promoter.wait()

    def await_faults(self) -> tuple[list[StepFault], int]:
        """Wait for the captures; return their faults, and the last step if it was captured, otherwise -1."""
        running = [tier.pending for tier in self._tiers if tier.pending is not None]
        ended = [(each.number, each.await_fault()) for each in running]
        is_captured = any(number == self._last and not fault for number, fault in ended)
        return [StepFault(number, fault) for number, fault in ended if fault], self._last if is_captured else -1

    def _settle_tiers(self, step: Any) -> None:
        """Wait for the last captures in the tiers that take a step, which must be equal on all ranks."""
        with suppress(UsageError):  # all ranks raise it below
            number = require_step_number(step)
            for tier in self._tiers:
                if self._takes(tier, number):
                    tier.settle_before_next()  # before the ranks agree: a failure there counts for this step

    def _choose(self, messages: list[bytes]) -> list[bytes]:
        """Choose where to save a step. On rank 0."""
        numbers, nodes, folders, faults, copied, notices, given = zip(*map(json.loads, messages), strict=True)
        number = require_one_step(numbers, self._finder.root)
        first = {node: rank for rank, node in reversed([*enumerate(nodes)])}
        ready, opened = [], []
        for index, tier in enumerate(self._tiers):
            name = tier.place.name
            other = _find_other_folder([first[node] for node in nodes], [each.get(name) for each in folders])
            found = {rank: faults[rank].get(name) for rank in first.values() if rank}
            if not self._takes(tier, number) or not tier.prepare(number, set(nodes), other):
                continue
            if tier.opening.refuse_on(number, ((rank, fault or "") for rank, fault in found.items())):
                continue
            ready.append(index)
            if None not in found.values():
                opened.append(index)
        leaving = _find_leaving(nodes, [has_notice for has_notice, *_ in notices])
        in_root, ready = self._choose_before_deadline(number, notices, ready, nodes, leaving)
        branch = self._lineage.find_branch(number, self._finder.newest_branch)
        try:
            branch = self._lineage.open_epoch(branch, is_for_root=in_root)
        except ShardckptError as error:  # a save in the root finds by itself that it cannot be written
            branch += 1  # newer than all that is known
            for index in ready:
                self._tiers[index].refuse(number, error)
            ready, opened, in_root = [], [], in_root or self._schedule.has_deadline
        mark = self._lineage.make_mark()
        self._finder.own.record(number, mark)
        places = _Places(number, branch, mark, ready, opened, in_root, self._schedule.stop_requested)
        places = places._replace(common=find_common_steps([copied[rank] for rank in first.values()]))
        staying = self._schedule.find_staying(notices, given)
        places = places._replace(staying=staying, planned_notice=self._schedule.hand_over(staying))
        keepers = choose_record_keepers(list(first.values()))
        return [
            json.dumps(
                places._replace(share=(len(first), first[node] == rank, leaving), has_own_record=rank in keepers)
            ).encode()
            for rank, node in enumerate(nodes)
        ]

    def _choose_before_deadline(
        self, number: int, notices: Sequence[Any], ready: list[int], nodes: Sequence[str], leaving: Sequence[str]
    ) -> tuple[bool, list[int]]:
        """Return whether a step belongs into the root, and the tiers that take it. On rank 0."""
        share = _describe_nodes(nodes, leaving, self._tiers[ready[0]].copies if ready else 0)
        names = [*(self._tiers[index].place.name for index in ready), ROOT]
        chosen = self._schedule.choose_places(number, notices, names, share)
        if chosen is None:
            return self._schedule.is_for_root(number), ready
        return ROOT in chosen.names, [index for index in ready if self._tiers[index].place.name in chosen.names]


def _find_leaving(nodes: Sequence[str], has_notice: Sequence[bool]) -> list[str]:
    """Return the nodes with a notice; empty if no node stays."""
    leaving = {node for node, is_leaving in zip(nodes, has_notice, strict=True) if is_leaving}
    return sorted(leaving) if len(leaving) < len({*nodes}) else []


def _describe_nodes(nodes: Sequence[str], leaving: Sequence[str], copies: int) -> NoticeShare:
    """Return on how many machines each file is to be, and whether those of leaving nodes are copied to others."""
    going, staying = {*map(parse_machine_id, leaving)}, {*map(parse_machine_id, {*nodes} - {*leaving})}
    has_partners = all(staying - {machine} for machine in going)
    return NoticeShare(1 + min(copies, len(staying) - 1), bool(leaving) and has_partners)


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
