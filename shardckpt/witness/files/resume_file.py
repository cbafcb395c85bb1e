"""Files with verdicts: `step-00001000.resumes.json` next to the step, with the resumes that were compared.

A capture may be gone when the verdict on its resume is read, and the run may not have its step. So resumes from
captures are in one more file, `.captures.resumes.json` in the run's folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from shardckpt.encodings.typed_json import dump, load
from shardckpt.errors import FormatError
from shardckpt.native.records import SaveId
from shardckpt.native.run_directory import CAPTURE_RESUMES, resumes_name
from shardckpt.storage.store import Store
from shardckpt.witness.files.record_file import Versioned, line_url, read_line, write_line
from shardckpt.witness.records.resumes import (
    MAX_RESUMES,
    CaptureResume,
    Resume,
    merge_capture_resumes,
    merge_resumes,
)

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedResumes(Versioned):
    """A step's resumes."""

    save: SaveId  # id of the save that wrote the step
    resumes: Annotated[tuple[Resume, ...], range(MAX_RESUMES + 1)]  # oldest first

    def __post_init__(self) -> None:
        _require_valid(self.resumes)


@dataclass(frozen=True, slots=True)
class SavedCaptureResumes(Versioned):
    """A run's resumes from captures."""

    captures: Annotated[tuple[CaptureResume, ...], range(MAX_RESUMES + 1)]  # oldest first

    def __post_init__(self) -> None:
        _require_valid(each.resume for each in self.captures)


def _require_valid(resumes: Iterable[Resume]) -> None:
    for resume in resumes:
        if resume.compared > len(resume.steps):
            raise FormatError("more steps were compared than recorded", found=resume.compared)
        if resume.divergence is not None and resume.divergence.step < 0:
            raise FormatError("a divergence must be at a step", found=resume.divergence.step)


def read_resumes(store: Store, step: str, save: str) -> tuple[Resume, ...]:
    """Return a step's resumes, oldest first; empty if none was compared."""
    saved = _read(store, step)
    return saved.resumes if saved is not None and saved.save == save else ()


def read_removed_resumes(store: Store, step: str) -> tuple[Resume, ...]:
    """Return a removed step's resumes, by the save that wrote it last."""
    saved = _read(store, step)
    return () if saved is None else saved.resumes


def add_resumes(store: Store, step: str, save: str, *resumes: Resume) -> None:
    """Add a step's resumes to its file atomically; each replaces an earlier one with its id."""
    # A damaged file, or one of a newer version, raises and stays as it is.
    known = read_resumes(store, step, save)
    merged = merge_resumes(known, resumes)
    if merged != known:
        write_line(store, resumes_name(step), dump(SavedResumes(save, merged)))


def copy_resumes(source: Store, step: str, target: Store, name: str) -> None:
    """Add a step's resumes to its copy."""
    saved = _read(source, step)
    if saved is not None:
        add_resumes(target, name, saved.save, *saved.resumes)


def read_capture_resumes(store: Store) -> tuple[CaptureResume, ...]:
    """Return a run's resumes from tier captures, oldest first."""
    line = read_line(store, CAPTURE_RESUMES, "the file with resumes from captures", _MAX_BYTES)
    where = line_url(store, CAPTURE_RESUMES)
    return () if line is None else load(SavedCaptureResumes, line, where=where).captures


def add_capture_resume(store: Store, resume: CaptureResume) -> None:
    """Add a resume from a capture to the run's file; it replaces an earlier one with its id."""
    known = read_capture_resumes(store)
    merged = merge_capture_resumes(known, [resume])
    if merged != known:
        write_line(store, CAPTURE_RESUMES, dump(SavedCaptureResumes(merged)))


def _read(store: Store, step: str) -> SavedResumes | None:
    name = resumes_name(step)
    line = read_line(store, name, "the file with resumes", _MAX_BYTES)
    return None if line is None else load(SavedResumes, line, where=line_url(store, name))
