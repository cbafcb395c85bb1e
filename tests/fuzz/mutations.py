"""Damage as data: a list of edits that hypothesis draws, shrinks and replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

VALUES = (
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\xff" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\0" * 8,
    b"-1",
    b"1e9",
    b"NaN",
    b"null",
    b"99999999999999999999",
    b'"',
    b"{",
    b"[",
    b"\n",
    b"../",
    b"PK\x01\x02",
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"\x28\xb5\x2f\xfd",
    b"\x93",
    b"\x95" + b"\xff" * 8,
    b"\x8b\xff\xff\xff\x7f",
    b"R",
    b"h\0",
    b".",
    b"(",
    b"\x85",
    b"\x94",
    b"cos\nsystem\n",
)
"""What parsers stumble over: borders of numbers, and marks of the formats."""


class Edit(NamedTuple):
    """One change.

    Attributes:
        kind: `set`, `insert`, `delete`, `repeat`, `cut` or `flip`.
        at: Where: a fraction of the length, in 1/65536, which reaches small files as well as large ones.
        size: Bytes concerned, or the bit.
        value: Bytes to set or insert.
    """

    kind: str
    at: int
    size: int
    value: bytes


edits = st.builds(
    Edit,
    st.sampled_from(["set", "set", "flip", "flip", "insert", "delete", "repeat", "cut"]),
    st.integers(0, 65535),
    st.integers(0, 64),
    st.sampled_from(VALUES) | st.binary(min_size=1, max_size=8),
)
damages = st.lists(edits, min_size=1, max_size=4)


def apply(data: bytes, damage: Sequence[Edit]) -> bytes:
    """Return `data` after every edit, in order."""
    for kind, place, size, value in damage:
        at = len(data) * place // 65536
        if kind == "set":
            data = data[:at] + value + data[at + len(value) :]
        elif kind == "insert":
            data = data[:at] + value + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + 1 + size :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + 1 + size] * 2 + data[at + 1 + size :]
        elif kind == "cut":
            data = data[:at]
        elif data:
            data = data[:at] + bytes([data[at] ^ (1 << size % 8)]) + data[at + 1 :]
    return data
