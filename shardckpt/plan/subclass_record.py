"""The record of a wrapper subclass: its class and context as data, next to its inner tensors.

In a saved state, such a tensor is a dict of its inner tensors, and this record as text under the key `SUBCLASS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from shardckpt.boxes import Shape

SUBCLASS = "__tensor_subclass__"


@dataclass(frozen=True)
class SubclassRecord:
    """Describes a wrapper subclass without its elements."""

    name: str  # module and name of its class
    package: str  # name and version of the package that wrote it
    dtype: str  # the tensor's dtype, as torch spells it
    shape: Shape  # the full tensor's shape
    context: object  # what the class needs besides its inner tensors, as JSON

    @property
    def kind(self) -> str:
        """The class's name without its module."""
        return self.name.rpartition(".")[2]

    def encode(self) -> str:
        """Return the record as text."""
        return json.dumps({**vars(self), "shape": list(self.shape)}, separators=(",", ":"), allow_nan=False)


def find_record(tree: object) -> SubclassRecord | None:
    """Return the record of a saved wrapper subclass; None for other values, such as a user's own dict."""
    text = tree.get(SUBCLASS) if isinstance(tree, Mapping) else None
    if not isinstance(text, str):
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        return None
    shape = fields["shape"]
    is_sound = all(isinstance(fields[key], str) for key in ("name", "package", "dtype")) and isinstance(shape, list)
    if not is_sound or not all(type(length) is int and length >= 0 for length in shape):
        return None
    return SubclassRecord(**{**fields, "shape": tuple(shape)})


_FIELDS = {"name", "package", "dtype", "shape", "context"}
