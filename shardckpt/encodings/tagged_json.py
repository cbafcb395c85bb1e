"""Tagged JSON: a saved state as typed plain values, with references to tensors.

`null`, booleans, integers below 2^63, finite floats, strings, lists and dicts with text keys are stored directly. Other
values are objects with one key that starts with `$`; a dict that looks like such an object is stored as pairs.
"""

from __future__ import annotations

import base64
import io
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from shardckpt.encodings.budget import check_hashes
from shardckpt.errors import CheckpointError, FormatError, UnsupportedError
from shardckpt.manifest import Path, dotted

MAX_DEPTH = 100  # maximum nesting; also ends encoding if a container contains itself
MAX_BYTES = 1 << 24  # maximum bytes of one string or byte string; larger data belongs in a tensor
MAX_INT_BITS = 8192  # maximum bits in an integer, so that Python can print it

# NumPy's names for scalars that can be saved, to their parts' format in the `struct` module.
SCALARS = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "float16": "e",
    "int32": "i",
    "uint32": "I",
    "float32": "f",
    "int64": "q",
    "uint64": "Q",
    "float64": "d",
    "complex64": "ff",
    "complex128": "dd",
}

_INT_BOUND = 1 << 63
_PLAIN_KEYS = (str, int, float, bool, type(None), tuple)


class ArrayRef(NamedTuple):
    """Reference to a tensor in payload files, in place of the tensor."""

    number: int  # index of the array in the manifest
    kind: str = "tensor"  # original kind: `tensor` or `numpy`


class NamedValue(NamedTuple):
    """A torch or NumPy value, as text."""

    # `dtype`, `size`, `device` or `numpy`.
    kind: str
    # Text of the value: `bfloat16`, `(2, 3)`, `cuda:0`, or a scalar's dtype and bytes: `float32 0000003f`.
    value: str | tuple[int, ...]

    def __repr__(self) -> str:
        if self.kind == "dtype":
            return f"torch.{self.value}"
        if self.kind == "numpy":
            name, _, data = str(self.value).partition(" ")
            parts = struct.unpack(f"<{SCALARS[name]}", bytes.fromhex(data))
            return f"numpy.{name}({', '.join(map(str, parts))})"
        return f"{self.kind}({self.value})"


Leaf = Callable[[object, Path], "ArrayRef | NamedValue | None"]
EncodeRef = Callable[[Any], object]  # returns the tagged JSON of a reference
DecodeRef = Callable[["ArrayRef | NamedValue"], object]


def _no_leaf(value: object, _path: Path) -> ArrayRef | NamedValue | None:
    return value if isinstance(value, (ArrayRef, NamedValue)) else None


def _as_it_is(value: ArrayRef | NamedValue) -> object:
    return value


_NO_REFS: Mapping[type, EncodeRef] = {}


def encode(value: Any, path: Path = (), leaf: Leaf = _no_leaf, refs: Mapping[type, EncodeRef] = _NO_REFS) -> object:
    """Return a saved state as JSON values."""
    if len(path) > MAX_DEPTH:
        raise _refusal(path, "nested too deep", f"more than {MAX_DEPTH} containers inside one another")
    kind = type(value)
    if kind in refs:
        return refs[kind](value)
    if value is None or kind is bool:
        return value
    plain = _ENCODERS.get(kind)
    if plain is not None:
        return plain(value, path)
    if kind is dict or kind is OrderedDict:
        return _encode_dict(value, path, leaf, refs)
    if kind in _SEQUENCES:
        within = (leaf, refs) if kind in (list, tuple) else (_no_leaf, _NO_REFS)
        inner = [encode(v, (*path, i), *within) for i, v in enumerate(value)]
        return inner if kind is list else {_SEQUENCES[kind]: inner}
    if kind is Counter:
        return {"$counter": [[_encode_key(key, path), encode(value[key], (*path, path_key(key)))] for key in value]}
    found = leaf(value, path)
    if isinstance(found, ArrayRef):
        return encode_array_ref(*found)
    if isinstance(found, NamedValue):
        text = found.value.split(" ") if found.kind == "numpy" and isinstance(found.value, str) else found.value
        return {f"${found.kind}": text if isinstance(text, str) else list(text)}
    raise _refusal(path, f"a value of type {_name(kind)} cannot be saved", _shorten(value))


