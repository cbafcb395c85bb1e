"""What a rank says of its state before anything is written: plain values by digest, its own ones whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardckpt.checkpoint.capture import ArrayAt, Captured, encoded
from shardckpt.errors import UsageError
from shardckpt.format import tagged
from shardckpt.format.native_payload import canonical
from shardckpt.format.tagged import ArrayRef, Named
from shardckpt.manifest import Path, dotted

SHOWN = 10
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

        def revive(value: ArrayRef | Named) -> object:
            return ArrayAt(self.arrays[value.number], value.kind) if isinstance(value, ArrayRef) else value

        return tagged.decode(self.json, revive)


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
    return hashlib.blake2b(canonical(content), digest_size=16).hexdigest()


def value_digests(captured: Captured) -> bytes:
    """Return a digest of each plain value by its dotted path, for finding the one that differs."""
    found: dict[str, str] = {}
    _collect(captured.nest, (), found)
    return json.dumps(found).encode()


def _collect(nest: Any, path: Path, found: dict[str, str]) -> None:
    if isinstance(nest, dict) and nest:
        for key, value in nest.items():
            _collect(value, (*path, tagged.path_key(key)), found)
    elif type(nest) in (list, tuple) and nest:
        for at, value in enumerate(nest):
            _collect(value, (*path, at), found)
    else:
        found[dotted(path)] = _digest(encoded(nest, lambda _: 0, path))


def differing(told: Sequence[Mapping[str, str]]) -> UsageError:
    """Return the error for values that claim to be the same on every rank and are not.

    Args:
        told: For each rank that has a say, names to digests.
    """
    names = dict.fromkeys(name for each in told for name in each)
    wrong = [name for name in names if len({each.get(name) for each in told}) > 1]
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return UsageError(
        "values differ between ranks, and only one of each would be saved",
        where=", ".join(wrong[:SHOWN]) + more,
        fix="Make them equal, or wrap the object in shardckpt.PerRank so that every rank saves its own.",
    )
