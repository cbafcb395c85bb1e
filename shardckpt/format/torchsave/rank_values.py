"""Values that are not tensors in the files of several ranks: compare them, merge param groups."""

from __future__ import annotations

from collections.abc import Iterable

from shardckpt.format.encodings.pickle_stubs import InstanceStub, PerRankValue
from shardckpt.manifest import Path
from shardckpt.plan.optim.optim_keys import GROUPS
from shardckpt.plan.optim.param_groups import merge_groups


def combine_values(path: Path, values: Iterable[tuple[str, object]]) -> object:
    """Return the one value of several files.

    Equal values are one. Param groups with names are merged, since pipeline stages have other parameters. Others become
    a `PerRankValue`, an error where the value is needed.

    Args:
        path: Path of the value.
        values: File and value of each rank, in rank order; at least one.
    """
    remaining = iter(values)
    file, first = next(remaining)
    odd = next(((other, value) for other, value in remaining if not is_same(value, first)), None)
    if odd is None:
        return first
    merged = None
    if path[-1:] == (GROUPS,):
        distinct = [first, odd[1]]
        for _, value in remaining:
            if not any(is_same(value, known) for known in distinct):
                distinct.append(value)
        merged = merge_groups(distinct)
    return PerRankValue(file, odd[0]) if merged is None else merged


def is_same(a: object, b: object) -> bool:
    """Return True if two values of pickles are equal, of equal types; the pickle reader has limited depth and size."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, InstanceStub) and isinstance(b, InstanceStub):
        return a.name == b.name and is_same((a.args, a.state, a.items), (b.args, b.state, b.items))
    return a == b or (a != a and b != b)  # noqa: PLR0124  (NaN is the value that differs from itself)
