"""The report that a rank sends before anything is written: digests of plain values, and its per-rank values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.checkpoint.stateful.flatten import FlattenedState, TensorRef, encoded
from shardckpt.errors import UsageError
from shardckpt.format.encodings import tagged_json
from shardckpt.format.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.format.native.payload import encode_canonical
from shardckpt.manifest import Path, dotted

SHOWN = 5
"""Names in an error; the rest is counted."""


@dataclass(frozen=True)
class RankSubtree:
    """A part of a state tree, as a rank sends it.

    Attributes:
        json: Tagged; arrays by their position in `arrays`.
        arrays: Paths of the arrays in it.
    """

    json: object
    arrays: Sequence[Path]

    @classmethod
    def encode(cls, tree: Any, path: Path) -> RankSubtree:
        """Encode a part of a state tree.

        Raises:
            UnsupportedError: A value that cannot be saved.
        """
        arrays: list[Path] = []

        def number(array: TensorRef) -> int:
            arrays.append(array.path)
            return len(arrays) - 1

        return cls(encoded(tree, number, path), arrays)

    def decode(self) -> Any:
        """Return the part, as the rank that sent it flattened it."""

        def decode_ref(value: ArrayRef | NamedValue) -> object:
            return TensorRef(self.arrays[value.number], value.kind) if isinstance(value, ArrayRef) else value

        return tagged_json.decode(self.json, decode_ref)


@dataclass(frozen=True)
class RankReport:
    """The first message of a rank.

    Attributes:
        cached: Id of the save whose plan this rank has cached and still fits; empty where its local plan is sent.
        local_plan: The local plan; empty where it is the cached one.
        values: Digest of the plain values that are the same on every rank.
        optional_values: Values that other ranks may lack.
        per_rank_values: Values that each rank saves for itself.
        path: Where it saves to.
    """

    cached: str
    local_plan: bytes
    values: str
    optional_values: Mapping[Path, RankSubtree]
    per_rank_values: Mapping[Path, RankSubtree]
    path: str = ""

    def encode(self) -> bytes:
        """Return it as bytes."""
        head = encode_canonical(
            [self.cached, self.values, _rows(self.optional_values), _rows(self.per_rank_values), self.path]
        )
        return len(head).to_bytes(8, "little") + head + self.local_plan

    @classmethod
    def decode(cls, data: bytes) -> RankReport:
        """Return what `encode` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        cached, values, optional_values, per_rank_values, path = json.loads(data[8:end])
        return cls(cached, data[end:], values, _parts(optional_values), _parts(per_rank_values), path)


def build_report(flattened: FlattenedState) -> RankReport:
    """Return the report of a rank, without its plan and the digest of its values.

    Raises:
        UnsupportedError: A value that cannot be saved.
    """
    optional_values = {path: RankSubtree.encode(value, path) for path, value in flattened.optional_values.items()}
    per_rank_values = {path: RankSubtree.encode(value, path) for path, value in flattened.per_rank_values.items()}
    return RankReport("", b"", "", optional_values, per_rank_values)


def require_one_path(reports: Sequence[RankReport]) -> None:
    """Refuse a save whose ranks save to different paths.

    Raises:
        UsageError: They do.
    """
    if len({report.path for report in reports}) > 1:
        paths = ", ".join(f"rank {rank} {report.path}" for rank, report in list(enumerate(reports))[:SHOWN])
        raise UsageError(
            "ranks save to different paths",
            found=paths,
            fix="Make the name once and tell it to all ranks: a time or a random part is another on each.",
        )


def _rows(parts: Mapping[Path, RankSubtree]) -> list[object]:
    return [[list(path), each.json, [list(p) for p in each.arrays]] for path, each in parts.items()]


def _parts(rows: Sequence[Any]) -> dict[Path, RankSubtree]:
    return {tuple(path): RankSubtree(tree, [tuple(p) for p in arrays]) for path, tree, arrays in rows}


def values_digest(flattened: FlattenedState) -> str:
    """Return a digest of the plain values that every rank has.

    Raises:
        UnsupportedError: One that cannot be saved.
    """
    return _digest(encoded(flattened.tree, lambda _: 0))


