"""Typed records as JSON: a dataclass is an object, a named tuple a list with its fields in order.

Annotations are the schema: records, `bool`, `int`, `float`, `str`, `bytes` (hexadecimal digits), `Path`, `object` (any
JSON), `X | None`, `Literal`, `tuple`, `list`, `Sequence`, `frozenset`, and `Mapping`: an object if its keys are `str`,
else a list of pairs. `Annotated` adds a `range` for numbers or lengths, a regular expression for texts, a `JsonForm`,
or the field's name in JSON. JSON lacks an `OMITTED` field, the last one in a list, while it has its default, and an
`UNSTORED` field always.
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from operator import length_hint
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from shardckpt.encodings.budget import check_paths
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import CheckpointError, FormatError
from shardckpt.manifest import Path

T = TypeVar("T")
Convert = Callable[[Any], Any]

OMITTED, UNSTORED = object(), object()


def _same(value: Any) -> Any:
    return value


class JsonForm(NamedTuple):
    """A value's form in JSON."""

    decode: Convert  # raises a CheckpointError without a place
    encode: Convert = _same


def decode(kind: type[T], value: object, *, where: object = "", is_open: bool = False) -> T:
    """Return a record from its JSON value; errors name the field. `is_open` ignores unknown fields."""
    hint: Any = kind
    if is_open and type(value) is dict:
        value = {field.key: value[field.key] for field in _list_fields(hint) if field.key in value}
    try:
        return _compile(hint).decode(value)  # type: ignore[no-any-return]
    except CheckpointError as error:
        place = (str(where), str(error.where).lstrip("."))
        raise _move(error, ", ".join(filter(None, place))) from None


def encode(record: object) -> Any:
    """Return a record's JSON value."""
    hint: Any = type(record)
    return _compile(hint).encode(record)


def load(kind: type[T], data: bytes | bytearray, *, where: str = "", is_open: bool = False) -> T:
    """Return a record from bytes, like `decode`."""
    return decode(kind, parse_json(data, where=where), where=where, is_open=is_open)


def dump(record: object) -> bytes:
    """Return a record as canonical JSON."""
    return json.dumps(encode(record), separators=(",", ":"), allow_nan=False).encode("ascii")


def must_be(expected: str, found: object) -> FormatError:
    """Return the error for a value in another form."""
    return FormatError(f"must be {expected}", found=found if isinstance(found, str) else reprlib.repr(found))


def _move(error: CheckpointError, where: object) -> CheckpointError:
    return type(error)(error.what, where=where, found=error.found, expected=error.expected, fix=error.fix)


def _inside(key: Any, error: CheckpointError) -> CheckpointError:
    return _move(error, f"[{key}]{error.where}" if type(key) is int else f".{key}{error.where}")


class _Field(NamedTuple):
    name: str
    key: Any  # its name in JSON
    form: JsonForm
    is_omitted: bool = False
    default: object = None


@cache
def _list_fields(kind: Any) -> Sequence[_Field]:
    hints, defaults = get_type_hints(kind, include_extras=True), getattr(kind, "_field_defaults", {})
    if dataclasses.is_dataclass(kind):
        made = [(f.name, f.default_factory, f.default) for f in dataclasses.fields(kind)]
        defaults = {name: new() if callable(new) else default for name, new, default in made}
    found = []
    for name in getattr(kind, "_fields", defaults):
        marks = getattr(hints[name], "__metadata__", ())
        key = next((mark for mark in marks if isinstance(mark, str)), name)
        if UNSTORED not in marks:
            found.append(_Field(name, key, _compile(hints[name]), OMITTED in marks, defaults.get(name)))
    return found


@cache
def _compile(kind: Any) -> JsonForm:
    origin, args = get_origin(kind), get_args(kind)
    if kind in _FORMS:
        return _FORMS[kind]
    if origin is Annotated:
        own = [mark for mark in args if isinstance(mark, JsonForm)]
        return reduce(_narrow, args[1:], own[0] if own else _compile(args[0]))
    if origin is Literal:
        return _check(lambda value: any(value == each and type(value) is type(each) for each in args), f"one of {args}")
    if origin in (Union, UnionType):
        [(read, write)] = [_compile(each) for each in args if each is not NoneType]
        return JsonForm(
            lambda value: None if value is None else read(value), lambda value: None if value is None else write(value)
        )
    if origin is tuple and args[-1] is not ...:
        return _row(lambda *items: items, [_Field("", at, _compile(each)) for at, each in enumerate(args)])
    if origin in (dict, Mapping):
        return _members(*_compile(args[1])) if args[0] is str else _pairs(_compile(tuple.__class_getitem__(args)))
    if origin in _SEQUENCES:
        return _sequence(*_compile(args[0]), _SEQUENCES[origin])
    return (_object if dataclasses.is_dataclass(kind) else _row)(kind, _list_fields(kind))


