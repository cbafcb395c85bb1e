"""Files next to a step, read as one: the record of training steps, and the resumes that were compared with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardckpt.errors import CheckpointError
from shardckpt.native.run_directory import StepFolder, find_removed_steps
from shardckpt.storage.store import Store
from shardckpt.witness.files.record_file import read_record
from shardckpt.witness.files.resume_file import read_capture_resumes, read_removed_resumes, read_resumes
from shardckpt.witness.records.resumes import (
    CaptureResume,
    Resume,
    StepVerdict,
    Verdict,
    find_last_compared,
    find_verdict,
)
from shardckpt.witness.records.step_records import WitnessRecord


@dataclass(frozen=True, slots=True)
class StepWitness:
    """Files next to a step."""

    record: WitnessRecord | None  # record of the training steps after the step; None without a readable one
    resumes: tuple[Resume, ...]  # resumes of the step, oldest first
    faults: tuple[str, ...]  # reasons why a file cannot be read

    @property
    def verdict(self) -> StepVerdict:
        """Verdict on the step: from its last resume that was compared to the end."""
        return find_verdict(self.resumes) if self.record is not None or self.resumes else "no record"

    @property
    def equal_steps(self) -> tuple[int, int]:
        """Number of equal steps in the resume that decides the verdict, and number of recorded steps."""
        last = find_last_compared(self.resumes)
        if last is not None:
            return last.compared, len(last.steps)
        return 0, 0 if self.record is None else len(self.record.steps)


@dataclass(frozen=True, slots=True)
class CaptureWitness:
    """A tier's capture that the run was resumed from; it may be gone."""

    last: CaptureResume  # the last resume from it, with the number of the step, the tier and the path
    resumes: tuple[Resume, ...]  # resumes from it, oldest first

    @property
    def verdict(self) -> Verdict:
        """Verdict on the capture: from its last resume that was compared to the end."""
        return find_verdict(self.resumes)


def read_capture_witnesses(store: Store) -> tuple[tuple[CaptureWitness, ...], tuple[str, ...]]:
    """Return the captures that a run was resumed from, by first resumes, and reasons why they cannot be read."""
    captures: dict[tuple[int, str, str], list[CaptureResume]] = {}
    try:
        for each in read_capture_resumes(store):
            captures.setdefault((each.number, each.save, each.tier), []).append(each)
    except CheckpointError as error:
        return (), (str(error),)
    return tuple(CaptureWitness(found[-1], tuple(each.resume for each in found)) for found in captures.values()), ()


def read_removed_witnesses(store: Store, steps: Iterable[StepFolder]) -> dict[str, StepWitness]:
    """Return removed steps' resumes, by the step's name."""
    names = (entry.name for entry in store.list() if not entry.is_folder)
    found = {}
    for step in find_removed_steps(names, {each.name for each in steps}):
        try:
            found[step] = StepWitness(None, read_removed_resumes(store, step), ())
        except CheckpointError as error:
            found[step] = StepWitness(None, (), (str(error),))
    return found


def read_step_witness(store: Store, step: StepFolder) -> StepWitness:
    """Return the files next to a step; another save's files do not count."""
    record, resumes, faults = None, tuple[Resume, ...](), list[str]()
    try:
        record = read_record(store, step.name)
    except CheckpointError as error:
        faults.append(str(error))
    try:
        resumes = read_resumes(store, step.name, step.save)
    except CheckpointError as error:
        faults.append(str(error))
    is_of_step = record is not None and record.save == step.save
    return StepWitness(record if is_of_step else None, resumes, tuple(faults))
