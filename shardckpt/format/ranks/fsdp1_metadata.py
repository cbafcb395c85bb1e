"""Notes beside FSDP1's LOCAL states that tell what lies in each flat parameter: `flat_param_metadata_rank{r}.json`.

torch writes none. Who saves LOCAL states can dump `FlatParameter`'s own record so: `{"world_size", "rank", "handles":
[{"module", "fqns", "shapes", "shared_params": [[name, first name], ...]}, ...]}`, names below `module`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

from shardckpt.boxes import Shape
from shardckpt.errors import FormatError, UnsafeError
from shardckpt.format.encodings.safetensors import parse_json
from shardckpt.format.ranks.fsdp1_flat_param import FLAT
from shardckpt.format.reader import ParamShapes
from shardckpt.parameter_names import strip_wrappers
from shardckpt.storage.store import Read, Store

_NAME = re.compile(r"flat_param_metadata_rank\d{1,9}\.json")
_MOST_BYTES = 1 << 26
_MOST_ELEMENTS = 1 << 60
_MOST_DIMENSIONS = 64


def read_metadata(store: Store, sizes: Mapping[str, int]) -> ParamShapes | None:
    """Read the parameter shapes from metadata files; None if there are none.

    Args:
        store: The folder.
        sizes: Its files and their bytes.

    Raises:
        FormatError: A note is damaged, or two contradict one another.
        UnsafeError: One is larger than any note.
        StorageError: The store failed.
    """
    names = sorted(name for name in sizes if _NAME.fullmatch(name))
    for name in names:
        if sizes[name] > _MOST_BYTES:
            raise UnsafeError(
                "a note is too large", where=f"{store.url}/{name}", found=sizes[name], expected=_MOST_BYTES
            )
    buffers = {name: bytearray(sizes[name]) for name in names}
    store.read([Read(name, 0, memoryview(buffer)) for name, buffer in buffers.items()])
    first: tuple[str, ParamShapes] | None = None
    for name, raw in buffers.items():
        known = _parse(parse_json(bytes(raw), where=f"{store.url}/{name}"), f"{store.url}/{name}")
        if first is None:
            first = (name, known)
        elif (known.shapes, known.units, known.aliases) != (first[1].shapes, first[1].units, first[1].aliases):
            raise FormatError(
                f"{first[0]} and {name} tell different layouts",
                where=store.url,
                fix="Keep the files of one save, and nothing else, in a folder of their own.",
            )
    return first[1] if first else None


def _parse(note: object, where: str) -> ParamShapes:
    handles = note.get("handles") if isinstance(note, dict) else None
    shapes: dict[str, Shape] = {}
    units: dict[str, Sequence[str]] = {}
    aliases: dict[str, str] = {}
    for handle in _list(handles, where):
        told = handle if isinstance(handle, dict) else {}
        module = strip_wrappers(_text(told.get("module"), where))
        prefix = f"{module}." if module else ""
        names = [strip_wrappers(prefix + _text(name, where)) for name in _list(told.get("fqns"), where)]
        found = [_shape(shape, where) for shape in _list(told.get("shapes"), where)]
        if len(names) != len(found) or len(set(names)) < len(names) or shapes.keys() & set(names):
            raise FormatError("a unit has not one shape for each name, or a name twice", where=where, found=module)
        shapes |= dict(zip(names, found, strict=True))
        units[prefix + FLAT] = names
        for pair in _list(told.get("shared_params", []), where):
            alias, name = (strip_wrappers(prefix + _text(each, where)) for each in _pair(pair, where))
            aliases[alias] = name
    return ParamShapes(shapes, where, aliases, units)


def _shape(value: object, where: str) -> Shape:
    sizes = _list(value, where)
    if not all(type(n) is int and 0 <= n <= _MOST_ELEMENTS for n in sizes) or len(sizes) > _MOST_DIMENSIONS:
        raise FormatError("a shape is none", where=where, found=str(value)[:80])
    shape = tuple(n for n in sizes if isinstance(n, int))
    if prod(shape) > _MOST_ELEMENTS:
        raise FormatError("a parameter is larger than any machine holds", where=where, found=shape)
    return shape


def _pair(value: object, where: str) -> tuple[object, object]:
    both = _list(value, where)
    if len(both) < 2:
        raise FormatError("a tie names one parameter", where=where, found=str(value)[:80])
    return both[0], both[1]


def _list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise FormatError("this should be a list", where=where, found=type(value).__name__)
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise FormatError("a name is no text", where=where, found=type(value).__name__)
    return value
