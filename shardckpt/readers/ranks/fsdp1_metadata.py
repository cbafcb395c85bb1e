"""Metadata files for FSDP1's LOCAL states: each flat parameter's members.

The files are named `flat_param_metadata_rank{r}.json`. torch writes no such files. A job that saves LOCAL states can
write the fields in `FlatParameter` as `{"world_size", "rank", "handles": [{"module", "fqns", "shapes", "shared_params":
[[name, first name], ...]}, ...]}`, with names relative to `module`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardckpt.boxes import Shape
from shardckpt.encodings.budget import check_list, check_shape, check_text, require_small
from shardckpt.encodings.safetensors import parse_json
from shardckpt.errors import FormatError
from shardckpt.plan.naming.fqn import strip_wrappers
from shardckpt.reader import ParamShapes
from shardckpt.readers.merge_shards import KEEP_ONE_SAVE
from shardckpt.readers.ranks.fsdp1_flat_param import FLAT
from shardckpt.storage.store import Read, Store

_NAME = re.compile(r"flat_param_metadata_rank\d{1,9}\.json")
_MAX_BYTES = 1 << 26


def read_metadata(store: Store, sizes: Mapping[str, int]) -> ParamShapes | None:
    """Read the parameter shapes from metadata files; None if there are none."""
    names = sorted(name for name in sizes if _NAME.fullmatch(name))
    for name in names:
        require_small("a metadata file", sizes[name], _MAX_BYTES, f"{store.url}/{name}")
    buffers = {name: bytearray(sizes[name]) for name in names}
    store.read([Read(name, 0, memoryview(buffer)) for name, buffer in buffers.items()])
    first: tuple[str, ParamShapes] | None = None
    for name, raw in buffers.items():
        known = _parse(parse_json(bytes(raw), where=f"{store.url}/{name}"), f"{store.url}/{name}")
        if first is None:
            first = (name, known)
        elif (known.shapes, known.units, known.aliases) != (first[1].shapes, first[1].units, first[1].aliases):
            raise FormatError(f"{first[0]} and {name} store different layouts", where=store.url, fix=KEEP_ONE_SAVE)
    return first[1] if first else None


def _parse(value: object, where: str) -> ParamShapes:
    shapes: dict[str, Shape] = {}
    units: dict[str, Sequence[str]] = {}
    aliases: dict[str, str] = {}
    for handle in check_list(value.get("handles") if isinstance(value, dict) else None, where):
        fields = handle if isinstance(handle, dict) else {}
        module = strip_wrappers(check_text(fields.get("module"), where))
        prefix = f"{module}." if module else ""
        names = [strip_wrappers(prefix + check_text(name, where)) for name in check_list(fields.get("fqns"), where)]
        sizes = [check_shape(shape, where) for shape in check_list(fields.get("shapes"), where)]
        if len(names) != len(sizes) or len(set(names)) < len(names) or shapes.keys() & set(names):
            raise FormatError("a unit must have one shape for each name, each name once", where=where, found=module)
        shapes |= dict(zip(names, sizes, strict=True))
        units[prefix + FLAT] = names
        for pair in check_list(fields.get("shared_params", []), where):
            tied = [strip_wrappers(prefix + check_text(name, where)) for name in check_list(pair, where)[:2]]
            if len(tied) < 2:
                raise FormatError("a tie must name two parameters", where=where, found=str(pair)[:80])
            aliases[tied[0]] = tied[1]
    return ParamShapes(shapes, where, aliases, units)
