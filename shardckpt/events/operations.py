"""Events of operations that have ended: the class of all, and those of saves and loads."""

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

    def describe_result(self) -> str:
        """Return, for the line of a log, the result that only this kind of event has; empty without one."""
        return ""

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
