"""Flatten nested values to leaves with dotted names, and compare leaves.

Formats split nested values differently: one stores every number, another stores a full dict as one object. Their leaves
are equal. Container kinds (list or tuple, dict or `OrderedDict`) are ignored.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from struct import pack

from shardckpt.encodings.pickle_stubs import Dtype, Global, InstanceStub, StorageType
from shardckpt.encodings.tagged_json import NamedValue
from shardckpt.manifest import Path, dotted

_MAX_DEPTH = 100
_SHOWN = 40
_SCALARS = (type(None), bool, int, float, complex, str, bytes, Dtype, StorageType, Global, NamedValue)
_NO_MORE = "it holds more values than the files have bytes"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Numbers are equal if `|a - b| <= atol + rtol * |b|`."""

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether only equal bits count as equal."""
        return self.atol == 0 and self.rtol == 0


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaves in nested values."""

    # Dotted name to a scalar, a set, a tuple of scalars, or `()` for an empty container.
    values: dict[str, object] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # dotted name to the reason for not comparing


def find_leaves(nested_values: Mapping[Path, object], most: int) -> Leaves:
    """Flatten nested values to leaves; a sequence of scalars is one leaf."""
    scalars: dict[Path, object] = {}
    found = Leaves()
    left = most
    waiting = [(path, value, 0) for path, value in nested_values.items()]
    while waiting:
        path, value, depth = waiting.pop()
        value = _plain(value)
        inner = _inside(value)
        left -= 1 if inner is not None else _size(value)
        if left < 0:
            found.refused[dotted(path)] = _NO_MORE
        elif inner is not None and depth == _MAX_DEPTH:
            found.refused[dotted(path)] = f"containers are nested more than {_MAX_DEPTH} deep"
        elif inner is not None:
            waiting += [((*path, key), each, depth + 1) for key, each in inner]
        elif is_leaf(value):
            scalars[path] = value
        else:
            found.refused[dotted(path)] = f"it holds an unsupported type, {type(value).__name__}"
    for path, value in _join_scalars(scalars).items():
        name = dotted(path)
        found.values[name if name not in found.values else repr(path)] = value
    return found


def is_leaf(value: object) -> bool:
    """Return True if a value is compared as a leaf."""
    if type(value) in (tuple, set, frozenset):
        return all(type(each) in _SCALARS for each in value)  # type: ignore[attr-defined]
    return type(value) in _SCALARS


def _plain(value: object) -> object:
    """Return a value in a form common to all formats: sequences of scalars become tuples."""
    if type(value) is NamedValue and value.kind == "size":
        return value.value
    if type(value) is NamedValue and value.kind == "dtype":
        return Dtype(str(value.value))
    if type(value) is NamedValue and value.kind == "device":
        return str(value.value)
    if isinstance(value, dict) and not value:
        return ()
    if type(value) in (list, tuple) and is_leaf(tuple(value)):  # type: ignore[arg-type]
        return tuple(map(_plain, value))  # type: ignore[call-overload]
    return value


def _inside(value: object) -> Iterable[tuple[str | int, object]] | None:
    """Return a container's items by key; None for a leaf."""
    if isinstance(value, dict):
        return _key_items(value)
    if type(value) in (list, tuple) and not is_leaf(value):
        assert isinstance(value, (list, tuple))
        return list(enumerate(value))
    if isinstance(value, io.BytesIO):
        return [("content", value.getvalue()), ("position", value.seek(0, io.SEEK_CUR))]
    if isinstance(value, InstanceStub):
        parts = [("class", value.name), ("args", value.args), ("state", value.state), ("items", value.items)]
        return [(key, each) for key, each in parts if key == "class" or (each is not None and each != ())]
    return None


def _key_items(value: Mapping[object, object]) -> list[tuple[str | int, object]]:
    words = {key: key if type(key) in (str, int) else repr(key)[:_SHOWN] for key in value}
    if len({str(word) for word in words.values()}) < len(words):  # such as 1 and "1"
        words = {key: repr(key) for key in value}
    return [(words[key], each) for key, each in value.items()]  # type: ignore[misc]