def encode_array_ref(number: int, kind: str) -> object:
    """Return a reference to an array as JSON: the fields in `ArrayRef`."""
    return {"$array": number} if kind == "tensor" else {"$array": [number, kind]}


def _encode_dict(value: dict[object, object], path: Path, leaf: Leaf, refs: Mapping[type, EncodeRef]) -> object:
    inner = [
        (key, refs[type(v)](v) if type(v) in refs else encode(v, (*path, path_key(key)), leaf, refs))
        for key, v in value.items()
    ]
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return dict(inner)
    if len({path_key(key) for key in value}) != len(value):
        raise _refusal(path, "two keys of a dict read alike", _shorten(list(value)), fix="Rename one.")
    pairs = [[_encode_key(key, path), v] for key, v in inner]
    return {"$dict" if type(value) is dict else "$ordered": pairs}


def path_key(key: object) -> str | int:
    """Return the path part for a dict's key."""
    return key if type(key) in (str, int) else str(key)  # type: ignore[return-value]


def _encode_key(key: object, path: Path) -> object:
    if type(key) not in _PLAIN_KEYS:
        raise _refusal(path, f"a dict key of type {_name(type(key))} cannot be saved", _shorten(key))
    return encode(key, (*path, "(key)"))


def _encode_int(value: int, path: Path) -> object:
    if value.bit_length() > MAX_INT_BITS:
        raise _refusal(path, f"an integer of {value.bit_length()} bits cannot be saved", "")
    return value if -_INT_BOUND <= value < _INT_BOUND else {"$int": hex(value)}


def _encode_float(value: float, _path: Path) -> object:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_complex(value: complex, _path: Path) -> object:
    return {"$complex": struct.pack(">dd", value.real, value.imag).hex()}


def _encode_bytes(value: bytes, path: Path) -> object:
    return {"$bytes": base64.b64encode(_limit_int(value, path)).decode("ascii")}


def _encode_stream(value: io.BytesIO, path: Path) -> object:
    if value.closed:
        raise _refusal(path, "a closed io.BytesIO has no content to save", "", fix="Close it after the save.")
    content = base64.b64encode(_limit_int(value.getvalue(), path)).decode("ascii")
    return {"$bytesio": [content, value.seek(0, io.SEEK_CUR)]}


_Long = TypeVar("_Long", str, bytes)


def _limit_int(value: _Long, path: Path) -> _Long:
    if len(value) > MAX_BYTES:
        raise _refusal(path, f"a value of {len(value)} bytes cannot be saved", "", fix="Save it as a tensor.")
    return value


_ENCODERS: Mapping[type, Callable[[Any, Path], object]] = {
    str: _limit_int,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    bytes: _encode_bytes,
    io.BytesIO: _encode_stream,
}
_SEQUENCES: Mapping[type, str] = {list: "", tuple: "$tuple", set: "$set", frozenset: "$frozenset"}


def _refusal(path: Path, what: str, found: object, fix: str = "") -> UnsupportedError:
    plain = "Save plain values and tensors, or give the object a `state_dict` that returns such."
    return UnsupportedError(what, where=dotted(path), found=found, fix=fix or plain)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shorten(value: object) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # noqa: BLE001  a stranger's repr
        return "(its repr raises)"


def decode(json: object, decode_ref: DecodeRef = _as_it_is, *, where: object = "") -> object:
    """Return the state that `encode` encoded."""
    return _Decoder(decode_ref, where).value(json, 0)


