"""What a rank says of its state before anything is written: plain values by digest, its own ones whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.checkpoint.stateful.flatten import ArrayAt, Captured, encoded
from shardckpt.errors import UsageError
from shardckpt.format.encodings import tagged_json
from shardckpt.format.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.format.native.payload import canonical
from shardckpt.manifest import Path, dotted

SHOWN = 5
"""Names in an error; the rest is counted."""


@dataclass(frozen=True)
class Alone:
    """A part of a nest that one rank tells.

    Attributes:
        json: Tagged; arrays by their position in `arrays`.
        arrays: Paths of the arrays in it.
    """

    json: object
    arrays: Sequence[Path]

    @classmethod
    def of(cls, nest: Any, path: Path) -> Alone:
        """Encode a part.

        Raises:
            UnsupportedError: A value that cannot be saved.
        """
        arrays: list[Path] = []

        def number(array: ArrayAt) -> int:
            arrays.append(array.path)
            return len(arrays) - 1

        return cls(encoded(nest, number, path), arrays)

    def nest(self) -> Any:
        """Return the part, as the rank that told it captured it."""

        def decode_ref(value: ArrayRef | NamedValue) -> object:
            return ArrayAt(self.arrays[value.number], value.kind) if isinstance(value, ArrayRef) else value

        return tagged_json.decode(self.json, decode_ref)


@dataclass(frozen=True)
class Report:
    """What a rank tells first.

    Attributes:
        cached: Id of the save whose plan this rank has cached and still fits; empty where its draft is sent.
        draft: The draft; empty where it is the cached one.
        values: Digest of the plain values that are the same on every rank.
        loose: Values that other ranks may lack.
        own: Values that are this rank's.
        path: Where it saves to.
    """

    cached: str
    draft: bytes
    values: str
    loose: Mapping[Path, Alone]
    own: Mapping[Path, Alone]
    path: str = ""

    def encode(self) -> bytes:
        """Return it as bytes."""
        head = canonical([self.cached, self.values, _rows(self.loose), _rows(self.own), self.path])
        return len(head).to_bytes(8, "little") + head + self.draft

    @classmethod
    def decode(cls, data: bytes) -> Report:
        """Return what `encode` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        cached, values, loose, own, path = json.loads(data[8:end])
        return cls(cached, data[end:], values, _parts(loose), _parts(own), path)


def own_report(captured: Captured) -> Report:
    """Return what a rank alone can tell of its state.

    Raises:
        UnsupportedError: A value that cannot be saved.
    """
    loose = {path: Alone.of(value, path) for path, value in captured.loose.items()}
    own = {path: Alone.of(value, path) for path, value in captured.own.items()}
    return Report("", b"", "", loose, own)


def require_one_path(reports: Sequence[Report]) -> None:
    """Refuse a save of which ranks have different ideas where it goes.

    Raises:
        UsageError: They have.
    """
    if len({report.path for report in reports}) > 1:
        told = ", ".join(f"rank {rank} {report.path}" for rank, report in list(enumerate(reports))[:SHOWN])
        raise UsageError(
            "ranks save to different paths",
            found=told,
            fix="Make the name once and tell it to all ranks: a time or a random part is another on each.",
        )


def _rows(parts: Mapping[Path, Alone]) -> list[object]:
    return [[list(path), each.json, [list(p) for p in each.arrays]] for path, each in parts.items()]


def _parts(rows: Sequence[Any]) -> dict[Path, Alone]:
    return {tuple(path): Alone(nest, [tuple(p) for p in arrays]) for path, nest, arrays in rows}


def values_digest(captured: Captured) -> str:
    """Return a digest of the plain values that every rank has.

    Raises:
        UnsupportedError: One that cannot be saved.
    """
    return _digest(encoded(captured.nest, lambda _: 0))


def _digest(content: object) -> str:
    return hashlib.blake2b(canonical(sort_keys(content)), digest_size=16).hexdigest()


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
            return {key: sorted(([each, sort_keys(its)] for each, its in value), key=lambda pair: canonical(pair[0]))}
        if key in ("$set", "$frozenset"):
            return {key: sorted(map(sort_keys, value), key=canonical)}
    return {key: sort_keys(content[key]) for key in sorted(content)}


def value_digests(captured: Captured) -> bytes:
    """Return what tells each plain value, and each container, from another, for finding the one that differs."""
    values: dict[str, Told] = {}
    containers: dict[str, Told] = {}
    _collect(captured.nest, (), values, containers)
    return json.dumps([values, containers]).encode()


Told = tuple[str, str, str]
"""What is told of a value: its digest, its type, and the beginning of its text."""

_TEXT_CHARACTERS = 1 << 16
"""Of a value's text that is sent where ranks differ; what differs behind that is told without its place."""


def _collect(nest: Any, path: Path, values: dict[str, Told], containers: dict[str, Told]) -> None:
    if isinstance(nest, dict) and nest:
        keys = ", ".join(sorted(map(repr, nest)))
        containers[dotted(path)] = _digest([type(nest).__name__, keys]), type(nest).__name__, keys[:_KEYS_CHARACTERS]
        for key, value in nest.items():
            _collect(value, (*path, tagged_json.path_key(key)), values, containers)
    elif type(nest) in (list, tuple) and nest:
        containers[dotted(path)] = _digest([type(nest).__name__]), type(nest).__name__, ""
        for at, value in enumerate(nest):
            _collect(value, (*path, at), values, containers)
    else:
        digest = _digest(encoded(nest, lambda _: 0, path))
        kind = "tensor" if isinstance(nest, ArrayAt) else type(nest).__name__
        text = nest if isinstance(nest, str) else repr(nest) if isinstance(nest, _SHOWN_TYPES) else ""
        values[dotted(path)] = digest, kind, text[:_TEXT_CHARACTERS]


_KEYS_CHARACTERS = 200
_SHOWN_TYPES = (bool, int, float)


def differing(
    values: Sequence[Mapping[str, Sequence[str]]], containers: Sequence[Mapping[str, Sequence[str]]] = ()
) -> UsageError:
    """Return the error for values that claim to be the same on every rank and are not.

    Args:
        values: For each rank that has a say, names to what tells the values apart.
        containers: The same of what they are in: where all values are alike, these differ.
    """
    wrong = _differences(values) or _differences(containers) or ["what the ranks hold is put together in other ways"]
    more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return UsageError(
        "; ".join(wrong[:SHOWN]) + more,
        fix="To keep rank 0's, broadcast it; to keep each rank's own, use shardckpt.PerRank.",
    )


def _differences(told: Sequence[Mapping[str, Sequence[str]]]) -> list[str]:
    names = dict.fromkeys(name for each in told for name in each)
    return [text for name in names if (text := _difference(name, [each.get(name) for each in told]))]


def _difference(name: str, told: Sequence[Sequence[str] | None]) -> str:
    """Return how a value differs between the first rank and the first other one that has another; empty if none."""
    odd = next((rank for rank, each in enumerate(told) if (each or [""])[0] != (told[0] or [""])[0]), None)
    if odd is None:
        return ""
    one, other = told[0], told[odd]
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
