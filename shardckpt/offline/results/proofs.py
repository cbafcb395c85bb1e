"""Verdicts on the resumes of a run, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from shardckpt.plan.resume.resumes import Resume, StepVerdict, find_last_compared


@dataclass(frozen=True, slots=True)
class StepProof:
    """Resumes of one step of a run, compared with its record of training steps.

    Attributes:
        number: Number of the step.
        path: Path or URL of the step.
        verdict: `proven` or `diverged`, as the last resume that was compared to the end; `unproven` if none was;
            `no record` if no training step behind it was recorded.
        recorded: Numbers of the training steps that are recorded.
        rank_count: Number of ranks of the run that saved; 0 without a record.
        style: How the model was sharded; empty without a record.
        resumes: Resumes that were compared, or began to be, oldest first; the newest 64 are kept.
        faults: Reasons why the record or the verdicts cannot be read.
        tier: Name of the tier of a capture; empty for a step of the run's folder.
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
        """Numbers of steps that were equal in the resume that decides the verdict, and of all recorded steps."""
        last = find_last_compared(self.resumes)
        return (0, len(self.recorded)) if last is None else (last.compared, len(last.steps))


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of `prove`: the complete steps of a run, with the verdicts on their resumes.

    Attributes:
        root: Path or URL of the run.
        steps: Complete steps, oldest first.
        captures: Captures in tiers that the run was resumed from, in the order of their first resumes; they may be
            gone.
        faults: Reasons why the resumes from captures cannot be read.
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
        """Files of verdicts and records that cannot be read, one sentence each."""
        return (*(fault for step in (*self.removed, *self.steps) for fault in step.faults), *self.faults)
