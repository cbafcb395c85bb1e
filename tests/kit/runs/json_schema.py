"""The JSON schema of what commands print with `--json`, from the annotations and docstrings of their results."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from shardckpt_cli.app import VERBS
from shardckpt_cli.output import SCHEMA_VERSION, list_members

import shardckpt

_NUMBER = {
    "description": "A number; text if it is not finite.",
    "anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}],
}
_PLAIN: dict[object, dict[str, Any]] = {
    Any: {},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    str: {"type": "string"},
    type(None): {"type": "null"},
    float: {"$ref": "#/$defs/number"},
}


class _Member(NamedTuple):
    """A field or property of a class, and its text."""

    kind: object
    text: str


FUNCTIONS = {"stream": "list_versions", "tiers": "list_tiers", "task": "run_task", "commit": "commit_plan"}
"""Functions of commands that have another name."""


def list_verbs() -> dict[str, Any]:
    """Return the class of the result of every command that has `--json`."""
    found = {}
    for name, verb in VERBS.items():
        if "as_json" in inspect.signature(verb.function).parameters:
            found[name] = get_type_hints(getattr(shardckpt, FUNCTIONS.get(name, name.replace("-", "_"))))["return"]
    return found


def build_schema() -> dict[str, Any]:
    """Return the schema of all commands: `#/$defs/VERB` is that of one."""
    verbs, defs = list_verbs(), dict[str, Any]()
    schemas = {name: _schema(kind, defs) for name, kind in verbs.items()}
    version = {"type": "object", "required": ["schema_version"]}
    version["properties"] = {"schema_version": {"const": SCHEMA_VERSION}}
    of_verbs = {name: {"allOf": [version, schema]} for name, schema in schemas.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"JSON of the shardckpt command, version {SCHEMA_VERSION}",
        "description": "What `shardckpt VERB --json` prints is `#/$defs/VERB`. Fields may be added within a version.",
        "$defs": {**of_verbs, "number": _NUMBER, **dict(sorted(defs.items()))},
    }


def close_objects(schema: Any) -> Any:
    """Return a schema whose objects have only the fields that are listed."""
    if isinstance(schema, list):
        return [close_objects(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close_objects(value) for key, value in schema.items()}
    is_class = "properties" in closed and closed.get("type") == "object"
    return closed | {"additionalProperties": False} if is_class else closed


def _reference(cls: type) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _define(cls: type, defs: dict[str, Any]) -> None:
    """Add the schema of a class, and of the classes in its fields."""
    defs[cls.__name__] = {}
    members = _list_members(cls)
    properties = {name: _schema(kind, defs) | ({"description": text} if text else {}) for name, (kind, text) in members}
    summary = (inspect.getdoc(cls) or "").partition("\n")[0]
    defs[cls.__name__] = {
        "description": summary,
        "type": "object",
        "required": list(properties),
        "properties": properties,
    }


def _list_members(cls: type) -> list[tuple[str, _Member]]:
    hints, texts = get_type_hints(cls), _read_attributes(cls)
    found = []
    for name in list_members(cls):
        getter = vars(cls)[name].fget if name not in hints else None
        kind = hints[name] if getter is None else get_type_hints(getter)["return"]
        found.append((name, _Member(kind, texts.get(name, "") if getter is None else inspect.getdoc(getter) or "")))
    return found


def _read_attributes(cls: type) -> dict[str, str]:
    """Return the texts in the section `Attributes` of a docstring, by name."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _schema(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an annotation."""
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    origin, inner = get_origin(kind), get_args(kind)
    build = _GENERIC.get(origin)
    if build is not None:
        return build(inner, defs)
    assert dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"), f"no schema for {kind}"
    if kind.__name__ not in defs:
        _define(kind, defs)
    return _reference(kind)


def _union(inner: tuple[Any, ...], defs: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_schema(each, defs) for each in inner]}


def _tuple(inner: tuple[Any, ...], defs: dict[str, Any]) -> dict[str, Any]:
    if inner[-1] is Ellipsis:
        return {"type": "array", "items": _schema(inner[0], defs)}
    items = [_schema(each, defs) for each in inner]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


_GENERIC: Mapping[object, Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]] = {
    Union: _union,
    types.UnionType: _union,
    tuple: _tuple,
    frozenset: lambda inner, defs: {"type": "array", "items": _schema(inner[0], defs), "uniqueItems": True},
    Mapping: lambda inner, defs: {"type": "object", "additionalProperties": _schema(inner[1], defs)},
    Literal: lambda inner, _: {"enum": list(inner)},
}
