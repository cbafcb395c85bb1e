"""Storages that a torch pickle refers to: their names, dtypes and byte order; marks for what cannot be read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from shardckpt.dtypes import bits, is_known
from shardckpt.encodings.pickle_reader import StorageType
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.manifest import Lazy, Path, TensorEntry, dotted

# Record that marks tensors in another order than the model's, such as from a sorted source. Torch ignores it.
UNORDERED = ".shardckpt-unordered"

MAX_ELEMENTS = 1 << 60  # elements in a tensor or storage: more than any machine holds

_QUANTISED_BYTES = {"quint8": 1, "qint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}

LEAVE_OUT = "Leave it out with --exclude, or save it dense."


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage that a pickle refers to."""

    key: str  # in the container
    dtype: str  # of the counted elements
    count: int
    base: int = 0  # elements before it, for a view of another storage (before torch 0.4)


class Storages:
    """Converts a torch pickle's persistent ids to storages, and caches them."""

    def __init__(self) -> None:
        self.found: dict[str, StorageRef] = {}

    def __call__(self, key: object) -> object:
        """Return the storage for a persistent id."""
        if not isinstance(key, tuple) or len(key) not in (5, 6) or _decode_name(key[0]) != "storage":
            raise FormatError("the pickle refers to something that is not a storage", found=key)
        kind, name, count = key[1], _decode_name(key[2]), key[4]
        if not isinstance(kind, StorageType) or not isinstance(name, str) or type(count) is not int:
            raise FormatError("the pickle has an unknown kind of storage reference", found=key)
        if not 0 <= count < MAX_ELEMENTS:
            raise FormatError("a storage has an impossible size", found=count)
        ref = StorageRef(name, kind.dtype, count)
        self.found.setdefault(name, ref)
        return _slice_storage(ref, key[5]) if len(key) == 6 and key[5] is not None else ref


def _slice_storage(root: StorageRef, part: object) -> StorageRef:
    """Return the part that `(key, first element, elements)` names, in files from before torch 0.4."""
    if (
        not isinstance(part, tuple)
        or len(part) != 3
        or not all(type(n) is int and n >= 0 for n in part[1:])
        or part[1] + part[2] > root.count
    ):
        raise FormatError("a storage is an impossible view of another", found=part)
    return StorageRef(root.key, root.dtype, part[2], part[1])


def _decode_name(name: object) -> object:
    return name.decode("ascii", "replace") if isinstance(name, bytes) else name


def element_bytes(dtype: str) -> int:
    """Return the bytes per element for a storage's dtype."""
    if dtype in _QUANTISED_BYTES:
        return _QUANTISED_BYTES[dtype]
    if is_known(dtype) and bits(dtype) % 8 == 0:
        return bits(dtype) // 8
    raise UnsupportedError("a storage has an unknown dtype", found=dtype)


def require_little(order: bytes, where: str) -> None:
    """Require `little` as the content of a `byteorder` record."""
    if order != b"little":
        raise big_endian_error(where, order[:16].decode("ascii", "replace"))


def big_endian_error(where: str, found: object) -> UnsupportedError:
    """Return the error for elements in another byte order."""
    return UnsupportedError(
        "written on a big-endian machine",
        where=where,
        found=f"byte order {found}",
        expected="little",
        fix="Load and save it again with torch on a little-endian machine.",
    )


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
