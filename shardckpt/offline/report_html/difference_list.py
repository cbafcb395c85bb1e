"""Describe a comparison for the page: differences, layers, and the first tensor that differs."""

from __future__ import annotations

import math
from typing import Any

from shardckpt.errors import escape
from shardckpt.manifest import split_numbers
from shardckpt.offline.results.comparison import Comparison, LayerDifference, TensorDifference


def describe_comparison(found: Comparison) -> dict[str, Any]:
    """Return the data for a comparison's page: JSON values only."""
    differences = sorted(found.differences, key=lambda each: split_numbers(each.name))  # layers.2 before layers.10
    return {
        "schema_version": 1,
        "kind": "diff",
        "a": escape(found.a),
        "b": escape(found.b),
        "same": found.same,
        "compared": found.compared,
        "equal": found.equal,
        "compared_values": found.compared_values,
        "equal_values": found.equal_values,
        "tensors": [_describe_tensor(each) for each in differences],
        "layers": [_describe_layer(each) for each in found.layers],
        "values": [
            [escape(each.name), _say(each.kind), escape(each.a), escape(each.b)] for each in found.value_differences
        ],
        "not_compared": [[escape(name), escape(why)] for name, why in found.not_compared],
        "left_out": [*map(escape, found.left_out)],
        "warnings": [*map(escape, found.warnings)],
    }


def _describe_tensor(found: TensorDifference) -> list[Any]:
    numbers = map(_to_json, (found.l2, found.relative_l2, found.max_abs, found.max_rel))
    both = (f"{tensor or ''}" for tensor in (found.a, found.b))
    return [escape(found.name), _say(found.kind), *both, *numbers, *found.nans]


def _say(kind: str) -> str:
    """Return a kind in words."""
    return kind.replace("_", " ")


def _describe_layer(found: LayerDifference) -> list[Any]:
    numbers = map(_to_json, (found.l2, found.relative_l2, found.max_abs))
    return [escape(found.name), found.tensor_count, *numbers]


def _to_json(number: float | None) -> float | str | None:
    """Return a number as JSON has it: `inf` and `nan` as text."""
    return number if number is None or math.isfinite(number) else str(number)
