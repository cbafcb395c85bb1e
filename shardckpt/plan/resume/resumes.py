"""Resumes of a step: how far each was compared with the record, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardckpt.plan.resume.step_records import Environment, WitnessRecord
from shardckpt.plan.resume.verdict import Divergence

Verdict = Literal["proven", "diverged", "unproven"]
StepVerdict = Literal["proven", "diverged", "unproven", "no record"]

MOST_RESUMES = 64  # maximum number of resumes of a step that are kept, the newest

_MOST_CHARACTERS = 1000
_MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Resume:
    """A resume of a step, as far as it was compared with the record of the run that saved.

    Attributes:
        id: Id of the resume.
        began_at: Time of the restore, in seconds since the epoch.
        steps: Numbers of the recorded steps, which the resume has to reproduce.
        compared: Number of them that were equal to the record.
        rank_count_before: Number of ranks of the run that saved.
        rank_count: Number of ranks of the resumed run.
        style_before: How the model was sharded when it was saved.
        style: How it is sharded in the resumed run; empty before the first compared step.
        has_equal_layout: Whether each rank holds the same elements as before; None before the first compared step.
        is_deterministic: Whether both runs say that a step gives the same bits each time, so that bits were compared;
            None before the first compared step.
        divergence: The first difference; None without one.
    """

    id: str
    began_at: float
    steps: tuple[int, ...]
    compared: int
    rank_count_before: int
    rank_count: int
    style_before: str
    style: str = ""
    has_equal_layout: bool | None = None
    is_deterministic: bool | None = None
    divergence: Divergence | None = None

    @property
    def verdict(self) -> Verdict:
        """`proven` if one step or more was recorded and all were equal, `diverged`, or else `unproven`."""
        if self.divergence is not None:
            return "diverged"
        return "proven" if self.steps and self.compared >= len(self.steps) else "unproven"


@dataclass(frozen=True, slots=True)
class CaptureResume:
    """A resume from a capture of a tier, which may be gone before anybody asks for its verdict."""

    number: int  # number of the captured step
    tier: str
    path: str  # path or URL of the capture
    save: str  # id of the save that captured it
    resume: Resume


def begin_resume(record: WitnessRecord, *, resume_id: str, began_at: float, ranks: int) -> Resume:
    """Return a resume that was not compared yet."""
    steps, before = tuple(step.step for step in record.steps), record.environment
    return Resume(resume_id, began_at, steps, 0, before.world, ranks, before.style[:_MOST_CHARACTERS])


def add_compared_step(resume: Resume, before: Environment, now: Environment, found: Divergence | None) -> Resume:
    """Return a resume with one more compared step; the first divergence stays."""
    first = resume.divergence or (None if found is None else _shorten(found))
    return replace(
        resume,
        compared=resume.compared + (first is None),
        style=now.style[:_MOST_CHARACTERS],
        has_equal_layout=before.has_equal_layout(now),
        is_deterministic=before.is_deterministic and now.is_deterministic,
        divergence=first,
    )


def _shorten(found: Divergence) -> Divergence:
    """Return a divergence of bounded size: names of tensors may have any length, and ranks may be many."""
    texts = {name: getattr(found, name)[:_MOST_CHARACTERS] for name in ("name", "sentence", "fix")}
    return replace(found, **texts, ranks=found.ranks[:_MOST_RANKS])


def merge_resumes(known: Iterable[Resume], newer: Iterable[Resume]) -> tuple[Resume, ...]:
    """Return the resumes of two lists, oldest first; of those with one id the newer, and at most `MOST_RESUMES`."""
    by_id = {resume.id: resume for resume in (*known, *newer)}
    return tuple(sorted(by_id.values(), key=lambda resume: (resume.began_at, resume.id)))[-MOST_RESUMES:]


def merge_capture_resumes(known: Iterable[CaptureResume], newer: Iterable[CaptureResume]) -> tuple[CaptureResume, ...]:
    """Return the resumes of two lists as `merge_resumes`; texts have a bounded length."""
    by_id = {each.resume.id: replace(each, path=each.path[:_MOST_CHARACTERS]) for each in (*known, *newer)}
    kept = merge_resumes((), (each.resume for each in by_id.values()))
    return tuple(by_id[resume.id] for resume in kept)


def find_verdict(resumes: Sequence[Resume]) -> Verdict:
    """Return the verdict on a step: that of its last resume that was compared to the end."""
    last = find_last_compared(resumes)
    return "unproven" if last is None else last.verdict


def find_last_compared(resumes: Sequence[Resume]) -> Resume | None:
    """Return the last resume that was compared to the end; the last one if none was, None without one."""
    compared = (resume for resume in reversed(resumes) if resume.verdict != "unproven")
    return next(compared, resumes[-1] if resumes else None)
