"""The record of a wrapper subclass: its class and context as data, next to its inner tensors.

In a saved state, such a tensor is a dict of its inner tensors, and this record as text under the key `SUBCLASS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardckpt.boxes import Shape
from shardckpt.encodings import typed_json
from shardckpt.errors import CheckpointError

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
        return typed_json.dump(self).decode()


def find_record(tree: object) -> SubclassRecord | None:
    """Return the record of a saved wrapper subclass; None for other values."""
    text = tree.get(SUBCLASS) if isinstance(tree, Mapping) else None
    if not isinstance(text, str):
        return None
    try:
        return typed_json.load(SubclassRecord, text.encode())
    except (CheckpointError, UnicodeEncodeError):
        return None  # a dict of a user's own
