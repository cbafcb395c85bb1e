"""An optimizer's selected tensors and groups as the nest that `torch.optim` and `torch.distributed` know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardckpt.convert.group_values import GROUPS, VALUES
from shardckpt.errors import UsageError
from shardckpt.manifest import Path
from shardckpt.plan.outputs import OutTensor
from shardckpt.plan.rekey import KEYS

STATE = "state"
_FLATTENED = "flattened"


def by_path(
    tensors: Iterable[OutTensor], content: Mapping[str, Any]
) -> tuple[dict[Path, OutTensor], dict[Path, object]]:
    """Return tensors and values by their paths below the optimizer.

    By names and by numbers: `("state", parameter, slot)` and `("param_groups",)`, a list of dicts. Flattened: one key
    each, `("state.<parameter>.<slot>",)` and `("param_groups.<parameter>.<setting>",)`.

    Args:
        tensors: As selected, under the keys that `content` says.
        content: Groups and values.

    Raises:
        UsageError: By flat parameters, which say elsewhere what lies in them.
    """
    keys = content.get(KEYS, "names")
    if keys == "flat":
        return {(tensor.name,): tensor for tensor in tensors}, {(k,): v for k, v in content[_FLATTENED].items()}
    if keys == "flat-parameters":
        raise UsageError("only safetensors folders say what lies in flat parameters", fix="Choose names or ids.")
    arrays: dict[Path, OutTensor] = {}
    for tensor in tensors:
        name, _, slot = tensor.name.rpartition("/")
        arrays[STATE, _key(name, keys), slot] = tensor
    values: dict[Path, object] = {
        (STATE, _key(name, keys), slot): value
        for name, slots in content[VALUES].items()
        for slot, value in slots.items()
    }
    if not arrays and not values:
        values[STATE,] = {}
    values[GROUPS,] = content[GROUPS]
    return arrays, values


def _key(name: str, keys: str) -> str | int:
    return int(name) if keys == "ids" else name
