"""Tagged JSON gives back what it was given, type for type, and refuses the rest by its path."""

from __future__ import annotations

import io
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum

import numpy as np
import pytest

from shardckpt.encodings.safetensors import parse_json
from shardckpt.encodings.tagged_json import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_INT_BITS,
    ArrayRef,
    NamedValue,
    decode,
    encode,
)
from shardckpt.errors import CheckpointError, FormatError, UnsupportedError
from shardckpt.native.payload import encode_canonical

VALUES = [
    None,
    True,
    False,
    0,
    -7,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    1 - (1 << MAX_INT_BITS),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    "",
    "text",
    "$array",
    "half a pair \ud800",
    "snow ☃ \0\n",
    b"",
    bytes(range(256)),
    1 - 2j,
    [],
    (),
    {},
    set(),
    frozenset(),
    [1, [2, (3, [4])]],
    (1,),
    {1, "a", None},
    frozenset({(1, 2)}),
    {"a": 1, "b": {"c": (2,)}},
    {"$array": 3},
    {"$tuple": [1]},
    {"b": 1, "a": 2},
    {0: "id", "0": "text", None: 1, True: 2, 1.5: 3, (1, ("a", None)): 4},
    OrderedDict([("b", 1), ("a", 2)]),
    OrderedDict([(1, {})]),
    Counter(),
    Counter({2: 1, "a": -3, (1, 2): 1 << 70}),
    ArrayRef(3),
    ArrayRef(0, "numpy"),
    NamedValue("dtype", "bfloat16"),
    NamedValue("size", (2, 0, 3)),
    NamedValue("device", "cuda:0"),
    NamedValue("numpy", "float32 cdcccc3d"),
    NamedValue("numpy", "bool 01"),
    NamedValue("numpy", "complex128 " + "00" * 16),
]


def through(value: object) -> object:
    return decode(parse_json(encode_canonical(encode(value)), where="test"))


