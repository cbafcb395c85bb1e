"""Events of the steps of a run: restored, compared, removed, replaced, and copied between tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shardckpt.events.operations import OperationEvent


@dataclass(frozen=True)
class RestoreEvent(OperationEvent):
    """A `Checkpointer.restore`; on rank 0 its warnings are the faults of newer steps, and of copies that were not used.

    Bytes and phases are those of its last load, which has an event of its own.

    Attributes:
        tier: Place of the copy that was restored: `memory`, `local` or `root`; empty without one.
        tier_bytes: Bytes of the last load on this rank, by place; if several nodes or places have files of the step,
            with the rest of blocks that were verified.
    """

    operation: ClassVar[str] = "restore"
    tier: str = ""
    tier_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumeEvent(OperationEvent):
    """A verdict on a resume that was compared with the record of a step (`Checkpointer(witness=...)`). On rank 0.

    The error of a resume that diverged is a `ResumeDivergence`, also if training goes on with a warning. The duration
    is that since the restore.

    Attributes:
        verdict: `proven` or `diverged`.
        compared: Number of steps that were equal to the record.
        cause: Kind of the thing that differs first; empty if the resume is proven.
        name: Name of that thing: a tensor, a generator, a setting.
    """

    operation: ClassVar[str] = "resume"
    verdict: str = ""
    compared: int = 0
    cause: str = ""
    name: str = ""


@dataclass(frozen=True)
class PruneEvent(OperationEvent):
    """A removal of old steps, after a save or by `prune`. On rank 0, if there was a step to remove, or an error.

    Attributes:
        removed: Numbers of the removed steps.
    """

    operation: ClassVar[str] = "prune"
    removed: tuple[int, ...] = ()

    def describe_result(self) -> str:
        """Return the removed steps as text; empty without one."""
        return f"removed {', '.join(map(str, self.removed))}" if self.removed else ""


@dataclass(frozen=True)
class FallbackEvent(OperationEvent):
    """A checkpoint that was replaced by another one, or by none.

    A damaged step by an older one, a removed base by a full save, a capture in memory that failed by none.

    The warnings have the reason.
    """

    operation: ClassVar[str] = "fallback"


@dataclass(frozen=True)
class ReplicateEvent(OperationEvent):
    """Copies of a capture on other machines; its warnings are the faults of copies that failed.

    Bytes are those that this rank received, compared with their hashes and wrote.
    """

    operation: ClassVar[str] = "replicate"


@dataclass(frozen=True)
class BackpressureEvent(OperationEvent):
    """A save that waited for the capture before it in a tier, which was still being written or copied.

    The step and path are those of the earlier capture.
    """

    operation: ClassVar[str] = "backpressure"


@dataclass(frozen=True)
class WithdrawalEvent(OperationEvent):
    """A copy of a step that was claimed and is lost, other than by retention, or survives less; on rank 0.

    The path is that of the copy.

    Attributes:
        tier: Place of the copy.
        survives: Failures that the step survives now.
    """

    operation: ClassVar[str] = "withdrawal"
    tier: str = ""
    survives: tuple[str, ...] = ()


@dataclass(frozen=True)
class PromotionEvent(OperationEvent):
    """A copy of a capture to a farther tier, in the background; on rank 0.

    The path is that of the copy, the bytes are those of the step.

    Attributes:
        tier: Place of the copy.
        source: Path or URL of the capture.
    """

    operation: ClassVar[str] = "promotion"
    tier: str = ""
    source: str = ""
