"""An optimizer's param groups and values, as JSON and by path.

`param_groups.json` stores plain values, and exact copies of values that plain JSON cannot represent. By path, values
have the form that `torch.optim` and `torch.distributed` use.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from shardckpt.encodings.pickle_stubs import Dtype, Ordered
from shardckpt.encodings.tagged_json import NamedValue, encode
from shardckpt.errors import CheckpointError, UnsupportedError
from shardckpt.manifest import Path
from shardckpt.plan.optim.optim_keys import GROUPS
from shardckpt.plan.optim.optimizer_state import OptimizerState
from shardckpt.plan.optim.output_keys import NESTED, VALUES
from shardckpt.readers.huggingface.optimizer_keys import EXACT


def read_content(state: OptimizerState) -> dict[str, Any]:
    """Return an optimizer's groups and values with their original types."""
    values = {name: dict(slots) for name, slots in state.scalars.items()}
    nested = {NESTED: {slot: list(keys) for slot, keys in state.nested.items()}} if state.nested else {}
    return {GROUPS: [dict(group) for group in state.groups], VALUES: values, **nested}


def as_json(content: Mapping[str, Any]) -> dict[str, object]:
    """Return the content for `param_groups.json`."""
    # For values that JSON cannot represent: path and tagged JSON. `made` has them as readable text.
    exact: list[list[object]] = []
    made: dict[str, object] = {key: _plain(value) for key, value in content.items()}
    for path, value in iter_settings(content):
        if not _is_json(value):
            try:
                exact.append([list(path), encode(plain_value(value), path)])
            except UnsupportedError:
                continue  # only the text can be stored, which is reported as lossy
    if exact:
        made[EXACT] = exact
    try:
        json.dumps(made)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("the param groups cannot be written as JSON", found=str(error)) from error
    return made


def iter_settings(content: Mapping[str, Any]) -> Iterator[tuple[Path, object]]:
    """Yield every group setting and every parameter value, by path."""
    for number, group in enumerate(content[GROUPS]):
        yield from (((GROUPS, number, key), value) for key, value in group.items())
    for name, slots in content[VALUES].items():
        yield from (((VALUES, name, slot), value) for slot, value in slots.items())


def drop_settings(content: Mapping[str, Any], lost: frozenset[Path]) -> dict[str, Any]:
    """Return the content without some settings."""
    groups = [
        {key: value for key, value in group.items() if (GROUPS, number, key) not in lost}
        for number, group in enumerate(content[GROUPS])
    ]
    values = {
        name: {slot: value for slot, value in slots.items() if (VALUES, name, slot) not in lost}
        for name, slots in content[VALUES].items()
    }
    return {**content, GROUPS: groups, VALUES: values}


def plain_value(value: Any) -> Any:
    """Return a value from a pickle as plain Python containers."""
    if isinstance(value, Ordered):
        return OrderedDict((key, plain_value(each)) for key, each in value.items())
    if isinstance(value, Dtype):
        return NamedValue("dtype", value.name)
    if type(value) is dict:
        return {key: plain_value(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain_value, value))
    return value


def _is_json(value: object) -> bool:
    """Return True if JSON preserves a value."""
    if value is None or type(value) in (bool, int, str):
        return True
    if type(value) is float:
        return isfinite(value)
    if type(value) is list:
        return all(map(_is_json, value))
    return type(value) is dict and all(type(k) is str and _is_json(v) for k, v in value.items())


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return str(value)