def _check(is_valid: Convert, expected: str, form: JsonForm = JsonForm(_same)) -> JsonForm:  # noqa: B008
    def read(value: Any) -> Any:
        if is_valid(value):
            return form.decode(value)
        raise must_be(expected, value)

    return form._replace(decode=read)


def _check_type(kind: type, expected: str, decode: Convert = _same, encode: Convert = _same) -> JsonForm:
    return _check(lambda value: type(value) is kind, expected, JsonForm(decode, encode))


def _narrow(form: JsonForm, mark: Any) -> JsonForm:
    def is_within(value: Any) -> bool:
        size = len(value) if type(value) is list else value
        return type(size) in (int, float) and bool(mark.start <= size < mark.stop)

    if isinstance(mark, range):
        return _check(is_within, f"{mark.start} to {mark.stop - 1}, or so many values", form)
    if isinstance(mark, re.Pattern):
        return _check(lambda value: isinstance(value, str) and mark.fullmatch(value), f"text like {mark.pattern}", form)
    return form


def _sequence(read: Convert, write: Convert, build: Convert) -> JsonForm:
    def read_items(value: list[Any]) -> Any:
        items = iter(value)
        try:
            return build(map(read, items))
        except CheckpointError as error:
            raise _inside(len(value) - length_hint(items) - 1, error) from None

    order: Convert = sorted if build is frozenset else _same
    return _check_type(list, "a list", read_items, lambda value: [*map(write, order(value))])


def _members(read: Convert, write: Convert) -> JsonForm:
    def read_items(value: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        try:
            for key, item in value.items():
                made[key] = read(item)
        except CheckpointError as error:
            raise _inside(key, error) from None
        return made

    return _check_type(dict, "an object", read_items, lambda value: {key: write(item) for key, item in value.items()})


def _pairs(pair: JsonForm) -> JsonForm:
    rows = _sequence(*pair, list)

    def read(value: Any) -> dict[Any, Any]:
        pairs = rows.decode(value)
        check_paths([key if type(key) is tuple else (key,) for key, _ in pairs])
        if len(made := dict(pairs)) < len(pairs):
            raise FormatError("a key stands twice", found=reprlib.repr(value))
        return made

    return JsonForm(read, lambda value: rows.encode(value.items()))


def _row(build: Callable[..., Any], fields: Sequence[_Field]) -> JsonForm:
    readers, writers = zip(*(field.form for field in fields), strict=True)
    least, most, last = len(fields) - fields[-1].is_omitted, len(fields), fields[-1].default

    def read(value: Any) -> Any:
        if type(value) is not list or not least <= len(value) <= most:
            raise must_be(f"a list with {most} values", value)
        items = iter(value)
        try:
            return build(*[reader(item) for reader, item in zip(readers, items)])  # noqa: B905  (may lack the last)
        except CheckpointError as error:
            raise _inside(fields[len(value) - length_hint(items) - 1].key, error) from None

    def write(record: Any) -> list[Any]:
        row = [writer(item) for writer, item in zip(writers, record)]  # noqa: B905  (may have unstored ones)
        return row[:least] if least < most and record[least] == last else row

    return JsonForm(read, write)


def _object(build: Callable[..., Any], fields: Sequence[_Field]) -> JsonForm:
    def read(value: dict[str, Any]) -> Any:
        made, left, key = {}, dict(value), ""
        try:
            for name, key, form, is_omitted, _ in fields:
                if key in left:
                    made[name] = form.decode(left.pop(key))
                elif not is_omitted:
                    raise FormatError("is missing")
            for key in left:  # noqa: B007
                raise FormatError("is unknown")
        except CheckpointError as error:
            raise _inside(key, error) from None
        return build(**made)

    def write(record: Any) -> dict[str, Any]:
        values = [(field, getattr(record, field.name)) for field in fields]
        return {f.key: f.form.encode(v) for f, v in values if not (f.is_omitted and v == f.default)}

    return _check_type(dict, "an object", read, write)


def _read_bytes(value: Any) -> bytes:
    try:
        data = bytes.fromhex(value)
    except (TypeError, ValueError):
        data = b""
    if type(value) is not str or 2 * len(data) != len(value):  # `fromhex` skips white space
        raise must_be("text with hexadecimal digits", value)
    return data


def _read_path(value: Any) -> Path:
    for key in value if type(value) is list else [None]:
        if type(key) is not str and type(key) is not int:
            raise must_be("a list with texts and integers", value)
    return tuple(value)


_SEQUENCES: Mapping[Any, Convert] = {tuple: tuple, list: list, Sequence: tuple, frozenset: frozenset}
_FORMS: Mapping[Any, JsonForm] = {
    object: JsonForm(_same),
    Any: JsonForm(_same),
    bool: _check_type(bool, "true or false"),
    int: _check(lambda value: type(value) is int and value.bit_length() <= 64, "an integer with at most 64 bits"),
    float: _check_type(float, "a number with a point"),
    str: _check_type(str, "text"),
    bytes: JsonForm(_read_bytes, bytes.hex),
    Path: JsonForm(_read_path, list),
}
