"""Damage to the structure of headers: what parses as JSON, as a pickle, or as a container of one, and means nonsense.

Bytes that change at random seldom get past a parser. Here the parser is satisfied, and fields are of other types, too
large, nested too deep, given twice, or gone.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import zipfile
from contextlib import suppress
from copy import deepcopy
from typing import Any

_DEEP: Any = 0
for _ in range(150):
    _DEEP = [_DEEP]

_ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 255, 2**31, -(2**31), 2**53, 2**61 - 1, 2**62, 2**63, 2**64, -(2**63), 10**400, -(10**4200)),
    *(0.5, -0.0, 1e308, float("inf"), float("nan"), True, False, None),
    *("", "a", "a" * 5000, "../x", "/etc/passwd", "\ud800", "\n\x1b[31m", "F32", "float32", "1", "-1", "$dict", "a.b"),
    *([], {}, [0], [[]], [-1, 2**63], {"": 0}, {"$dict": [[0, 0]]}, {"$array": 0}, {"$tuple": [1, {}]}, _DEEP),
    *([0] * 100, [2**61 - 1] * 3, {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, {"a": {"a": {"a": 1}}}),
)
_SNIPPETS = (
    *(
        b"(",
        b"t",
        b"]",
        b"}",
        b")",
        b"\x85",
        b"\x86",
        b"\x87",
        b"N",
        b"\x88",
        b"K\x00",
        b"K\x07",
        b"M\xff\xff",
        b"2",
        b"0",
    ),
    *(
        b"J\xff\xff\xff\xff",
        b"J\xff\xff\xff\x7f",
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"\x8a\x09" + b"\xff" * 8 + b"\0",
    ),
    *(b"\x8a\x80" + b"\x7f" * 128, b"G\x7f\xf0" + b"\0" * 6, b"G\x7f\xf8" + b"\0" * 6, b"\x8c\x00", b"\x8c\x01a"),
    *(
        b"h\x00",
        b"h\x01",
        b"h\x05",
        b"\x94",
        b"R",
        b"b",
        b"Q",
        b"s",
        b"u",
        b"e",
        b"a",
        b"\x81",
        b"\x8f",
        b"\x90",
        b"\x91",
    ),
    *(
        b"cbuiltins\nlist\n",
        b"cbuiltins\nset\n",
        b"ctorch\nSize\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch\nfloat32\n",
    ),
    *(
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch\nFloatStorage\n",
        b"cargparse\nNamespace\n",
        b"I" + b"9" * 900 + b"\n",
    ),
)


def restructure(data: bytes, dice: random.Random) -> bytes | None:
    """Return the same file with other fields; None where it has none that are known here."""
    if data[:2] == b"PK":
        return _archive(data, dice)
    if data[:1] == b"\x80":
        return _pickle(data, dice)
    if data[8:9] == b"{":
        length = int.from_bytes(data[:8], "little")
        header = _json(data[8 : 8 + length], dice)
        return None if header is None else len(header).to_bytes(8, "little") + header + data[8 + length :]
    return _json(data, dice)


def _json(data: bytes, dice: random.Random) -> bytes | None:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        tree = _changed(tree, dice)
    return json.dumps(tree, separators=(",", ":")).encode()


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where every value lies."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in list(inner)[:60] for place in _places(value, (*path, key)))]


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _changed(tree: Any, dice: random.Random) -> Any:
    places = _places(tree)
    path = dice.choice(places)
    value = _at(tree, path)
    if not path:
        return tree if dice.random() < 0.9 else deepcopy(dice.choice(_ODD))
    parent, key = _at(tree, path[:-1]), path[-1]
    kind = dice.choice(("odd", "odd", "other", "drop", "twice", "wrap", "near", "rename"))
    if kind == "drop":
        del parent[key]
    elif kind == "other":
        parent[key] = json.loads(json.dumps(_at(tree, dice.choice(places))))
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, deepcopy(value))
    elif kind == "wrap":
        parent[key] = deepcopy(dice.choice(([value], {"a": value}, [value, value, value], {"$tuple": [value]})))
    elif kind == "rename" and isinstance(parent, dict):
        parent[dice.choice(("a", "", "$dict", "dtype", "\ud800", f"{key}.x"))] = parent.pop(key)
    elif kind == "near" and type(value) is int and abs(value) < 2**80:
        parent[key] = dice.choice((value + 1, value - 1, -value, value << 40, value * 2**61, value + 0.5, str(value)))
    elif isinstance(value, str) and value[:1] in ("{", "[") and kind == "near":
        inner = _json(value.encode("utf-8", "surrogatepass"), dice)
        parent[key] = value if inner is None else inner.decode()
    else:
        parent[key] = deepcopy(dice.choice(_ODD))
    return tree


def _pickle(data: bytes, dice: random.Random) -> bytes | None:
    stream = io.BytesIO(data)
    parts: list[bytes] = []
    with suppress(ValueError, IndexError, TypeError, UnicodeError):
        while stream.tell() < len(data):
            starts = [(op.name, at) for op, _, at in pickletools.genops(stream)]
            ends = [at for _, at in starts[1:]] + [stream.tell()]
            parts += [data[at:end] for (name, at), end in zip(starts, ends, strict=True) if name != "FRAME"]
    rest = data[sum(map(len, parts)) :] if b"\x95" not in data[:4] else b""
    if not parts:
        return None
    for _ in range(dice.choice((1, 1, 2, 3, 6))):
        at = dice.randrange(len(parts))
        kind = dice.choice(("set", "set", "set", "insert", "drop", "twice", "swap"))
        if kind == "set":
            parts[at] = dice.choice(_SNIPPETS)
        elif kind == "insert":
            parts.insert(at, dice.choice(_SNIPPETS))
        elif kind == "drop" and len(parts) > 1:
            del parts[at]
        elif kind == "twice":
            parts.insert(at, parts[at] * dice.choice((1, 1, 100)))
        else:
            other = dice.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
    return b"".join(parts) + rest


def _archive(data: bytes, dice: random.Random) -> bytes | None:
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                content = old.read(entry)
                if entry.filename.endswith(".pkl"):
                    content = _pickle(content, dice) or content
                new.writestr(entry.filename, content)
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return None
    return out.getvalue()
