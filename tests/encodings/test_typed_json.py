"""Records survive JSON, and JSON that is no record is one typed error that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.encodings.typed_json import OMITTED, UNSTORED, JsonForm, decode, dump, encode, load
from shardckpt.errors import CheckpointError, FormatError, UnsafeError, UnsupportedError
from shardckpt.manifest import Path
from tests.kit.damage.json_edits import Change, put


def _read_color(value: object) -> str:
    if value not in ("red", "blue"):
        raise UnsupportedError("an unknown color", found=value)
    return str(value)


class Row(NamedTuple):
    name: Annotated[str, re.compile("[a-z]+")]
    size: Annotated[int, range(100)]
    marks: Annotated[tuple[int, ...], OMITTED] = ()
    cached: Annotated[int, UNSTORED] = 7


@dataclass(frozen=True)
class Record:
    kind: Literal["box", 1]
    rows: Annotated[tuple[Row, ...], range(5)]
    by_name: Mapping[str, Row]
    by_path: Mapping[Path, Path | None]
    pair: tuple[int, str] | None
    names: frozenset[str]
    digest: bytes
    rate: float
    is_open: bool
    tree: object
    color: Annotated[str, JsonForm(_read_color)]
    steps: Sequence[int]
    flags: Annotated[Mapping[str, bool], OMITTED] = field(default_factory=dict)
    text: Annotated[str, "renamed"] = ""
    memory: Annotated[object, UNSTORED] = None


INTEGERS = st.integers(-(1 << 64) + 1, (1 << 64) - 1)
PATHS = st.lists(st.text() | INTEGERS).map(tuple)
ROWS = st.builds(
    Row,
    st.text("abc", min_size=1),
    st.integers(0, 99),
    st.lists(INTEGERS).map(tuple),
    cached=st.just(7),
)
JSON = st.recursive(st.none() | st.booleans() | INTEGERS | st.text(), lambda inner: st.lists(inner, max_size=3))
RECORDS = st.builds(
    Record,
    st.sampled_from(["box", 1]),
    st.lists(ROWS, max_size=4).map(tuple),
    st.dictionaries(st.text(), ROWS, max_size=3),
    st.dictionaries(PATHS, st.none() | PATHS, max_size=3),
    st.none() | st.tuples(INTEGERS, st.text()),
    st.frozensets(st.text()),
    st.binary(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    JSON,
    st.sampled_from(["red", "blue"]),
    st.lists(INTEGERS).map(tuple),
    st.dictionaries(st.text(), st.booleans(), max_size=2),
    st.text(),
    st.none(),
)


@given(RECORDS)
def test_a_record_is_decoded_as_it_was(record: Record) -> None:
    assert load(Record, dump(record)) == record


@given(RECORDS, JSON)
def test_any_json_in_any_place_is_a_record_or_a_typed_error(record: Record, strange: object) -> None:
    content = encode(record)
    for key in content:
        try:
            decoded = decode(Record, {**content, key: strange})
        except CheckpointError as error:
            assert str(error.where).startswith({"text": "renamed"}.get(key, key))
        else:
            assert decode(Record, encode(decoded)) == decoded


GOOD: dict[str, Any] = {
    "kind": "box",
    "rows": [["a", 1], ["b", 2, [3]]],
    "by_name": {"k": ["c", 0]},
    "by_path": [[["a", 0], None], [["b"], ["c"]]],
    "pair": [1, "x"],
    "names": ["a", "b", "c", "d", "e"],
    "digest": "00ff",
    "rate": 0.5,
    "is_open": True,
    "tree": {"any": [1, None]},
    "color": "red",
    "steps": [1],
    "renamed": "t",
}


REFUSED: list[tuple[Change, type[CheckpointError], str]] = [
    (lambda c: c.pop("rate"), FormatError, "x, rate: is missing"),
    (put(1, "new"), FormatError, "x, new: is unknown"),
    (put(True, "kind"), FormatError, "x, kind: must be one of ('box', 1); found True"),
    (put("bag", "kind"), FormatError, "x, kind: must be one of ('box', 1); found bag"),
    (put({}, "rows"), FormatError, "x, rows: must be 0 to 4, or so many values; found {}"),
    (put([["a", 1]] * 5, "rows"), FormatError, "x, rows: must be 0 to 4"),
    (put("A", "rows", 1, 0), FormatError, "x, rows[1].name: must be text like [a-z]+; found A"),
    (put(100, "rows", 0, 1), FormatError, "x, rows[0].size: must be 0 to 99"),
    (put(True, "rows", 0, 1), FormatError, "x, rows[0].size: must be 0 to 99, or so many values; found True"),
    (put(1.0, "rows", 0, 1), FormatError, "x, rows[0].size: must be an integer with at most 64 bits; found 1.0"),
    (put(1 << 64, "rows", 1, 2, 0), FormatError, "x, rows[1].marks[0]: must be an integer with at most 64 bits"),
    (put(["a"], "rows", 0), FormatError, "x, rows[0]: must be a list with 3 values; found ['a']"),
    (put(["a", 1, [], 7], "rows", 0), FormatError, "x, rows[0]: must be a list with 3 values"),
    (put([], "by_name"), FormatError, "x, by_name: must be an object; found []"),
    (put(-1, "by_name", "k", 1), FormatError, "x, by_name.k.size: must be 0 to 99"),
    (put({}, "by_path"), FormatError, "x, by_path: must be a list; found {}"),
    (put([[["a"], None]] * 2, "by_path"), FormatError, "x, by_path: a key stands twice"),
    (put([1.5], "by_path", 0, 0), FormatError, "x, by_path[0][0]: must be a list with texts and integers; found [1.5]"),
    (put("b", "by_path", 1, 1), FormatError, "x, by_path[1][1]: must be a list with texts and integers; found b"),
    (put([1], "pair"), FormatError, "x, pair: must be a list with 2 values; found [1]"),
    (put(2, "pair", 1), FormatError, "x, pair[1]: must be text; found 2"),
    (put([[]], "names"), FormatError, "x, names[0]: must be text; found []"),
    (put("0", "digest"), FormatError, "x, digest: must be text with hexadecimal digits; found 0"),
    (put("zz", "digest"), FormatError, "x, digest: must be text with hexadecimal digits; found zz"),
    (put("0 0f", "digest"), FormatError, "x, digest: must be text with hexadecimal digits; found 0 0f"),
    (put(None, "digest"), FormatError, "x, digest: must be text with hexadecimal digits; found None"),
    (put(1, "rate"), FormatError, "x, rate: must be a number with a point; found 1"),
    (put(1, "is_open"), FormatError, "x, is_open: must be true or false; found 1"),
    (put("green", "color"), UnsupportedError, "x, color: an unknown color; found green"),
    (put(None, "steps"), FormatError, "x, steps: must be a list; found None"),
    (put({"a": 0}, "flags"), FormatError, "x, flags.a: must be true or false; found 0"),
    (put(0, "memory"), FormatError, "x, memory: is unknown"),
    (put([[[n * (2**61 - 1)], None] for n in range(100)], "by_path"), UnsafeError, "x, by_path: very many keys"),
]


@pytest.mark.parametrize(("change", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_what_is_no_record_is_one_typed_error_with_a_path(
    change: Change, error: type[CheckpointError], text: str
) -> None:
    content = json.loads(json.dumps(GOOD))
    change(content)
    with pytest.raises(CheckpointError) as caught:
        decode(Record, content, where="x")
    assert type(caught.value) is error
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("value", [None, 1, "{}", []])
def test_a_record_is_an_object(value: object) -> None:
    with pytest.raises(FormatError, match="must be an object"):
        decode(Record, value, is_open=True)


def test_an_open_record_ignores_unknown_fields() -> None:
    assert decode(Record, {**GOOD, "new": 1, "memory": 2}, is_open=True) == decode(Record, GOOD)


def test_defaults_that_json_lacks_are_not_written() -> None:
    written = encode(decode(Record, {**GOOD, "flags": {}}))
    assert written == GOOD
    assert list(written) == list(GOOD), "in the order of the fields"


@pytest.mark.parametrize(
    ("data", "text"),
    [(b'{"a": NaN}', "NaN"), (b'{"a":1,"a":2}', "stands twice"), (b"[" * 9000, "nested too deep"), (b"\xff", "utf-8")],
)
def test_bytes_that_are_no_json_are_refused(data: bytes, text: str) -> None:
    with pytest.raises(FormatError, match=text):
        load(Record, data, where="x")


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(FormatError) as caught:
        decode(Record, {**GOOD, "rows": "x" * 10**6, "is_open": [0] * 10**6}, where="x")
    assert len(str(caught.value)) < 2000
