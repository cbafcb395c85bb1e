"""Events for a run's steps: restored, compared, removed, replaced, and copied between tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shardckpt.events.recorder import OperationEvent


@dataclass(frozen=True)
class RestoreEvent(OperationEvent):
    """A `Checkpointer.restore`. On rank 0 its warnings are the faults in newer steps and in copies that were not used.

    Bytes and phases come from the last load, which has its own event.

    Attributes:
        tier: Where the restored copy was: `memory`, `local` or `root`; empty without one.
        tier_bytes: Bytes that the last load read on this rank, by place. If several nodes or places have the step's
            files, this includes the rest of verified blocks.
    """

    operation: ClassVar[str] = "restore"
    tier: str = ""
    tier_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumeEvent(OperationEvent):
    """A verdict on a resume, compared with a step's record (`Checkpointer(witness=...)`). On rank 0.

    If the resume diverged, the error is a `ResumeDivergence`, even if training continues with a warning. The duration
    starts at the restore.

    Attributes:
        verdict: `proven` or `diverged`.
        compared: Number of steps that were equal to the record.
        cause: Kind of the first difference; empty if the resume is proven.
        name: Name of the tensor, generator or setting that differs first.
    """

    operation: ClassVar[str] = "resume"
    verdict: str = ""
    compared: int = 0
    cause: str = ""
    name: str = ""


@dataclass(frozen=True)
class PruneEvent(OperationEvent):
    """Old steps were removed, after a save or by `prune`. On rank 0, if there was a step to remove, or an error.

    Attributes:
        removed: Step numbers that were removed.
    """

    operation: ClassVar[str] = "prune"
    removed: tuple[int, ...] = ()

    def describe_result(self) -> str:
        """Return the removed steps as text; empty without one."""
        return f"removed {', '.join(map(str, self.removed))}" if self.removed else ""


@dataclass(frozen=True)
class FallbackEvent(OperationEvent):
    """A checkpoint was replaced by another one, or dropped.

    An older step replaces a damaged one, and a full save replaces a save whose base was removed. A failed capture in
    memory is dropped.

    The warnings have the reason.
    """

    operation: ClassVar[str] = "fallback"


@dataclass(frozen=True)
class ReplicateEvent(OperationEvent):
    """A capture was copied to other machines; its warnings name the copies that failed.

    Bytes are those that this rank received, checked against their hashes and wrote.
    """

    operation: ClassVar[str] = "replicate"


@dataclass(frozen=True)
class BackpressureEvent(OperationEvent):
    """A save waited for an earlier capture in a tier, which was still being written or copied.

    The step and path belong to the earlier capture.
    """

    operation: ClassVar[str] = "backpressure"


@dataclass(frozen=True)
class WithdrawalEvent(OperationEvent):
    """A claimed copy is lost other than by retention, or survives fewer failures. On rank 0.

    The path belongs to the copy.

    Attributes:
        tier: Where the copy was.
        survives: Failures that the step survives now.
    """

    operation: ClassVar[str] = "withdrawal"
    tier: str = ""
    survives: tuple[str, ...] = ()


@dataclass(frozen=True)
class PromotionEvent(OperationEvent):
    """A capture was copied to a farther tier, in the background. On rank 0.

    The path belongs to the copy, and the bytes to the step.

    Attributes:
        tier: Where the copy is.
        source: Path or URL of the capture.
    """

    operation: ClassVar[str] = "promotion"
    tier: str = ""
    source: str = ""


@dataclass(frozen=True)
class WaitEvent(OperationEvent):
    """A rank waits for others in a collective call: after 10 s, after 60 s, then every 5 minutes.

    The lowest rank that waits emits it, and logs a warning.

    Attributes:
        call: What the ranks do, such as `save` or `durability`.
        waits_for: Ranks that have not come, or that still work.
    """

    operation: ClassVar[str] = "wait"
    call: str = ""
    waits_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class PreemptionEvent(OperationEvent):
    """What a run did about a notice that it ends (`Checkpointer(deadline=...)`).

    On rank 0 when the save has ended or its time is over, or on a rank whose step did not end in time. If rank 0 leaves
    before the commit, on the lowest rank that stays. The path is the run's; the error says why nothing was committed.

    Attributes:
        grace_s: Seconds that were left when the save started; None if they were unknown.
        chosen: Farthest place that fitted: `memory`, `local` or `root`; if none fitted, the nearest. Empty if the step
            did not end.
        expected_s: Seconds that a save was expected to take, by place; without places that no save had measured.
        committed: Places that have the step, as this rank sees them.
        survives: Failures that the step survives, as for `durability`, and `leaving nodes`: the loss of all nodes that
            have a notice.
        notices: Signals and deadlines so far.
        saves_begun: Saves that this process began because of them.
        saves_committed: How many of these were committed in at least one place.
    """

    operation: ClassVar[str] = "preemption"
    grace_s: float | None = None
    chosen: str = ""
    expected_s: Mapping[str, float] = field(default_factory=dict)
    committed: tuple[str, ...] = ()
    survives: tuple[str, ...] = ()
    notices: int = 0
    saves_begun: int = 0
    saves_committed: int = 0

    def describe_result(self) -> str:
        """Return what was saved, and the counters, as text."""
        left = "an unknown time" if self.grace_s is None else f"{max(self.grace_s - self.seconds, 0.0):.1f} s"
        saved = f"step {self.step} is in {' and '.join(self.committed)}" if self.committed else "no step is saved"
        survives = f", survives losing {', '.join(self.survives)}" if self.survives else ""
        counts = f"notices: {self.notices}, saves begun: {self.saves_begun}, committed: {self.saves_committed}"
        return f"{left} left, {saved}{survives} ({counts})"


@dataclass(frozen=True)
class PublishEvent(OperationEvent):
    """A version of the weights in a stream was published (`Publisher.publish`), in the background.

    Phases: `waiting` for the previous version, `capture` (flatten and plan), `staging` (copy and cast), `write`
    (compare, encode, write), `publish` (commit), `anchor`.

    Attributes:
        version: Number of the version.
        epoch: Start of a publisher in the stream.
        changed: Elements that this rank published.
        elements: Elements that this rank compared.
        has_anchor: Whether all weights were written too.
    """

    operation: ClassVar[str] = "publish"
    version: int = 0
    epoch: int = 0
    changed: int = 0
    elements: int = 0
    has_anchor: bool = False


@dataclass(frozen=True)
class ReceiveEvent(OperationEvent):
    """A receiver of a stream staged a version (`Subscriber.stage`).

    Phases: `plan` (find the version), `read` (read, verify, combine), `verify` (compare digests with all workers).

    Attributes:
        version: Number of the version.
        epoch: Start of a publisher in the stream.
        versions: Versions that were combined.
        changed: Elements that changed on this worker.
        is_full: Whether all weights are staged.
    """

    operation: ClassVar[str] = "receive"
    version: int = 0
    epoch: int = 0
    versions: int = 0
    changed: int = 0
    is_full: bool = False
