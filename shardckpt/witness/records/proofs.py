"""Verdicts on a run's resumes, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from shardckpt.witness.records.resumes import Resume, StepVerdict, find_last_compared


@dataclass(frozen=True, slots=True)
class StepProof:
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


@dataclass(frozen=True, slots=True)
class Proof:
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
