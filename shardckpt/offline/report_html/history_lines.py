"""Describe a run's history for the page: a value for each statistic, tensor and step."""

from __future__ import annotations

import math
from typing import Any

from shardckpt.errors import escape
from shardckpt.manifest import split_numbers
from shardckpt.offline.results.tensor_stats import STATS, History, TensorStats

_DIGITS = 6  # significant; 1,000 tensors in 100 steps take about 2 MB


def describe_history(found: History) -> dict[str, Any]:
    """Return the data for a history's page: JSON values only; None where a step lacks a tensor."""
    steps = [{tensor.name: tensor for tensor in step.tensors} for step in found.steps]
    names = sorted({name for step in steps for name in step}, key=split_numbers)
    return {
        "schema_version": 1,
        "kind": "history",
        "root": escape(found.root),
        "steps": [step.number for step in found.steps],
        "tensors": [*map(escape, names)],
        "values": {stat: [[_get_value(step.get(name), stat) for step in steps] for name in names] for stat in STATS},
    }


def _get_value(tensor: TensorStats | None, stat: str) -> float | str | None:
    """Return a rounded value as JSON has it: infinities as text."""
    value = None if tensor is None else getattr(tensor, stat)
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)
