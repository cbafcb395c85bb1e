"""Find a run's steps: rank 0 reads the folder and sends all ranks the answer."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch.distributed as dist

from shardckpt.checkpoint.run.lineage import Lineage
from shardckpt.encodings.typed_json import decode
from shardckpt.errors import TargetExistsError, UnsupportedError, UsageError
from shardckpt.native.commit import SaveMark
from shardckpt.native.run_directory import RunDirectory, StepFolder, read_run, read_step, step_name
from shardckpt.native.step_copies import (
    ROOT,
    StepCopy,
    decode_durability,
    describe_copy,
    encode_copies,
    find_survived,
    read_mounts,
)
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.ranks.process_group import get_ranks
from shardckpt.readers.run_start import describe_fault, require_start_of_run
from shardckpt.storage.publication import target_exists_error
from shardckpt.storage.resolve_url import as_place, fix_folder, local_path, open_store
from shardckpt.storage.store import Store

SHOWN = 5  # maximum number of steps or faults in a message; others are only counted
NO_STEP = (-1, -1)  # order before that of every step

# Path or URL of a step's folder, and the id of the save that wrote it: a step may have copies of one save.
StepKey = tuple[str, str]

_MAX_STEP = 10**18


class StepFault(NamedTuple):
    """A step or copy that is not used."""

    number: int
    text: str  # where it is and why it is not used
    copy: str = ""  # where a copy of a file is, of which a part is not used; empty if this is not about one file


class FoundStep(NamedTuple):
    """Step that rank 0 found."""

    faults: Sequence[StepFault]  # faults of newer steps, or of all steps if none is complete
    number: int = 0  # number of the newest complete step
    name: str = ""  # name of its folder
    save: str | None = None  # id of the save that wrote the step; None if no step is complete
    branch: int = 0  # branch of the run for steps that are saved after this step is restored
    # Reason why this version cannot read a step that is newer than all complete ones; empty without one.
    unreadable: str = ""
    order: tuple[int, int] = NO_STEP  # branch and number of the step; steps with a greater order are newer
    newest: tuple[int, int] = NO_STEP  # order of the newest complete step, which may be another one
    path: str = ""  # path or URL of its folder
    mark: SaveMark | None = None
    tier_faults: Sequence[StepFault] = ()  # faults of steps in tiers that are passed over for this one, or for none

    @property
    def key(self) -> StepKey:
        """Its folder's path or URL, and its save's id."""
        return self.path, self.save or ""


class PlaceReads:
    """This rank's reads from the places that a restore has opened together; one place alone counts nothing."""

    @property
    def tier_bytes(self) -> Mapping[str, int]:
        """Bytes that this rank has read since `reset`, by tier; empty if all are from the step's own place."""
        return {}

    def share_faults(self, coordinator: LinkedGroup) -> Sequence[StepFault]:  # noqa: ARG002  (of one place)
        """Return the faults of copies that were not read, on rank 0. Collective."""
        return ()

    def reset(self) -> None:
        """Count from here on."""


