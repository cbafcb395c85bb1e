"""Implement `history`: statistics of tensors over the steps of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardckpt.offline.prune import StepInfo, ls
from shardckpt.offline.stats import stats
from shardckpt.offline.write.report import History, StepStats


def history(
    root: str | os.PathLike[str],
    *,
    part: str = "all",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> History:
    """Return statistics of tensors over the complete steps of a run.

    Those that a save stored are read; others are computed from all values, as `stats` does.

    Args:
        root: Path or URL of the run's folder.
        part: `model`, `optim` or `all`.
        include: Globs of names; empty for all.
        exclude: Globs of names to skip.

    Raises:
        UsageError: The folder is not a run; in a step a glob matches nothing, or nothing remains.
        CheckpointError: A step is damaged.
        StorageError: Reading failed.

    Examples:
        >>> [step.tensors[0].l2 for step in shardckpt.history("run", include=["*.weight"]).steps]  # doctest: +SKIP
    """
    root, chosen = os.fspath(root), ChosenTensors(part, tuple(include), tuple(exclude))
    return History(root, tuple(map(chosen.measure, ls(root).complete)))


@dataclass(frozen=True, slots=True)
class ChosenTensors:
    """Tensors of each step whose statistics are wanted."""

    part: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def measure(self, step: StepInfo) -> StepStats:
        """Return their statistics in one step."""
        found = stats(step.path, part=self.part, include=self.include, exclude=self.exclude)
        return StepStats(step.number, step.path, found.tensors)