def same(a: object, b: object) -> bool:
    """Compare types too, keys in order, and floats by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return same([*a.items()], [*b.items()])  # type: ignore[attr-defined]
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    return a == b


def test_a_stream_of_bytes_comes_back_with_its_content_and_position() -> None:
    stream = io.BytesIO(b"content")
    stream.seek(3)
    found = through([stream])
    assert isinstance(found, list)
    assert [type(found[0]), found[0].tell(), found[0].getvalue()] == [io.BytesIO, 3, b"content"]


def test_a_closed_stream_is_refused_with_its_path() -> None:
    stream = io.BytesIO(b"content")
    stream.close()
    with pytest.raises(UnsupportedError, match=r"a\.b.*closed"):
        encode({"a": {"b": stream}})


@pytest.mark.parametrize("inner", ["text", ["AA=="], ["AA==", -1], ["AA==", 1 << 70], [1, 0], ["%", 0]])
def test_a_damaged_stream_is_refused(inner: object) -> None:
    with pytest.raises(FormatError):
        decode({"$bytesio": inner})


@pytest.mark.parametrize("value", VALUES, ids=[str(number) for number in range(len(VALUES))])
def test_a_value_comes_back_with_its_type(value: object) -> None:
    assert same(through(value), value)
    assert same(through({"in": [value]}), {"in": [value]})


def test_a_nan_keeps_its_bits() -> None:
    [odd] = struct.unpack(">d", bytes.fromhex("7ff80000000abcde"))
    found = through(odd)
    assert isinstance(found, float)
    assert struct.pack(">d", found).hex() == "7ff80000000abcde"


class Colour(IntEnum):
    RED = 1


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (object(), "object"),
        (Colour.RED, "Colour"),
        (defaultdict(int), "defaultdict"),
        (np.array([1]), "ndarray"),
        (np.float32(1), "float32"),
        (np.str_("a"), "str_"),
        (Odd(), "Odd"),
        (lambda: None, "function"),
        (bytearray(b"a"), "bytearray"),
        ("x" * (MAX_BYTES + 1), str(MAX_BYTES + 1)),
        (1 << MAX_INT_BITS, "integer"),
        ({1.5: 1, "1.5": 2}, "alike"),
        ({b"k": 1}, "key"),
        ({(ArrayRef(1),): object()}, ""),
    ],
    ids=[
        "object",
        "enum",
        "defaultdict",
        "array",
        "scalar",
        "str_",
        "repr",
        "function",
        "bytearray",
        "long",
        "integer",
        "alike",
        "key",
        "ref",
    ],
)
def test_anything_else_is_refused_by_its_path(value: object, names: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        encode({"model": {"layers.0": [1, value]}})
    assert str(caught.value).startswith("model.layers.0.1")
    assert names in str(caught.value)


def test_a_nest_that_holds_itself_is_refused() -> None:
    nest: list[object] = []
    nest.append(nest)
    with pytest.raises(UnsupportedError, match="deep"):
        encode(nest)
    deep: object = 1
    for _ in range(MAX_DEPTH):
        deep = (deep,)
    assert same(through(deep), deep)


def test_leaves_are_asked_for_with_their_paths() -> None:
    asked = []

    def leaf(value: object, path: tuple[str | int, ...]) -> ArrayRef | None:
        asked.append(path)
        return ArrayRef(len(asked) - 1) if isinstance(value, range) else None

    found = encode({"a": [range(1)], 7: (range(2),), 1.5: range(3)}, (), leaf)
    assert asked == [("a", 0), (7, 0), ("1.5",)]
    assert decode(found, lambda ref: f"<{ref}>") == {
        "a": ["<ArrayRef(number=0, kind='tensor')>"],
        7: ("<ArrayRef(number=1, kind='tensor')>",),
        1.5: "<ArrayRef(number=2, kind='tensor')>",
    }


@pytest.mark.parametrize(
    "text",
    [
        '{"$nope": 1}',
        '{"$float": 1}',
        '{"$float": "7ff8"}',
        '{"$float": "zz00000000000000"}',
        '{"$int": 5}',
        '{"$int": "0x"}',
        '{"$int": "1%s"}' % ("0" * 3000),
        '{"$bytes": "***"}',
        '{"$bytes": {}}',
        '{"$complex": "00"}',
        '{"$tuple": 5}',
        '{"$tuple": "ab"}',
        '{"$set": [[1]]}',
        '{"$dict": [[1]]}',
        '{"$counter": [[1]]}',
        '{"$counter": [[[], 1]]}',
        '{"$counter": [[1, 1], [1, 2]]}',
        '{"$counter": [[1, 1.5]]}',
        '{"$counter": {"a": 1}}',
        '{"$dict": [[[], 1]]}',
        '{"$dict": [[1, 1], [1, 2]]}',
        '{"$dict": {"a": 1}}',
        '{"$array": -1}',
        '{"$array": true}',
        '{"$array": 1.0}',
        '{"$array": [1]}',
        '{"$array": [1, 2]}',
        '{"$size": [1.5]}',
        '{"$size": "ab"}',
        '{"$dtype": 5}',
        '{"$device": null}',
        '{"$numpy": ["object", "00"]}',
        '{"$numpy": ["float32", "00"]}',
        '{"$numpy": ["float32", "00 00 00"]}',
        '{"$numpy": ["float32", "zz000000"]}',
        '{"$numpy": [["float32"], "00000000"]}',
        '{"$numpy": "float32 00000000"}',
        '{"$numpy": ["(1000000000,)f8", ""]}',
        '{"$numpy": ["datetime64[D]", "0000000000000000"]}',
        '{"$numpy": ["float32,float32", "0000000000000000"]}',
        '{"$tuple": [], "b": 1}',
        '{"$": 1}',
        "[" * 500 + "]" * 500,
        '{"$tuple": [' * 300 + "]}" * 300,
    ],
    ids=lambda text: text[:40],
)
def test_what_nobody_wrote_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        decode(json.loads(text), where="manifest")


def test_a_tag_of_a_newer_release_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"\$quaternion"):
        decode({"$quaternion": [1, 2, 3, 4]}, where="manifest")
    with pytest.raises(FormatError, match="manifest"):
        decode({"$size": None}, where="manifest")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (NamedValue("dtype", "bfloat16"), "torch.bfloat16"),
        (NamedValue("size", (2, 3)), "size((2, 3))"),
        (NamedValue("device", "cuda:0"), "device(cuda:0)"),
        (NamedValue("numpy", "float32 0000003f"), "numpy.float32(0.5)"),
        (NamedValue("numpy", "complex64 0000803f00000040"), "numpy.complex64(1.0, 2.0)"),
        (NamedValue("numpy", "bool 01"), "numpy.bool(True)"),
    ],
)
def test_inert_values_read_like_what_they_stand_for(value: NamedValue, shown: str) -> None:
    assert repr(value) == shown
    assert repr(through([value])) == f"[{shown}]"
