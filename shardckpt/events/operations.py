"""Events of operations that have ended, one class for each kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)(?:::|://)")


@dataclass(frozen=True)
class OperationEvent:
    """An operation of this process that has ended.

    Attributes:
        path: Path or URL of the checkpoint, or of the run.
        seconds: Duration.
        step: Number of the step; None if the path is not that of a step.
        rank: Rank of this process.
        nbytes: Bytes of the files that this rank wrote or removed, or of the tensors that a load filled on this rank.
        phases: Durations of the phases in seconds, by name.
        retries: Requests to a store that this process repeated meanwhile.
        warnings: Faults that did not make the operation fail.
        error: Error that made the operation fail; None without an error.
    """

    operation: ClassVar[str] = ""
    """Name of the operation: the text that each kind of event has here."""

    path: str
    seconds: float = 0.0
    step: int | None = None
    rank: int = 0
    nbytes: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    retries: int = 0
    warnings: tuple[str, ...] = ()
    error: BaseException | None = None

    @property
    def store(self) -> str:
        """Scheme of the store: `file` for a path, `s3`, `gs`, and so on."""
        match = _SCHEME.match(self.path)
        return match[1] if match else "file"

    @property
    def gb_per_second(self) -> float:
        """Gigabytes (10**9 bytes) of this rank per second; 0 without bytes."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return all values as types of JSON; an error as its class and message."""
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        derived = {"operation": self.operation, "store": self.store, "gb_per_second": self.gb_per_second}
        return {**derived, **vars(self), "phases": dict(self.phases), "warnings": [*self.warnings], "error": error}


@dataclass(frozen=True)
class SaveEvent(OperationEvent):
    """A save.

    Phases: `waiting` for the previous save, `capture` (flatten and plan), `staging` in the background, `write`,
    `publish`.

    Attributes:
        is_background: Whether it was `async_save`.
    """

    operation: ClassVar[str] = "save"
    is_background: bool = False


@dataclass(frozen=True)
class LoadEvent(OperationEvent):
    """A load. Phases: `plan` and `read`; for a load without a state `read` only."""

    operation: ClassVar[str] = "load"


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
    """A copy of a step that was claimed and is lost, other than by retention; on rank 0.

    The path is that of the copy.

    Attributes:
        tier: Place of the lost copy.
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