class StepFinder:
    """Finds a run's steps."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        group: dist.ProcessGroup | None,
        lineage: Lineage | None = None,
        tier: str = ROOT,
    ) -> None:
        self.root = find_root(root)  # path or URL of the run's folder
        self.group = group  # process group of the ranks; None for all ranks
        self.tier = tier  # name of the place of the steps
        self._lineage = lineage  # None in a tier
        self.damaged: set[str] = set()  # ids of saves whose steps a load found damaged
        # Ids of saves whose steps retention removes or has removed, with the numbers of the steps.
        self.removed: dict[str, int] = {}
        self.has_other_places = False  # whether a step may also be somewhere else than in the root

    def path(self, name: str) -> str:
        """Return a step folder's path or URL."""
        return f"{self.root.rstrip('/')}/{name}"

    def open_store(self) -> Store:
        """Return the run's store. Raises UsageError if the root is a file."""
        path = local_path(self.root)
        if path is not None and os.path.isfile(path):
            raise UsageError("a run's folder must not be a file", where=self.root, fix="Choose another.")
        return open_store(self.root)

    def read(self) -> RunDirectory:
        """Return the run's directory; refuse a folder with another checkpoint. On rank 0."""
        run = self._read_run()
        if not run.steps:
            require_start_of_run(self.root)
        return run

    def _read_run(self) -> RunDirectory:
        run = read_run(self.open_store())
        if self._lineage is not None:
            self._lineage.note_read(run)
        return run

    def read_step(self, number: int) -> StepFolder:
        """Return a step in its usual folder; without a folder, it is incomplete. On rank 0."""
        return read_step(self.open_store(), number)

    def is_good(self, step: StepFolder) -> bool:
        """Return True if a step is complete and no load found it damaged."""
        return step.is_complete and step.save not in self.damaged

    def ask_rank0(self, what: str, answer: Callable[[], Any], fault: Exception | None = None) -> Any:
        """Return rank 0's answer on every rank. Collective."""
        # All ranks raise the fault that one of them passes.

        def decide(messages: list[bytes]) -> list[bytes]:
            return [json.dumps(answer()).encode()] * len(messages)

        return json.loads(get_ranks(self.group).ask_rank0(f"{what} of {self.root}", fault or b"", decide))

    def list_complete(self) -> list[int]:
        """Return the complete steps' numbers, the oldest first. Reads the storage on this rank."""
        run = self.read()
        self.require_readable(find_unreadable(run))
        return [step.number for step in run.complete]

    def require_readable(self, fault: str) -> None:
        """Raise UnsupportedError if this version cannot read the newest step."""
        if fault:
            raise UnsupportedError(
                "the newest step was written by a version of shardckpt that this one cannot read",
                where=self.root,
                found=fault,
                fix="Update shardckpt, or choose another folder.",
            )

    def find_step(self, wanted: int | None, passed: Collection[StepKey], fault: Exception | None) -> FoundStep:
        """Return the newest loadable step. Collective."""
        answer = self.ask_rank0("looking for a step", lambda: self._find_tried(wanted, passed), fault)
        return decode(FoundStep, answer, where="rank 0's answer")

    def _find_tried(self, wanted: int | None, passed: Collection[StepKey]) -> FoundStep:
        """Return the newest loadable step; pass over failed ones if there is another. On rank 0."""
        failed = _find_failed(self._lineage) if wanted is None else {}
        found = self.find_on_rank0(wanted, passed, failed)
        if not failed or found.unreadable:
            return found
        if found.save is None:
            return self.find_on_rank0(wanted, passed)
        reasons = [
            StepFault(order[1], reason) for order, reason in failed.items() if found.order < order <= found.newest
        ]
        return found._replace(faults=[*reasons, *found.faults])

    def find_on_rank0(
        self, wanted: int | None, passed: Collection[StepKey], avoided: Collection[tuple[int, int]] = ()
    ) -> FoundStep:
        """Return the newest step that can be loaded. On rank 0."""
        run = self.read()
        untried = [s for s in run.steps if not s.is_base and (self.path(s.name), s.save) not in passed]
        matching = [s for s in untried if wanted in (None, s.number) and s.order not in avoided]
        newest = next((step for step in reversed(run.complete) if step in matching), None)
        faulty = [step for step in reversed(matching) if not step.is_complete]
        newer = [step for step in faulty if newest is None or step.number > newest.number]
        shown = [step for step in newer if newest is None or not step.is_foreign]
        faults = [StepFault(step.number, describe_fault(self.open_store(), step)) for step in shown]
        if wanted is None and newest is None and all(step.has_only_begun for step in faulty):
            faults = []  # the first save of the run was killed
        unreadable = next((step.fault for step in newer if step.is_newer), "")
        last = run.complete[-1].order if run.complete else NO_STEP
        if newest is None or unreadable:
            return FoundStep(faults, unreadable=unreadable, newest=last)
        branch = find_next_branch(newest.order, last)
        path = self.path(newest.name)
        return FoundStep(
            faults, newest.number, newest.name, newest.save, branch, "", newest.order, last, path, mark=newest.mark
        )

    def is_still_here(self, found: FoundStep) -> bool:
        """Return True if a step that was found is still complete. Collective."""
        return [*found.key] in self.ask_rank0("looking again for a step", self.list_keys)

    def list_keys(self) -> list[StepKey]:
        """Return the complete steps' keys. On rank 0."""
        return [(self.path(step.name), step.save) for step in self.read().complete]

    def open_places(self) -> AbstractContextManager[PlaceReads]:
        """Return a context for a restore, in which steps on other nodes can be read. Collective."""
        return nullcontext(PlaceReads())

    def find_copies(self, number: int) -> Sequence[StepCopy]:
        """Return a step's complete copies, the nearest first. Collective."""
        copies = self.ask_rank0("asking for copies", lambda: encode_copies(self.select_copies(self.read(), number)))
        return decode_durability(number, copies).copies

    def select_copies(self, run: RunDirectory, number: int) -> list[StepCopy]:
        """Return a step's complete copies in this folder. On rank 0."""
        store, survives = self.open_store(), find_survived(self.root, read_mounts())
        steps = [step for step in run.complete if step.number == number and self.is_good(step)]
        return [describe_copy(store, step, self.tier, survives) for step in steps]

    def find_finder(self, path: str) -> StepFinder:  # noqa: ARG002  (tiers have their own)
        """Return the finder for the place that a step is in."""
        return self

    def locate_damage(self, path: str, text: str) -> str:  # noqa: ARG002  (the path names the place)
        """Return a step's fault with the place where it is."""
        return text

    def newest_branch(self) -> int:
        """Return the newest complete step's branch. On rank 0."""
        complete = self._read_run().complete
        return complete[-1].branch if complete else 0

    def is_replaceable(self, number: int) -> bool:
        """Return True if a save may replace the stored step with this number. On rank 0."""
        step = self.read_step(number)
        if step.is_newer:
            raise TargetExistsError(
                "a version of shardckpt that this one cannot read wrote this step, so it is not replaced",
                where=self.path(step_name(number)),
                found=step.fault,
                fix="Update shardckpt, or choose another folder.",
            )
        return bool(step.held) and step.is_ours and not self._is_needed(step)

    def require_replaceable(self, number: int) -> None:
        """Require that a save may still replace the stored step with this number. On rank 0."""
        if self._is_needed(read_step(self.open_store(), number)):
            raise target_exists_error(self.path(step_name(number)))

    def _is_needed(self, step: StepFolder) -> bool:
        """Return True if a restore may load a step: it is good, and the run did not fail after it too often."""
        return self.is_good(step) and step.order not in _find_failed(self._lineage)