def _digest(content: object) -> str:
    return hashlib.blake2b(encode_canonical(sort_keys(content)), digest_size=16).hexdigest()


def sort_keys(content: Any) -> Any:
    """Return tagged JSON with dicts and sets in one order: equal ones are in different orders on different ranks.

    Args:
        content: As `encoded` returned it.
    """
    if type(content) is list:
        return [sort_keys(each) for each in content]
    if type(content) is not dict:
        return content
    if len(content) == 1:
        ((key, value),) = content.items()
        if key in ("$dict", "$ordered"):
            return {
                key: sorted(([each, sort_keys(its)] for each, its in value), key=lambda pair: encode_canonical(pair[0]))
            }
        if key in ("$set", "$frozenset"):
            return {key: sorted(map(sort_keys, value), key=encode_canonical)}
    return {key: sort_keys(content[key]) for key in sorted(content)}


def value_digests(flattened: FlattenedState) -> bytes:
    """Return what tells each plain value, and each container, from another, for finding the one that differs."""
    values: dict[str, ValueSummary] = {}
    containers: dict[str, ValueSummary] = {}
    _collect(flattened.tree, (), values, containers)
    return json.dumps([values, containers]).encode()


ValueSummary = tuple[str, str, str]
"""Digest, type and beginning of the text of a value."""

_TEXT_CHARACTERS = 1 << 16
"""Of a value's text that is sent where ranks differ; a difference behind that is reported without its position."""


def _collect(tree: Any, path: Path, values: dict[str, ValueSummary], containers: dict[str, ValueSummary]) -> None:
    if isinstance(tree, dict) and tree:
        keys = ", ".join(sorted(map(repr, tree)))
        containers[dotted(path)] = _digest([type(tree).__name__, keys]), type(tree).__name__, keys[:_KEYS_CHARACTERS]
        for key, value in tree.items():
            _collect(value, (*path, tagged_json.path_key(key)), values, containers)
    elif type(tree) in (list, tuple) and tree:
        containers[dotted(path)] = _digest([type(tree).__name__]), type(tree).__name__, ""
        for at, value in enumerate(tree):
            _collect(value, (*path, at), values, containers)
    else:
        digest = _digest(encoded(tree, lambda _: 0, path))
        kind = "tensor" if isinstance(tree, TensorRef) else type(tree).__name__
        text = tree if isinstance(tree, str) else repr(tree) if isinstance(tree, _SHOWN_TYPES) else ""
        values[dotted(path)] = digest, kind, text[:_TEXT_CHARACTERS]


_KEYS_CHARACTERS = 200
_SHOWN_TYPES = (bool, int, float)


def build_mismatch_error(
    values: Sequence[Mapping[str, Sequence[str]]], containers: Sequence[Mapping[str, Sequence[str]]] = ()
) -> UsageError:
    """Return the error for values that claim to be the same on every rank and are not.

    Args:
        values: For each rank, names to digest, type and text of the values.
        containers: The same of what they are in: where all values are alike, these differ.
    """
    wrong = _differences(values) or _differences(containers) or ["what the ranks hold is put together in other ways"]
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return UsageError(
        "; ".join(wrong[:SHOWN]) + more,
        fix="To keep rank 0's, broadcast it; to keep each rank's own, use shardckpt.PerRank.",
    )


def _differences(summaries: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    names = dict.fromkeys(name for each in summaries for name in each)
    return [text for name in names if (text := _difference(name, [each.get(name) for each in summaries]))]


def _difference(name: str, summaries: Sequence[Sequence[str] | None]) -> str:
    """Return how a value differs between the first rank and the first other one that has another; empty if none."""
    odd = next((rank for rank, each in enumerate(summaries) if (each or [""])[0] != (summaries[0] or [""])[0]), None)
    if odd is None:
        return ""
    one, other = summaries[0], summaries[odd]
    name = name or "the state"
    if one is None or other is None:
        has, lacks = (odd, 0) if one is None else (0, odd)
        return f"`{name}` is in the state of rank {has} and not in that of rank {lacks}"
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
