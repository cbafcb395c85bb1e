"""Verdict on the current resume: its file next to the step, and its event. On rank 0."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from shardckpt.checkpoint.run.step_finder import StepFinder
from shardckpt.checkpoint.run.step_restore import RestoredStep
from shardckpt.divergence import Divergence
from shardckpt.errors import CheckpointError, ResumeDivergence, StorageError
from shardckpt.events import OnEvent, ResumeEvent, emit
from shardckpt.events.warn_user import warn_user
from shardckpt.native.commit import find_save
from shardckpt.native.payload import new_save_id
from shardckpt.witness.files.resume_file import add_capture_resume, add_resumes
from shardckpt.witness.records.resumes import CaptureResume, Resume, add_compared_step, start_resume
from shardckpt.witness.records.step_records import Environment, WitnessRecord
from shardckpt.witness.records.verdict import explain_topology

_LOG = logging.getLogger("shardckpt")


@dataclass(frozen=True)
class _Compared:
    """The resume that is being compared."""

    restored: RestoredStep
    before: Environment
    resume: Resume


class ResumeLog:
    """A run's log of resumes, on rank 0."""

    # The file has a resume as unproven from the restore on, so that one that dies before the comparison is known too.

    def __init__(self, finder: StepFinder, on_event: OnEvent | None) -> None:
        self._finder, self._on_event = finder, on_event
        self._compared: _Compared | None = None

    def start(self, restored: RestoredStep, record: WitnessRecord, ranks: int) -> None:
        """Start the log of a resume."""
        resume = start_resume(record, resume_id=new_save_id(), began_at=time.time(), ranks=ranks)
        self._compared = _Compared(restored, record.environment, resume)
        self._write(restored, resume)

    def add_step(self, now: Environment, found: Divergence | None) -> None:
        """Add a compared step."""
        if self._compared is None:
            return
        restored, before, earlier = self._compared.restored, self._compared.before, self._compared.resume
        resume = add_compared_step(earlier, before, now, found)
        self._compared = _Compared(restored, before, resume)
        if resume != earlier:
            self._write(restored, resume)
        if resume.verdict != earlier.verdict:
            self._emit(restored, before, now, resume)

    def _emit(self, restored: RestoredStep, before: Environment, now: Environment, resume: Resume) -> None:
        path, found = restored.finder.path(restored.name), resume.divergence
        if found is None:
            topology = explain_topology(before, now)
            detail = f", {topology}" if topology else ", bit for bit" if resume.is_deterministic else ""
            _LOG.info("the resume of step %d is proven over %d steps%s", restored.number, resume.compared, detail)
        event = ResumeEvent(
            path,
            time.time() - resume.began_at,
            restored.number,
            verdict=resume.verdict,
            compared=resume.compared,
            cause="" if found is None else found.cause,
            name="" if found is None else found.name,
            error=None if found is None else ResumeDivergence(found, path),
        )
        emit(event, self._on_event)

    def _write(self, restored: RestoredStep, resume: Resume) -> None:
        number, name, save, place = restored.number, restored.name, restored.save, restored.finder
        try:
            if place.root != self._finder.root:
                capture = CaptureResume(number, place.tier, place.path(name), save, resume)
                add_capture_resume(self._finder.open_store(), capture)
            store = place.open_store()
            if find_save(store, name) == save:  # the node of rank 0 may be new, and have read the step from others
                add_resumes(store, name, save, resume)
        except (CheckpointError, StorageError) as error:
            warn_user(f"the verdict on the resume of {restored.name} could not be stored: {error}")
