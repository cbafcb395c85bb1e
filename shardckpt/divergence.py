"""The first difference between a resumed run and the saved one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

Cause = Literal["batch", "random state", "parameter", "precision", "optimizer", "schedule", "state", "loss"]


Since = Literal["load", "use", "step"]

Rank = Annotated[int, range(1 << 20)]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a resumed step and its record.

    Attributes:
        cause: Kind of difference.
        step: Step number; -1 for a check right after a load.
        name: Tensor, generator, setting or flag that differs; for a batch how it differs: `repeated`, `skipped`,
            `other batch size`, `other order`, `other ranks' share`, `other samples`, or `same on several ranks`.
        ranks: Ranks that differ; empty if it is not known, or all do.
        since: Whether it differs since the load, since its first use after the load, or since the step.
        sentence: Description, without a period.
        fix: Action that resolves it.
    """

    cause: Cause
    step: int
    name: str
    sentence: str
    fix: str
    ranks: tuple[Rank, ...] = ()
    since: Since = "step"

    def __str__(self) -> str:
        return f"{self.sentence}. {self.fix}"