def _find_failed(lineage: Lineage | None) -> Mapping[tuple[int, int], str]:
    """Return why steps are passed over, by their orders. On rank 0."""
    return {} if lineage is None else lineage.find_failed()


def find_root(root: object) -> str:
    """Return a run's folder as an absolute path or URL, without a slash at the end."""
    return fix_folder(parse_root(root))


def parse_root(root: object) -> str:
    """Return a run's folder as text, without a slash at the end."""
    place = as_place(root)
    folder = place.rstrip("/") or "/"
    if folder.endswith(":") and place.startswith(f"{folder}//"):
        raise UsageError("this URL names no place", where=place, fix="Name a bucket, or a folder in it.")
    return folder


def find_next_branch(restored: tuple[int, int], newest: tuple[int, int]) -> int:
    """Return the branch for steps saved after a restore, from two steps' orders."""
    return restored[0] if restored == newest else newest[0] + 1


def find_unreadable(run: RunDirectory) -> str:
    """Return the fault of a step from another version that is newer than all complete ones; empty without one."""
    newest = run.complete[-1].number if run.complete else -1
    unreadable = [step.fault for step in run.steps if step.is_newer and step.number > newest]
    return unreadable[-1] if unreadable else ""


def require_step_number(step: Any) -> int:
    """Return a step number as an int, from any integer type."""
    try:
        number = operator.index(step)
    except Exception:  # noqa: BLE001  (a value of any type, with an __index__ of its own)
        number = -1
    if isinstance(step, bool) or not 0 <= number < _MAX_STEP:
        raise UsageError("a step number must be an integer from 0", found=repr(step))
    return number
