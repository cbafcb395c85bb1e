"""Restore a run's newest step that can be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.load.load import MIXED, load
from shardckpt.checkpoint.run.step_finder import SHOWN, PlaceReads, StepFault, StepFinder, StepKey
from shardckpt.encodings.budget import gc_paused
from shardckpt.errors import (
    CheckpointError,
    MissingFileError,
    NoCompleteCheckpoint,
    PrecisionError,
    RankError,
    SourceNotFoundError,
    UnknownFormatError,
)
from shardckpt.events import FallbackEvent, OnEvent, OperationEvent, RestoreEvent, emit, record_operation
from shardckpt.events.recorder import tolerated_errors
from shardckpt.events.warn_user import warn_user
from shardckpt.native.step_copies import ROOT
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks

# Errors of steps that are damaged or that another process is removing.
_DAMAGE = (CheckpointError, MissingFileError, SourceNotFoundError, UnknownFormatError)

_LOOKS = 50  # maximum number of consecutive steps that `restore_step` tries while another process removes them


class RestoredStep(NamedTuple):
    """Step that was loaded."""

    number: int
    name: str  # name of its folder
    save: str  # id of the save that wrote it
    branch: int  # branch of the run for steps that are saved from now on
    order: tuple[int, int]  # branch and number of the step
    path: str  # path or URL of its folder
    finder: StepFinder  # finder of the place that it was in


def restore_step(
    finder: StepFinder,
    state: Any,
    wanted: int | None,
    options: Mapping[str, Any],
    *,
    failed: Sequence[StepFault],
    on_event: OnEvent | None,
    fault: Exception | None,
) -> tuple[RestoredStep | None, tuple[StepFault, ...]]:
    """Load the newest step that can be loaded; return it, with the faults of newer steps and copies. Collective."""
    # The step is None if the folder is missing or contains no checkpoint.
    coordinator = get_ranks(finder.group)
    with gc_paused(), record_operation(RestoreEvent, finder.root, on_event, rank=coordinator.rank) as recorder:

        def take_measurement(event: OperationEvent) -> None:
            recorder.phases.update(event.phases)
            recorder.values["nbytes"] = event.nbytes
            if on_event is not None:
                on_event(event)

        given = {**options, "on_event": take_measurement}
        with finder.open_places() as reads:
            restored, faults = _load_newest(finder, state, wanted, given, reads, on_event=on_event, fault=fault)
            faults = (*failed, *faults, *_select_copies(reads.share_faults(coordinator), faults))
            if coordinator.rank == 0:
                recorder.values.update(warnings=tuple(fault.text for fault in faults))
            if restored is not None:
                tier = restored.finder.tier
                tier_bytes = reads.tier_bytes or {tier: recorder.values.get("nbytes", 0)}
                recorder.values.update(step=restored.number, tier=tier, tier_bytes=tier_bytes)
    return restored, faults


def _load_newest(
    finder: StepFinder,
    state: Any,
    wanted: int | None,
    options: Mapping[str, Any],
    reads: PlaceReads,
    *,
    on_event: OnEvent | None,
    fault: Exception | None,
) -> tuple[RestoredStep | None, tuple[StepFault, ...]]:
    """Load the newest step that can be loaded; return it, and the faults of newer ones. Collective."""
    damages: dict[StepKey, StepFault] = {}
    removed_meanwhile = 0
    while removed_meanwhile < _LOOKS:
        latest = finder.find_step(wanted, damages, fault)
        finder.require_readable(latest.unreadable)
        if latest.save is None:
            break
        path = latest.path
        is_last = wanted is not None and not finder.has_other_places
        reads.reset()
        damage = _load_step(finder, path, state, options, is_last=is_last)
        if not damage:
            faults = (*latest.faults, *latest.tier_faults, *damages.values())
            order = latest.order[0], latest.order[1]
            place = finder.find_finder(path)
            return RestoredStep(latest.number, latest.name, latest.save, latest.branch, order, path, place), faults
        if finder.is_still_here(latest):
            damage = finder.locate_damage(path, damage)
            damages[latest.key] = StepFault(latest.number, damage)
            finder.find_finder(path).damaged.add(latest.save)
            if get_ranks(finder.group).rank == 0:
                emit(FallbackEvent(path, step=latest.number, warnings=(damage,)), on_event)
        else:
            removed_meanwhile += 1
    if latest.save is None and wanted is None and not latest.faults and not damages:
        return None, tuple(latest.tier_faults)
    raise _build_no_checkpoint_error(finder.root, wanted, [*damages.values()], [*latest.faults, *latest.tier_faults])


def _build_no_checkpoint_error(
    root: str, wanted: int | None, damages: Sequence[StepFault], faults: Sequence[StepFault]
) -> Exception:
    """Return the error for a run without a loadable step."""
    what = "no step here is complete" if wanted is None else f"step {wanted} is not complete, or not here"
    listed = [fault.text for fault in (*damages, *faults)]
    more = f"; and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    fix = "To start over, choose another folder." if listed else "Choose one that `ls` lists."
    shown = "; ".join(fault.rstrip(".") for fault in listed[:SHOWN])
    return NoCompleteCheckpoint(what, where=root, found=shown + more, fix=f"{fix} {MIXED}" if damages else fix)


def warn_of_faults(restored: RestoredStep | None, faults: Sequence[StepFault], group: dist.ProcessGroup | None) -> None:
    """Warn on rank 0 about unused newer steps and unused copies of the restored step."""
    if faults and get_ranks(group).rank == 0:
        warn_user(_describe_restore(restored, faults))


def _describe_restore(restored: RestoredStep | None, faults: Sequence[StepFault]) -> str:
    """Return what was restored, and which newer steps and copies are unused, each with the reason."""

    def describe(fault: StepFault) -> str:
        number = fault.number
        if fault.copy:
            return f"A copy of step {number} has a fault"
        if restored is None or number < restored.number:  # of another branch it may be newer all the same
            return f"Step {number} is not used"
        return f"{'Newer step' if number > restored.number else 'A copy of step'} {number} is not used"

    place = "" if restored is None else "root" if restored.finder.tier == ROOT else f"{restored.finder.tier} tier"
    head = "no step is restored" if restored is None else f"restored step {restored.number} from the {place}"
    listed = [f"{describe(fault)}: {fault.text}" for fault in faults]
    more = [f"And {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
    return " ".join(f"{each.removesuffix('.')}." for each in (head, *listed[:SHOWN], *more))


def _select_copies(copies: Sequence[StepFault], faults: Sequence[StepFault]) -> list[StepFault]:
    """Return the faults of copies, except faults that made their steps unused."""
    return [each for each in copies if not any(each.copy in fault.text for fault in faults)]


def _load_step(finder: StepFinder, path: str, state: Any, options: Mapping[str, Any], *, is_last: bool) -> str:
    """Load a step; if a rank finds it damaged, return the fault on all ranks."""
    try:
        with tolerated_errors():  # the restore continues, or fails with its own event
            load(state, path, process_group=finder.group, **options)
    except Exception as error:
        coordinator = get_ranks(finder.group)
        if is_last or coordinator.has_lost_rank:
            raise
        return _agree_on_damage(coordinator, path, error)
    return ""


def _agree_on_damage(coordinator: LinkedGroup, path: str, error: Exception) -> str:
    """Return the fault that a rank found; without one, raise this rank's error."""
    message: bytes | Exception = error
    if isinstance(error, _DAMAGE) and not isinstance(error, PrecisionError):
        message = str(error).removesuffix(MIXED).rstrip().encode()
    elif isinstance(error, RankError):
        message = b""

    def decide(messages: list[bytes]) -> list[bytes]:
        damage = next((text for text in messages if text), None)
        if damage is None:
            raise error
        return [damage] * len(messages)

    return coordinator.ask_rank0(f"loading {path}", message, decide).decode()
