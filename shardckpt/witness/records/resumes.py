"""Resumes from a step: how far each was compared with the record, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from shardckpt.divergence import Divergence, Rank
from shardckpt.native.records import SaveId
from shardckpt.notebook import Result
from shardckpt.witness.records.step_records import Environment, StepNumber, WitnessRecord

Verdict = Literal["proven", "diverged", "unproven"]
StepVerdict = Literal["proven", "diverged", "unproven", "no record"]

MAX_RESUMES = 64  # per step; the newest are kept

_MAX_SECONDS = 10**12
_MAX_CHARACTERS = 1000
_MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Resume:
    """A resume from a step, as far as it was compared with the record of the run that saved.

    Attributes:
        id: The resume's id.
        began_at: Time of the restore, in seconds since the epoch.
        steps: Recorded steps, which the resume has to reproduce.
        compared: How many steps were equal to the record.
        rank_count_before: Ranks in the run that saved.
        rank_count: Ranks in the resumed run.
        style_before: How the model was sharded when it was saved.
        style: How it is sharded in the resumed run; empty before the first compared step.
        has_equal_layout: Whether each rank holds the same elements as before; None before the first compared step.
        is_deterministic: Whether both runs say that a step gives the same bits each time, so that bits were compared;
            None before the first compared step.
        divergence: The first difference; None without one.
    """

    id: SaveId
    began_at: Annotated[float, range(_MAX_SECONDS)]
    steps: tuple[StepNumber, ...]
    compared: StepNumber
    rank_count_before: Rank
    rank_count: Rank
    style_before: str
    style: str = ""
    has_equal_layout: bool | None = None
    is_deterministic: bool | None = None
    divergence: Divergence | None = None

    @property
    def verdict(self) -> Verdict:
        """`proven` if steps were recorded and all were equal, `diverged` after a difference, else `unproven`."""
        if self.divergence is not None:
            return "diverged"
        return "proven" if self.steps and self.compared >= len(self.steps) else "unproven"


@dataclass(frozen=True, slots=True)
class CaptureResume:
    """A resume from a tier's capture, which may be gone before anybody asks for the verdict."""

    number: StepNumber  # captured step
    tier: str
    path: str  # path or URL
    save: SaveId  # id of the save that captured it
    resume: Resume


def start_resume(record: WitnessRecord, *, resume_id: str, began_at: float, ranks: int) -> Resume:
    """Return a resume that was not compared yet."""
    steps, before = tuple(step.step for step in record.steps), record.environment
    return Resume(resume_id, began_at, steps, 0, before.world, ranks, before.style[:_MAX_CHARACTERS])


def add_compared_step(resume: Resume, before: Environment, now: Environment, found: Divergence | None) -> Resume:
    """Return a resume with one more compared step; the first divergence stays."""
    first = resume.divergence or (None if found is None else _shorten(found))
    return replace(
        resume,
        compared=resume.compared + (first is None),
        style=now.style[:_MAX_CHARACTERS],
        has_equal_layout=before.has_equal_layout(now),
        is_deterministic=before.is_deterministic and now.is_deterministic,
        divergence=first,
    )


def _shorten(found: Divergence) -> Divergence:
    """Limit a divergence's size: names may have any length, and ranks may be many."""
    texts = {name: getattr(found, name)[:_MAX_CHARACTERS] for name in ("name", "sentence", "fix")}
    return replace(found, **texts, ranks=found.ranks[:_MAX_RANKS])


def merge_resumes(known: Iterable[Resume], newer: Iterable[Resume]) -> tuple[Resume, ...]:
    """Merge two lists, oldest first; a newer resume replaces one with the same id, and `MAX_RESUMES` stay."""
    by_id = {resume.id: resume for resume in (*known, *newer)}
    return tuple(sorted(by_id.values(), key=lambda resume: (resume.began_at, resume.id)))[-MAX_RESUMES:]


def merge_capture_resumes(known: Iterable[CaptureResume], newer: Iterable[CaptureResume]) -> tuple[CaptureResume, ...]:
    """Merge two lists like `merge_resumes`; limit the length of texts."""
    by_id = {each.resume.id: replace(each, path=each.path[:_MAX_CHARACTERS]) for each in (*known, *newer)}
    kept = merge_resumes((), (each.resume for each in by_id.values()))
    return tuple(by_id[resume.id] for resume in kept)


def find_verdict(resumes: Sequence[Resume]) -> Verdict:
    """Return a step's verdict, from the last resume that was compared to the end."""
    last = find_last_compared(resumes)
    return "unproven" if last is None else last.verdict


def find_last_compared(resumes: Sequence[Resume]) -> Resume | None:
    """Return the last resume that was compared to the end, else the last one; None without resumes."""
    compared = (resume for resume in reversed(resumes) if resume.verdict != "unproven")
    return next(compared, resumes[-1] if resumes else None)


@dataclass(frozen=True, slots=True, repr=False)
class StepProof(Result):
    """Resumes from one step, compared with its record of training steps.

    Attributes:
        number: Step number.
        path: Path or URL of the step.
        verdict: `proven` or `diverged`, by the last resume that was compared to the end; `unproven` without one;
            `no record` if no training step after it was recorded.
        recorded: Numbers of recorded training steps.
        rank_count: World size of the run that saved; 0 without a record.
        style: How the model was sharded; empty without a record.
        resumes: Resumes whose comparison at least started, oldest first; the newest 64 are kept.
        faults: Why the record or the verdicts cannot be read.
        tier: Tier name for a capture; empty for a step in the run's folder.
        is_removed: Whether the step is gone.
    """

    number: int
    path: str
    verdict: StepVerdict
    recorded: tuple[int, ...] = ()
    rank_count: int = 0
    style: str = ""
    resumes: tuple[Resume, ...] = ()
    faults: tuple[str, ...] = ()
    tier: str = ""
    is_removed: bool = False

    @property
    def equal_steps(self) -> tuple[int, int]:
        """Two counts: equal steps in the resume that decides the verdict, and all recorded steps."""
        last = find_last_compared(self.resumes)
        return (0, len(self.recorded)) if last is None else (last.compared, len(last.steps))


@dataclass(frozen=True, slots=True, repr=False)
class Proof(Result):
    """Result of `prove`: a run's complete steps, with the verdicts on their resumes.

    Attributes:
        root: Path or URL of the run.
        steps: Complete steps, oldest first.
        captures: Captures in tiers that the run was resumed from, by first resume; they may be gone.
        faults: Why the resumes from captures cannot be read.
        removed: Steps that are gone and were resumed from, oldest first.
    """

    root: str
    steps: tuple[StepProof, ...]
    captures: tuple[StepProof, ...] = ()
    faults: tuple[str, ...] = ()
    removed: tuple[StepProof, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no step, removed step or capture is `diverged`."""
        return all(step.verdict != "diverged" for step in (*self.removed, *self.steps, *self.captures))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Verdict and record files that cannot be read, one sentence each."""
        return (*(fault for step in (*self.removed, *self.steps) for fault in step.faults), *self.faults)
