"""Other keys for the same optimizer state in a file: names, numbers, flattened names, flat parameters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shardckpt.errors import UsageError
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.optim.flat_params import Units, to_flat_params

Keys = Literal["names", "ids", "flat", "flat-parameters"]
KEYS = "keys"
"""Where the content of `param_groups.json` says how parameters are called; without it, by names."""

_GROUPS, _VALUES = "param_groups", "non_tensor_state"
_NAMES = frozenset({"params", "param_names"})


def rekey_state(
    tensors: Sequence[OutputTensor],
    content: Mapping[str, Any],
    keys: Keys,
    numbers: Mapping[int, str] | None = None,
    units: Units | None = None,
) -> tuple[tuple[OutputTensor, ...], dict[str, Any]]:
    """Convert an optimizer's tensors and group file to other keys.

    Args:
        tensors: Named `<parameter>/<slot>`.
        content: What `param_groups.json` holds, by names.
        keys: `names`: as it is. `ids`: numbers for names, which the groups keep as `param_names`. `flat`: one key a
            value, `state.<parameter>.<slot>` and `param_groups.<parameter>.<setting>`; the groups are listed as well,
            since flattened settings do not tell which parameters were together. `flat-parameters`: one tensor for
            each flat parameter and slot, with the layouts.
        numbers: With `ids`, the name that each number is for; None to number names as they stand in the groups.
        units: With `flat-parameters`, what lies in each.

    Raises:
        UsageError: With `ids`, a name has no number; with `flat-parameters`, nobody tells what lies in them.
    """
    if keys == "names":
        return tuple(tensors), dict(content)
    if keys == "flat-parameters":
        if not units:
            raise UsageError(
                "nobody tells what lies in flat parameters",
                expected="rank files of LOCAL states of a model that was wrapped with use_orig_params=False",
            )
        made, said = to_flat_params(tensors, content, units)
        return made, {**said, KEYS: keys}
    if keys == "flat":
        return _rename(tensors, lambda name, slot: f"state.{name}.{slot}"), _flat(content)
    number = _numbers(tensors, content, numbers)
    return _rename(tensors, lambda name, slot: f"{number[name]}/{slot}"), _number_params(content, number)


def _rename(tensors: Iterable[OutputTensor], rename: Callable[[str, str], str]) -> tuple[OutputTensor, ...]:
    found = []
    for tensor in tensors:
        name, _, slot = tensor.name.rpartition("/")
        found.append(replace(tensor, name=rename(name, slot)))
    return tuple(found)


def _numbers(
    tensors: Iterable[OutputTensor], content: Mapping[str, Any], given: Mapping[int, str] | None
) -> dict[str, int]:
    names = dict.fromkeys(name for group in content[_GROUPS] for name in group["params"])
    found = {name: number for number, name in (enumerate(names) if given is None else sorted(given.items()))}
    if given is not None and len(found) < len(given):
        raise UsageError("--param-names has a name twice", found=f"{len(given)} ids, {len(found)} names")
    kept = [tensor.name.rpartition("/")[0] for tensor in tensors]
    unknown = [name for name in dict.fromkeys((*names, *kept, *content[_VALUES])) if name not in found]
    if unknown:
        raise UsageError(
            f"{len(unknown)} parameters of the optimizer have no number",
            found=", ".join(unknown[:8]),
            fix="Give --param-names FILE with the names in the order of the optimizer's parameters.",
        )
    return found


def _number_params(content: Mapping[str, Any], number: Mapping[str, int]) -> dict[str, Any]:
    groups = [
        {**group, "params": [number[name] for name in group["params"]], "param_names": list(group["params"])}
        for group in content[_GROUPS]
    ]
    values = {str(number[name]): slots for name, slots in content[_VALUES].items()}
    return {**content, KEYS: "ids", _GROUPS: groups, _VALUES: values}


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        f"param_groups.{name}.{setting}": value
        for group in content[_GROUPS]
        for name in group["params"]
        for setting, value in group.items()
        if setting not in _NAMES
    }
    values = {f"state.{name}.{slot}": v for name, slots in content[_VALUES].items() for slot, v in slots.items()}
    return {**content, KEYS: "flat", "flattened": {**values, **settings}}