class _Decoder:
    def __init__(self, decode_ref: DecodeRef, where: object) -> None:
        self._decode_ref, self._where = decode_ref, where

    def value(self, json: object, depth: int) -> object:
        if depth > 2 * MAX_DEPTH:
            raise FormatError("the saved state is too deep", where=self._where)
        if isinstance(json, list):
            return [self.value(v, depth + 1) for v in json]
        if not isinstance(json, dict):
            return json
        tag = next(iter(json)) if len(json) == 1 else ""
        if tag == "$array" and type(json[tag]) is int and json[tag] >= 0:  # most leaves are references
            return self._decode_ref(ArrayRef(json[tag]))
        if not tag.startswith("$"):
            if any(key.startswith("$") for key in json):
                raise FormatError("a tag has neighbours", where=self._where, found=", ".join(list(json)[:4]))
            return {key: self.value(v, depth + 1) for key, v in json.items()}
        try:
            return self._decode_tagged(tag, json[tag], depth)
        except CheckpointError:
            raise
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            raise FormatError(
                f"a value tagged {tag} cannot be read", where=self._where, found=_shorten(json)
            ) from error

    def _decode_tagged(self, tag: str, inner: object, depth: int) -> object:
        if tag in ("$dict", "$ordered"):
            pairs = [(self.value(k, depth + 1), self.value(v, depth + 1)) for k, v in _pairs(inner)]
            check_hashes([key for key, _ in pairs], self._where)
            result = dict(pairs) if tag == "$dict" else OrderedDict(pairs)
            if len(result) != len(pairs):
                raise ValueError("a key stands twice")
            return result
        if tag == "$counter":
            counts = [(self.value(k, depth + 1), self.value(v, depth + 1)) for k, v in _pairs(inner)]
            check_hashes([key for key, _ in counts], self._where)
            if not all(type(count) is int for _, count in counts) or len(dict(counts)) != len(counts):
                raise ValueError("no counts")
            return Counter(dict(counts))
        if tag in _CONTAINERS:
            values = [self.value(v, depth + 1) for v in _items(inner)]
            if tag != "$tuple":
                check_hashes(values, self._where)
            return _CONTAINERS[tag](values)
        if tag in _DECODERS:
            return _DECODERS[tag](inner)
        if tag in _REFERENCES:
            return self._decode_ref(_REFERENCES[tag](inner))
        raise UnsupportedError(
            f"a value has the tag {tag!r}, which this release does not know",
            where=self._where,
            fix="Read it with a newer release of shardckpt.",
        )


def _text(inner: object) -> str:
    if not isinstance(inner, str):
        raise TypeError("no text")
    return inner


def _count(inner: object) -> int:
    if type(inner) is not int or inner < 0:
        raise TypeError("no count")
    return inner


def _items(inner: object) -> list[object]:
    if not isinstance(inner, list):
        raise TypeError("no list")
    return inner


def _pairs(inner: object) -> Iterator[tuple[object, object]]:
    for pair in _items(inner):
        key, value = _items(pair)
        yield key, value


def _decode_numpy(inner: object) -> NamedValue:
    name, data = map(_text, _items(inner))
    value = bytes.fromhex(data)
    if name not in SCALARS or len(value) != struct.calcsize(f"<{SCALARS[name]}"):
        raise ValueError("no scalar")
    return NamedValue("numpy", f"{name} {value.hex()}")


def _decode_int(inner: object) -> int:
    value = int(_text(inner), 16)
    if value.bit_length() > MAX_INT_BITS:
        raise ValueError("too long")
    return value


def _decode_complex(inner: object) -> complex:
    return complex(*struct.unpack(">dd", bytes.fromhex(_text(inner))))


def _decode_array(inner: object) -> ArrayRef:
    if isinstance(inner, list):
        number, kind = inner
        return ArrayRef(_count(number), _text(kind))
    return ArrayRef(_count(inner))


def _decode_bytes(inner: object) -> bytes:
    return base64.b64decode(_text(inner), validate=True)


def _decode_stream(inner: object) -> io.BytesIO:
    content, position = _items(inner)
    stream = io.BytesIO(_decode_bytes(content))
    stream.seek(_count(position))
    return stream


_CONTAINERS: Mapping[str, Callable[[list[object]], object]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
}
_DECODERS: Mapping[str, Callable[[object], object]] = {
    "$int": _decode_int,
    "$float": lambda inner: struct.unpack(">d", bytes.fromhex(_text(inner)))[0],
    "$complex": _decode_complex,
    "$bytes": _decode_bytes,
    "$bytesio": _decode_stream,
}
_REFERENCES: Mapping[str, Callable[[object], ArrayRef | NamedValue]] = {
    "$array": _decode_array,
    "$dtype": lambda inner: NamedValue("dtype", _text(inner)),
    "$size": lambda inner: NamedValue("size", tuple(_count(n) for n in _items(inner))),
    "$device": lambda inner: NamedValue("device", _text(inner)),
    "$numpy": _decode_numpy,
}