def _size(value: object) -> int:
    return len(value) if type(value) in (tuple, set, frozenset) else 1  # type: ignore[arg-type]


def _join_scalars(scalars: Mapping[Path, object]) -> dict[Path, object]:
    """Join scalars whose keys count from 0 into one leaf, since some formats store list items separately."""
    rows: dict[Path, dict[int, object]] = {}
    mixed: set[Path] = {()}
    for path, value in scalars.items():
        mixed.update(path[:n] for n in range(1, len(path) - 1))
        parent, number = path[:-1], _number(path[-1]) if path else -1
        if number < 0 or type(value) not in _SCALARS or number in rows.get(parent, ()):
            mixed.add(parent)
        else:
            rows.setdefault(parent, {})[number] = value
    lists = {parent: row for parent, row in rows.items() if parent not in mixed and len(row) > max(row)}
    made: dict[Path, object] = {}
    for path, value in scalars.items():
        row = lists.get(path[:-1])
        if row is None:
            made[path] = value
        elif path[:-1] not in made:
            made[path[:-1]] = tuple(row[i] for i in range(len(row)))
    return made


def _number(key: str | int) -> int:
    """Return a key as list index, else -1."""
    if type(key) is int:
        return key
    text = str(key)
    return int(text) if len(text) < 10 and text.isascii() and text.isdigit() and str(int(text)) == text else -1


def are_equal(a: object, b: object, tolerance: Tolerance) -> bool:
    """Return True if two leaves are equal, with floats within the tolerance; different types are never equal."""
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_are_same, a, b, [tolerance] * len(a)))
    return _are_same(a, b, tolerance)


def have_same_types(a: object, b: object) -> bool:
    """Return True if two leaves have equal types, item by item."""
    if type(a) is tuple and type(b) is tuple:
        return all(type(x) is type(y) for x, y in zip(a, b, strict=False))
    return type(a) is type(b)


def _are_same(a: object, b: object, tolerance: Tolerance) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return _are_close(a, b, tolerance)
    if isinstance(a, complex) and isinstance(b, complex):
        return _are_close(a.real, b.real, tolerance) and _are_close(a.imag, b.imag, tolerance)
    if isinstance(a, Global) and isinstance(b, Global):
        return a.name == b.name
    if type(a) in (set, frozenset):
        return _sort_values(a) == _sort_values(b)  # {1} is not {True}
    return a == b


def _sort_values(values: object) -> list[tuple[str, str]]:
    return sorted((type(v).__name__, repr(v)) for v in values)  # type: ignore[attr-defined]


def _are_close(a: float, b: float, tolerance: Tolerance) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    if tolerance.is_exact:
        return pack("d", a) == pack("d", b)
    if math.isinf(a) or math.isinf(b):
        return a == b
    return abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b)


def describe(a: object, b: object, tolerance: Tolerance) -> tuple[str, str]:
    """Return texts for two different leaves; for sequences, for the first items that differ."""
    if type(a) is tuple and type(b) is tuple and a and b:
        if len(a) != len(b):
            return f"{len(a)} items", f"{len(b)} items"
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not _are_same(x, y, tolerance))
        x, y = describe(a[at], b[at], tolerance)
        return f"[{at}] {x}", f"[{at}] {y}"
    if type(a) is type(b):
        return _words(a), _words(b)
    return _describe_typed(a), _describe_typed(b)


def _describe_typed(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {_words(value)}"


def format_leaf(value: object) -> str:
    """Return a short text for a leaf."""
    return f"{len(value)} items" if type(value) is tuple and len(value) > 4 else _words(value)


def _words(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"{value:#x}"[:_SHOWN] + "..."
    if isinstance(value, (str, bytes)):
        return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    if isinstance(value, Global):
        return value.name
    if isinstance(value, (tuple, set, frozenset)) and type(value) is not NamedValue:
        return f"({', '.join(_words(v) for v in list(value)[:4])}{', ...' if len(value) > 4 else ''})"
    return repr(value)[:_SHOWN]
