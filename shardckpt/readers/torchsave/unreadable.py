"""Marks for unreadable tensors and values, which the manifest lists so that nothing is missed."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Lazy, Path, TensorEntry, dotted

LEAVE_OUT = "Leave it out with --exclude, or save it dense."


class UnreadableTensor(NamedTuple):
    """Marks a tensor or value that cannot be read."""

    path: Path  # in the saved state
    kind: str  # for messages
    fix: str = LEAVE_OUT  # what the user can do
    is_value: bool = False  # a value that contains tensors, such as a module

    def content_key(self) -> Hashable:
        """Return the same key for all: none can be read."""
        return UnreadableTensor

    def full_checksum(self, size: int) -> None:
        """Return None: the checksum is unknown."""

    def error(self, where: str) -> UnsupportedError:
        """Return the error for reading the tensor."""
        return UnsupportedError(
            f"{dotted(self.path)!r} is {self.kind}",
            where=where,
            expected="a dense tensor",
            fix=self.fix,
        )


def find_value(entry: TensorEntry) -> UnreadableTensor | None:
    """Return an entry's mark if it is a value with tensors that only its own library can read."""
    layout = entry.pieces[0].layout if entry.pieces else None
    detail = layout.detail if isinstance(layout, Lazy) else None
    return detail if isinstance(detail, UnreadableTensor) and detail.is_value else None
