"""Events for finished operations: the base class, and the events for saves and loads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)(?:::|://)")


@dataclass(frozen=True)
class OperationEvent:
    """A finished operation in this process.

    Attributes:
        path: Path or URL of the checkpoint or run.
        seconds: Duration.
        step: Step number; None if the path does not belong to a step.
        rank: This process's rank.
        nbytes: Bytes in the files that this rank wrote or removed, or in the tensors that a load filled on this rank.
        phases: Phase durations in seconds, by name.
        retries: Store requests that this process repeated meanwhile.
        warnings: Faults that did not make the operation fail.
        error: Error that made the operation fail; None without an error.
    """

    operation: ClassVar[str] = ""
    """Operation name; each event class sets it."""

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
        """The store's scheme: `file` for a path, `s3`, `gs`, and so on."""
        match = _SCHEME.match(self.path)
        return match[1] if match else "file"

    @property
    def gb_per_second(self) -> float:
        """Gigabytes (10**9 bytes) per second on this rank; 0 without bytes."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def describe_result(self) -> str:
        """Return the result to log that only this event class has; empty without one."""
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return all values as JSON types; an error as its class and message."""
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        derived = {"operation": self.operation, "store": self.store, "gb_per_second": self.gb_per_second}
        return {**derived, **vars(self), "phases": dict(self.phases), "warnings": [*self.warnings], "error": error}


@dataclass(frozen=True)
class SaveEvent(OperationEvent):
    """A save.

    Phases: `waiting` for the previous save, `capture` (flatten and plan), `staging` in the background, `write`,
    `publish`.

    Attributes:
        is_background: Whether `async_save` ran the save.
    """

    operation: ClassVar[str] = "save"
    is_background: bool = False


@dataclass(frozen=True)
class LoadEvent(OperationEvent):
    """A load, with the phases `plan` and `read`; a load without a state has only `read`."""

    operation: ClassVar[str] = "load"
