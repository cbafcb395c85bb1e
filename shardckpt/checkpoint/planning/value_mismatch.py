"""Find values that differ between ranks but must be equal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardckpt.checkpoint.planning.rank_report import SHOWN, digest_tree
from shardckpt.checkpoint.stateful.flatten import FlattenedState, encoded
from shardckpt.encodings import tagged_json
from shardckpt.errors import UsageError
from shardckpt.manifest import Path, dotted
from shardckpt.readers.opened.state_tree import TensorRef


def value_digests(flattened: FlattenedState) -> bytes:
    """Return each plain value's and container's digest, to find differences."""
    values: dict[str, ValueSummary] = {}
    containers: dict[str, ValueSummary] = {}
    _collect(flattened.tree, (), values, containers)
    return json.dumps([values, containers]).encode()


ValueSummary = tuple[str, str, str]  # digest, type, and start of a value's text

# Number of characters of a value's text to send; a later difference is reported without its position.
_TEXT_CHARACTERS = 1 << 16


def _collect(tree: Any, path: Path, values: dict[str, ValueSummary], containers: dict[str, ValueSummary]) -> None:
    if isinstance(tree, dict) and tree:
        keys = ", ".join(sorted(map(repr, tree)))
        containers[dotted(path)] = (
            digest_tree([type(tree).__name__, keys]),
            type(tree).__name__,
            keys[:_KEYS_CHARACTERS],
        )
        for key, value in tree.items():
            _collect(value, (*path, tagged_json.path_key(key)), values, containers)
    elif type(tree) in (list, tuple) and tree:
        containers[dotted(path)] = digest_tree([type(tree).__name__]), type(tree).__name__, ""
        for at, value in enumerate(tree):
            _collect(value, (*path, at), values, containers)
    else:
        digest = digest_tree(encoded(tree, lambda _: 0, path))
        kind = "tensor" if isinstance(tree, TensorRef) else type(tree).__name__
        text = tree if isinstance(tree, str) else repr(tree) if isinstance(tree, _SHOWN_TYPES) else ""
        values[dotted(path)] = digest, kind, text[:_TEXT_CHARACTERS]


_KEYS_CHARACTERS = 200
_SHOWN_TYPES = (bool, int, float)


def build_mismatch_error(
    values: Sequence[Mapping[str, Sequence[str]]], containers: Sequence[Mapping[str, Sequence[str]]] = ()
) -> UsageError:
    """Return the error for values that differ between ranks but must be equal."""
    wrong = _differences(values) or _differences(containers) or ["the states of the ranks have different structures"]
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    tensors = [{name for name, summary in each.items() if summary[1] == "tensor"} for each in values]
    return UsageError("; ".join(wrong[:SHOWN]) + more, fix=_KEEP if all(map(tensors[0].__eq__, tensors)) else _USE_DCP)


_KEEP = "To keep rank 0's, broadcast it; to keep each rank's own, use shardckpt.PerRank."
_USE_DCP = (
    "If each rank has another part of a model (a pipeline stage), save the state dicts with"
    " `shardckpt.integrations.dcp.save`; otherwise give every rank the same values, or keep each rank's own with"
    " shardckpt.PerRank."
)


def _differences(summaries: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    names = dict.fromkeys(name for summary in summaries for name in summary)
    return [text for name in names if (text := _difference(name, [summary.get(name) for summary in summaries]))]


def _difference(name: str, summaries: Sequence[Sequence[str] | None]) -> str:
    """Return how a value differs between rank 0 and others; empty if equal."""
    odd = next(
        (rank for rank, summary in enumerate(summaries) if (summary or [""])[0] != (summaries[0] or [""])[0]), None
    )
    if odd is None:
        return ""
    one, other = summaries[0], summaries[odd]
    name = name or "the state"
    if one is None or other is None:
        has, lacks = (odd, 0) if one is None else (0, odd)
        return f"`{name}` is in the state of rank {has}, but not of rank {lacks}"
    if one[1] != other[1]:
        return f"`{name}` is {one[1]} on rank 0 and {other[1]} on rank {odd}"
    start = f"`{name}` ({one[1]}) differs between rank 0"
    if one[1] != "str":
        values = [f" ({text})" if text else "" for text in (one[2], other[2])]
        return f"{start}{values[0]} and rank {odd}{values[1]}"
    place = next((at for at, (a, b) in enumerate(zip(one[2], other[2], strict=False)) if a != b), None)
    if place is None:
        shorter = min(len(one[2]), len(other[2]))
        place = shorter if shorter < _TEXT_CHARACTERS else None
    return f"{start} and rank {odd}" + ("" if place is None else f" at character {place + 1}")
