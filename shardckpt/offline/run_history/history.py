"""Implement `history`: tensor statistics over a run's steps."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardckpt.errors import MissingFileError, ShardckptError, SourceNotFoundError, escape
from shardckpt.manifest import split_numbers
from shardckpt.notebook import draw_in_notebooks
from shardckpt.offline.compare.canonical import STEP_SLOT
from shardckpt.offline.prune import StepInfo, ls
from shardckpt.offline.report_html import render_page, require_report_target, write_page
from shardckpt.offline.results.computed_parts import ComputedPart, compute_parts
from shardckpt.offline.results.tensor_stats import STATS, History, StepStats, TensorStats
from shardckpt.offline.select.options import parse_globs, parse_part
from shardckpt.offline.stats import stats
from shardckpt.storage.resolve_url import as_url


def history(
    root: str | os.PathLike[str],
    *,
    part: str = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    html: str | os.PathLike[str] = "",
) -> History:
    """Return tensor statistics over a run's complete steps.

    Stored statistics are read; others are computed from all values, as in `stats`.

    Args:
        root: Path or URL of the run's folder; `RUN@1000..2000` takes some of its steps.
        part: `model` or `optim`; everything if empty or `all`. Without `all` or `include`, counters (steps, batches)
            are skipped, and integers and single numbers outside model and optimizer, such as random states.
        include: Globs for names; empty for all.
        exclude: Globs for names to skip.
        html: Path or URL for one page that draws the statistics over the steps, a line for each tensor.

    Raises:
        UsageError: The folder is not a run, or has no complete step. A glob matches nothing in a step, or nothing
            remains. `html` names another file than an earlier report.
        CheckpointError: A step is damaged.
        StorageError: Reading failed.

    Examples:
        >>> [step.tensors[0].l2 for step in shardckpt.history("run", include=["*.weight"]).steps]  # doctest: +SKIP
    """
    root, html = as_url(root), as_url(html)
    if html:
        require_report_target(html)
    chosen = ChosenTensors.parse(part, include, exclude)
    listed = list_complete(root)
    measure = partial(_measure_if_there, chosen)
    parts = (ComputedPart(f"step {step.number}", 0, partial(measure, step), range(2)) for step in listed)
    measured = [*zip(listed, compute_parts(parts, StepStats), strict=True)]
    warnings = tuple(str(_removed_error(step)) for step, stats in measured if not stats)
    found = History(root, tuple(each for _, stats in measured for each in stats), warnings)
    if html:
        write_page(_render(found), html)
    return found


def list_complete(root: str) -> tuple[StepInfo, ...]:
    """Return a run's complete steps, oldest first, at least one."""
    steps = ls(root)
    if not steps.complete:
        raise SourceNotFoundError(
            "this run has no complete step",
            where=root,
            found=f"{len(steps.incomplete)} incomplete" if steps.incomplete else "an empty folder",
            fix="Check the path or URL.",
        )
    return steps.complete


class StepRemovedError(MissingFileError):
    """A step was removed while it was read."""


def _removed_error(step: StepInfo) -> StepRemovedError:
    return StepRemovedError("the step was removed while it was read", where=step.path)


def _measure_if_there(chosen: ChosenTensors, step: StepInfo) -> tuple[StepStats, ...]:
    """Return a step's statistics; nothing for a step that is removed meanwhile."""
    try:
        return (chosen.measure(step),)
    except StepRemovedError:
        return ()


@dataclass(frozen=True, slots=True)
class ChosenTensors:
    """Tensors to measure in each step."""

    part: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    @classmethod
    def parse(cls, part: str, include: object, exclude: object) -> ChosenTensors:
        """Return the tensors that a caller chooses. Raises UsageError."""
        if part:
            parse_part(part)
        return cls(part, parse_globs("include", include), parse_globs("exclude", exclude))

    def measure(self, step: StepInfo) -> StepStats:
        """Return their statistics in one step."""
        try:
            found = stats(step.path, part=self.part, include=self.include, exclude=self.exclude)
        except ShardckptError as error:
            if _is_there(step):
                raise
            raise _removed_error(step) from error
        return StepStats(step.number, step.path, found.tensors, found.left_out)


def _is_there(step: StepInfo) -> bool:
    """Return whether a run still has a complete step."""
    try:
        return step in ls(step.path.rpartition("/")[0]).complete
    except ShardckptError:  # the run has no steps any more, or is gone
        return False


_WEIGHTS, _OTHERS, _COUNTERS = "weights", "other slots", "counters"
_MAX_PANELS = 8
_DIGITS = 6  # significant; 1,000 tensors in 100 steps take about 2 MB


def _render(found: History) -> str:
    return render_page(escape(found.root), describe_history(found))


draw_in_notebooks(History, _render)


def describe_history(found: History) -> dict[str, Any]:
    """Return the data for a history's page: JSON values only; None where a step lacks a tensor."""
    steps = [{tensor.name: tensor for tensor in step.tensors} for step in found.steps]
    tensors = {tensor.name: tensor for step in steps for tensor in step.values()}
    names = sorted(tensors, key=split_numbers)
    scale_of = _find_scales(tensors[name] for name in names)
    scales = sorted({*scale_of}, key=lambda scale: (scale == _COUNTERS, scale == _OTHERS, scale != _WEIGHTS, scale))
    return {
        "schema_version": 1,
        "kind": "history",
        "root": escape(found.root),
        "steps": [step.number for step in found.steps],
        "tensors": [*map(escape, names)],
        "scales": [*map(escape, scales)],
        "scale_of": [*map(scales.index, scale_of)],
        "warnings": [*map(escape, found.warnings)],
        "values": {stat: [[_get_value(step.get(name), stat) for step in steps] for name in names] for stat in STATS},
    }


def _find_scales(tensors: Iterable[TensorStats]) -> list[str]:
    """Return a panel for each tensor; values in one panel have one scale."""
    slots = [_find_slot(tensor) for tensor in tensors]
    known = {slot for slot, _ in Counter(slots).most_common(_MAX_PANELS)}
    return [slot if slot in known else _OTHERS for slot in slots]


def _find_slot(tensor: TensorStats) -> str:
    slot = tensor.name.rpartition("/")[2].partition(" ")[0] if "/" in tensor.name else _WEIGHTS
    return _COUNTERS if slot == STEP_SLOT or "int" in tensor.dtype else slot


def _get_value(tensor: TensorStats | None, stat: str) -> float | str | None:
    """Return a rounded value as JSON has it: infinities as text."""
    value = None if tensor is None else getattr(tensor, stat)
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)
