"""Files of verdicts: `step-00001000.resumes.json` beside the step, with the resumes that were compared.

A capture may be gone when the verdict on its resume is asked for, and the run may not have its step. So resumes from
captures are in one more file, `.captures.resumes.json` in the folder of the run.
"""

from __future__ import annotations

from shardckpt.format.native.run_directory import CAPTURE_RESUMES, resumes_name
from shardckpt.format.witness.line_file import line_url, read_line, write_line
from shardckpt.format.witness.resume_json import (
    SavedResumes,
    decode_capture_resumes,
    decode_resumes,
    encode_capture_resumes,
    encode_resumes,
)
from shardckpt.plan.resume.resumes import CaptureResume, Resume, merge_capture_resumes, merge_resumes
from shardckpt.storage.store import Store

_MOST_BYTES = 1 << 20


def read_resumes(store: Store, step: str, save: str) -> tuple[Resume, ...]:
    """Return the resumes of a step, oldest first; empty if none was compared."""
    saved = _read(store, step)
    return saved.resumes if saved is not None and saved.save == save else ()


def read_removed_resumes(store: Store, step: str) -> tuple[Resume, ...]:
    """Return the resumes of a step that is gone, of the save that wrote it last; arguments and errors as above."""
    saved = _read(store, step)
    return () if saved is None else saved.resumes


def add_resumes(store: Store, step: str, save: str, *resumes: Resume) -> None:
    """Add resumes of a step to its file, each in place of an earlier one with its id; the file changes at once."""
    known = read_resumes(store, step, save)
    merged = merge_resumes(known, resumes)
    if merged != known:
        write_line(store, resumes_name(step), encode_resumes(SavedResumes(save, merged)))


def copy_resumes(source: Store, step: str, target: Store, name: str) -> None:
    """Add the resumes of a step to those of its copy."""
    saved = _read(source, step)
    if saved is not None:
        add_resumes(target, name, saved.save, *saved.resumes)


def read_capture_resumes(store: Store) -> tuple[CaptureResume, ...]:
    """Return the resumes of a run from captures of its tiers, oldest first."""
    line = read_line(store, CAPTURE_RESUMES, "the file of resumes from captures", _MOST_BYTES)
    return () if line is None else decode_capture_resumes(line, where=line_url(store, CAPTURE_RESUMES))


def add_capture_resume(store: Store, resume: CaptureResume) -> None:
    """Add a resume from a capture to the file of the run, in place of an earlier one with its id."""
    known = read_capture_resumes(store)
    merged = merge_capture_resumes(known, [resume])
    if merged != known:
        write_line(store, CAPTURE_RESUMES, encode_capture_resumes(merged))


def _read(store: Store, step: str) -> SavedResumes | None:
    name = resumes_name(step)
    line = read_line(store, name, "the file of resumes", _MOST_BYTES)
    return None if line is None else decode_resumes(line, where=line_url(store, name))
